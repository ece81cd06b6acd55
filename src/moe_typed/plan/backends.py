"""Which all-to-all backends there are, what each can carry, and which runners can work behind it: asked here, answered from the table."""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

import attrs

from ..formats import Bf16Rows, Fp8Block128Rows, Fp8Block128SlabRows, MxFp4Rows, MxFp8Rows, Payload
from ..runners.acceptance import RunnerName
from ..stages import (
    AiterSinkInput,
    AiterSlotInput,
    DeepEPLLDispatchOutput,
    DeepEPNormalDispatchOutput,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2MaskedDispatchOutput,
    DeepEPv2PlainDispatchOutput,
    FlatRowsInput,
    MooncakeDispatchOutput,
    MoriEPLLDispatchOutput,
    MoriEPNormalDispatchOutput,
    NixlDispatchOutput,
    RunnerInput,
    StandardDispatchOutput,
)
from ..table import TRANSITIONS, AnyDispatchOutput, Row, Unsupported


@final
class Wire(enum.Enum):
    """Name the payload format that a configuration asks a dispatcher to send; ``auto`` is what the experts take at the least cost."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8_BLOCK128 = "fp8-block128"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"


@final
class Backend(enum.Enum):
    """Name the all-to-all backends, a mode each; ``standard`` sends nothing."""

    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep-normal"
    DEEPEP_LL = "deepep-ll"
    DEEPEP_V2_PLAIN = "deepep-v2-plain"
    DEEPEP_V2_EXPANDED = "deepep-v2-expanded"
    DEEPEP_V2_MASKED = "deepep-v2-masked"
    MORI_NORMAL = "mori-normal"
    MORI_LL = "mori-ll"
    MOONCAKE = "mooncake"
    NIXL = "nixl"

    @property
    def variant(self) -> type[AnyDispatchOutput]:
        """Return the class that its dispatch returns."""
        return _VARIANTS[self]

    @property
    def module(self) -> str:
        """Return the module of the library that it needs; empty for none."""
        return _MODULES[self]

    @property
    def quantises(self) -> bool:
        """Say whether the library quantises bf16 rows itself; the others carry what the sender has made."""
        return self in _QUANTISING

    @property
    def carries(self) -> Mapping[Wire, type[Payload]]:
        """Return what arrives for each wire format that can be asked for; the other formats it cannot carry."""
        return _BY_THE_LIBRARY if self.quantises else _BY_THE_SENDER


_VARIANTS: Final[Mapping[Backend, type[AnyDispatchOutput]]] = MappingProxyType(
    {
        Backend.STANDARD: StandardDispatchOutput,
        Backend.DEEPEP_NORMAL: DeepEPNormalDispatchOutput,
        Backend.DEEPEP_LL: DeepEPLLDispatchOutput,
        Backend.DEEPEP_V2_PLAIN: DeepEPv2PlainDispatchOutput,
        Backend.DEEPEP_V2_EXPANDED: DeepEPv2ExpandedDispatchOutput,
        Backend.DEEPEP_V2_MASKED: DeepEPv2MaskedDispatchOutput,
        Backend.MORI_NORMAL: MoriEPNormalDispatchOutput,
        Backend.MORI_LL: MoriEPLLDispatchOutput,
        Backend.MOONCAKE: MooncakeDispatchOutput,
        Backend.NIXL: NixlDispatchOutput,
    }
)

_MODULES: Final[Mapping[Backend, str]] = MappingProxyType(
    {
        Backend.STANDARD: "",
        Backend.DEEPEP_NORMAL: "deep_ep",
        Backend.DEEPEP_LL: "deep_ep",
        Backend.DEEPEP_V2_PLAIN: "deep_ep",
        Backend.DEEPEP_V2_EXPANDED: "deep_ep",
        Backend.DEEPEP_V2_MASKED: "deep_ep",
        Backend.MORI_NORMAL: "mori",
        Backend.MORI_LL: "mori",
        Backend.MOONCAKE: "mooncake",
        Backend.NIXL: "nixl_ep",
    }
)
_QUANTISING: Final = (Backend.DEEPEP_LL, Backend.MOONCAKE, Backend.NIXL)
_BY_THE_LIBRARY: Final[Mapping[Wire, type[Payload]]] = MappingProxyType({Wire.BF16: Bf16Rows, Wire.FP8_BLOCK128: Fp8Block128SlabRows})
_BY_THE_SENDER: Final[Mapping[Wire, type[Payload]]] = MappingProxyType(
    {Wire.BF16: Bf16Rows, Wire.FP8_BLOCK128: Fp8Block128Rows, Wire.MXFP8: MxFp8Rows, Wire.MXFP4: MxFp4Rows}
)

RUNNER_INPUTS: Final[Mapping[RunnerName, tuple[type[RunnerInput], ...]]] = MappingProxyType(
    {
        RunnerName.TRITON: (FlatRowsInput,),
        RunnerName.AITER: (AiterSlotInput, AiterSinkInput),
        RunnerName.REFERENCE: (FlatRowsInput,),
    }
)
"""The inputs that each runner takes, as its class says; here as data, since asking must import no backend library."""


@final
@attrs.frozen
class Support:
    """Say whether a runner works behind a backend: by which row of the table, or why not. True where it does."""

    backend: Backend
    runner: RunnerName
    row: Row | None
    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        """Say whether it does."""
        return self.row is not None


def supports(backend: Backend, runner: RunnerName) -> Support:
    """Return whether a runner works behind a backend. Weights and wire formats are another question, which a plan answers."""
    reasons: list[str] = []
    for runner_input in RUNNER_INPUTS[runner]:
        cell = TRANSITIONS[backend.variant, runner_input]
        if not isinstance(cell, Unsupported):
            return Support(backend, runner, cell, ())
        reasons.append(f"{runner_input.__qualname__}: {cell.reason.value} ({cell.detail})")
    return Support(backend, runner, None, tuple(reasons))


def backends_of(runner: RunnerName) -> tuple[Backend, ...]:
    """Return every backend that a runner works behind."""
    return tuple(backend for backend in Backend if supports(backend, runner))

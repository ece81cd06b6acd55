"""Which all-to-all backends there are, what each can carry, and which runners can work behind it: asked here, answered from the table."""

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

import attrs

from ..formats import Bf16Rows, Fp8Block128Rows, Fp8Block128SlabRows, Int8TokenRows, MxFp4Rows, MxFp8PairRows, MxFp8Rows, Payload
from ..runners.acceptance import RunnerName
from ..stages import (
    AiterSinkInput,
    AiterSlotInput,
    AscendRowsInput,
    AscendTPDispatchOutput,
    DeepEPLLDispatchOutput,
    DeepEPLLNpuDispatchOutput,
    DeepEPNormalDispatchOutput,
    DeepEPNormalNpuDispatchOutput,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2MaskedDispatchOutput,
    DeepEPv2PlainDispatchOutput,
    FlatRowsInput,
    MooncakeDispatchOutput,
    MoriEPLLDispatchOutput,
    MoriEPNormalDispatchOutput,
    NixlDispatchOutput,
    RunnerInput,
    SegmentRowsInput,
    SlabRowsInput,
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
    INT8 = "int8"


@final
class Backend(enum.Enum):
    """Name the all-to-all backends, a mode each; ``standard`` and ``ascend-tp`` send nothing."""

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
    ASCEND_TP = "ascend-tp"
    DEEPEP_NORMAL_NPU = "deepep-normal-npu"
    DEEPEP_LL_NPU = "deepep-ll-npu"

    @property
    def variant(self) -> type[AnyDispatchOutput]:
        """Return the class that its dispatch returns."""
        return _VARIANTS[self]

    @property
    def module(self) -> str:
        """Return the module of the library that it needs; empty for none."""
        return _MODULES[self]

    @property
    def sends(self) -> bool:
        """Say whether rows go to other ranks; where they do not, every rank has all experts, or a part of each."""
        return self not in (Backend.STANDARD, Backend.ASCEND_TP)

    @property
    def on_npu(self) -> bool:
        """Say whether it is of Ascend NPUs."""
        return self in _NPU

    @property
    def quantises(self) -> bool:
        """Say whether the library quantises bf16 rows itself; the others carry what the sender has made."""
        return self in _QUANTISING

    @property
    def one_route_a_row(self) -> bool:
        """Say whether a row that arrives has one route: to the expert of its slab, segment or group."""
        return self in _ONE_ROUTE

    @property
    def carries(self) -> Mapping[Wire, type[Payload]]:
        """Return what arrives for each wire format that can be asked for; the other formats it cannot carry."""
        if self.on_npu:
            return _BY_THE_NPU
        if self.quantises:
            return _BY_THE_LIBRARY
        return _BY_THE_SENDER if self.sends else _STAYS


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
        Backend.ASCEND_TP: AscendTPDispatchOutput,
        Backend.DEEPEP_NORMAL_NPU: DeepEPNormalNpuDispatchOutput,
        Backend.DEEPEP_LL_NPU: DeepEPLLNpuDispatchOutput,
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
        Backend.ASCEND_TP: "torch_npu",
        Backend.DEEPEP_NORMAL_NPU: "deep_ep",
        Backend.DEEPEP_LL_NPU: "deep_ep",
    }
)
_NPU: Final = (Backend.ASCEND_TP, Backend.DEEPEP_NORMAL_NPU, Backend.DEEPEP_LL_NPU)
_ONE_ROUTE: Final = (Backend.DEEPEP_LL, Backend.DEEPEP_V2_EXPANDED, Backend.DEEPEP_V2_MASKED, Backend.MOONCAKE, Backend.NIXL, *_NPU)
_ON_GPUS: Final = (RunnerName.TRITON, RunnerName.AITER)
_QUANTISING: Final = (Backend.DEEPEP_LL, Backend.MOONCAKE, Backend.NIXL, *_NPU)
_BY_THE_LIBRARY: Final[Mapping[Wire, type[Payload]]] = MappingProxyType({Wire.BF16: Bf16Rows, Wire.FP8_BLOCK128: Fp8Block128SlabRows})
_BY_THE_SENDER: Final[Mapping[Wire, type[Payload]]] = MappingProxyType(
    {Wire.BF16: Bf16Rows, Wire.FP8_BLOCK128: Fp8Block128Rows, Wire.MXFP8: MxFp8Rows, Wire.MXFP4: MxFp4Rows}
)
_STAYS: Final[Mapping[Wire, type[Payload]]] = MappingProxyType({**_BY_THE_SENDER, Wire.INT8: Int8TokenRows})
_BY_THE_NPU: Final[Mapping[Wire, type[Payload]]] = MappingProxyType({Wire.BF16: Bf16Rows, Wire.INT8: Int8TokenRows, Wire.MXFP8: MxFp8PairRows})

RUNNER_INPUTS: Final[Mapping[RunnerName, tuple[type[RunnerInput], ...]]] = MappingProxyType(
    {
        RunnerName.TRITON: (SlabRowsInput, SegmentRowsInput, FlatRowsInput),
        RunnerName.AITER: (AiterSlotInput, AiterSinkInput),
        RunnerName.ASCEND: (AscendRowsInput,),
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
    if backend.on_npu and runner in _ON_GPUS:
        return Support(backend, runner, None, (f"its rows are on an Ascend NPU, where the {runner.value} runner does not run",))
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

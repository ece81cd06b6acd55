"""An AITER in torch on the CPU, hazards included: what an adapter meets where it imports ``aiter``.

It is written from the library's contract alone, and shares no code with what it judges but the codecs of e2m1 and e8m0. Numbers: the weights are read
in the layout that the chosen kernel demands, whether they have it or not; matrices are multiplied in float32, and rounded to the output dtype between
the stages and at the end; the intermediate is quantised as the mode of the weights says. In strict mode every misuse that the real library does not
notice raises EmulatedMisuse; in faithful mode it has the real consequence, and what the contract leaves undefined is NaN.

Choices of its own, where the contract is silent: int8 rounds to the nearest; fp8 with a static scale saturates; without ``is_shuffled`` the weights
are noise, shuffled or not; ``swiglu_limit`` and biases reach the kernels of per_1x32 alone; with gate_mode interleave the kernels of bf16 activations
read gate and up side by side. Swapped halves of w1, and a shuffle that another library did, are invisible in strict mode, too.
"""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Final, Literal, final

import torch
from torch import Tensor

from . import enums
from .dtypes import Dtypes, Gfx
from .kernels import resolve_precision
from .library import Decision, Library, Tuned, Version, VersionName
from .misuse import Judge, Mode
from .quantizers import Quantizer, Quantizers
from .shuffles import Shuffles
from .signatures import FusedMoe, head, wheel
from .signatures_later import later, no_combine

_FACTORIES: Final = {Version.WHEEL: wheel, Version.HEAD: head, Version.LATER: later, Version.NO_COMBINE: no_combine}


@final
class EmulatedAiter:
    """The names of one AITER on one object; ``modules()`` has them where the real library has them."""

    ActivationType: Final = enums.ActivationType
    QuantType: Final = enums.QuantType

    def __init__(
        self,
        *,
        version: VersionName = "head",
        gfx: Gfx = "gfx950",
        mode: Literal["strict", "faithful"] = "strict",
        env: Mapping[str, str] | None = None,
        tuned: Tuned | None = None,
    ) -> None:
        self._library = Library(Version(version), gfx, Judge(Mode(mode)), dict(env or {}), tuned or Tuned())
        shuffles = Shuffles(self._library)
        self.fused_moe: Final[FusedMoe] = _FACTORIES[self._library.version](self._library)
        self.shuffle_weight: Final[Callable[..., Tensor]] = (
            shuffles.shuffle_weight_wheel if self._library.version.is_wheel else shuffles.shuffle_weight
        )
        self.shuffle_weight_a16w4: Final = shuffles.shuffle_weight_a16w4
        self.shuffle_scale: Final = shuffles.shuffle_scale
        self.shuffle_scale_a16w4: Final = shuffles.shuffle_scale_a16w4
        self.e8m0_shuffle: Final = shuffles.e8m0_shuffle
        self._quantizers: Final = Quantizers(self._library).table()

    @property
    def dtypes(self) -> Dtypes:
        """``aiter.dtypes``."""
        return self._library.dtypes

    @property
    def decisions(self) -> list[Decision]:
        """What every call chose so far. The real library does not tell."""
        return self._library.decisions

    def get_hip_quant(self, qType: enums.QuantType) -> Quantizer:  # noqa: N803 - upstream's name
        """Return the quantiser of a granularity: the same function for the same member."""
        return self._quantizers[qType]

    def resolve_activation_dtype(
        self,
        quant_type: enums.QuantType,
        w1_dtype: torch.dtype,
        activation: enums.ActivationType = enums.ActivationType.Silu,
        gate_mode: str = "separated",
        M: int | None = None,  # noqa: N803 - upstream's name
    ) -> torch.dtype | None:
        """Return the precision that a call would get; None where it depends on the rows. Only later versions export it."""
        remapped = enums.QuantType.per_1x128 if quant_type == enums.QuantType.per_128x128 else quant_type
        return resolve_precision(self._library, remapped, w1_dtype, activation, enums.GateMode(gate_mode), M)

    def modules(self) -> dict[str, ModuleType]:
        """Return modules for ``sys.modules`` in which ``import`` finds these names."""
        shuffle = ("shuffle_weight", "shuffle_weight_a16w4", "shuffle_scale", "shuffle_scale_a16w4")
        contents: dict[str, dict[str, object]] = {
            "aiter": {name: getattr(self, name) for name in ("ActivationType", "QuantType", "dtypes", "get_hip_quant")},
            "aiter.fused_moe": {"fused_moe": self.fused_moe},
            "aiter.ops": {},
            "aiter.ops.shuffle": {name: getattr(self, name) for name in shuffle},
            "aiter.utility": {},
            "aiter.utility.fp4_utils": {"e8m0_shuffle": self.e8m0_shuffle},
        }
        if not self._library.version.is_wheel:
            contents["aiter.ops.flydsl"] = {}
            contents["aiter.ops.flydsl.moe_common"] = {"GateMode": enums.GateMode}
        if self._library.version is Version.LATER:
            contents["aiter.fused_moe"]["resolve_activation_dtype"] = self.resolve_activation_dtype
        modules = {name: ModuleType(name) for name in contents}
        for name, module in modules.items():
            vars(module).update(contents[name])
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(modules[parent], child, module)
        return modules

"""How the weights of a checkpoint are stored: plain, fp8 in blocks of 128 x 128, or mxfp8. Everything else is refused by name.

``quant_method`` as it is taken:

* ``fp8`` with ``weight_block_size`` [128, 128], as DeepSeek-V3 and Qwen3-FP8 ship it: ``weight`` in float8_e4m3fn and ``weight_scale_inv``, which
  multiplies. Scales are float32; bfloat16 and e8m0 scales, which some exporters write, are widened to float32, which is exact.
* ``mxfp8`` (``weight_block_size`` absent or [1, 32]), and ``modelopt`` with ``quant_algo`` MXFP8: ``weight`` in float8_e4m3fn and ``weight_scale`` or
  ``weight_scale_inv`` with one e8m0 byte for 32 values, stored as e8m0 or as uint8.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Final, TypeVar, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..formats import (
    AnyExpertWeights,
    Bf16ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp16ExpertWeights,
    Fp32ExpertWeights,
    GateUpOrder,
    MxFp8ExpertWeights,
    e8m0,
)
from .documents import Section
from .errors import CheckpointError

O = TypeVar("O", bound=GateUpOrder)  # noqa: E741  as in formats


@final
@attrs.frozen(eq=False)
class Parts:
    """The assembled tensors of a stack of experts, as the weight classes take them."""

    w13: Tensor
    w2: Tensor
    w13_scale: Tensor | None
    w2_scale: Tensor | None
    b13: Tensor | None
    b2: Tensor | None


@final
@attrs.frozen
class ScaleStorage:
    """How scales are stored: one for each ``block`` of (rows, columns), under one of ``suffixes``, in one of ``stored``, held as ``dtype``."""

    suffixes: tuple[str, ...]
    block: tuple[int, int]
    stored: tuple[str, ...]
    dtype: torch.dtype
    hold: Callable[[Tensor], Tensor]


class Storage(ABC):
    """The base of all ways to store a weight."""

    weight: torch.dtype
    scale: ScaleStorage | None

    @abstractmethod
    def build(self, parts: Parts, order: type[O]) -> AnyExpertWeights[O]:
        """Return the parts as the weight class of this storage."""


@final
@attrs.frozen
class DenseStorage(Storage):
    """Weights in the model's dtype (bf16, fp16 or fp32)."""

    weight: torch.dtype
    scale: ScaleStorage | None = None

    @override
    def build(self, parts: Parts, order: type[O]) -> AnyExpertWeights[O]:
        if self.weight == torch.bfloat16:
            return Bf16ExpertWeights(parts.w13, parts.w2, order, parts.b13, parts.b2)
        if self.weight == torch.float16:
            return Fp16ExpertWeights(parts.w13, parts.w2, order, parts.b13, parts.b2)
        return Fp32ExpertWeights(parts.w13, parts.w2, order, parts.b13, parts.b2)


def _widen(scale: Tensor) -> Tensor:
    return e8m0.decode(scale) if scale.dtype == torch.float8_e8m0fnu else scale.to(torch.float32)


def _as_e8m0(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu)


def _scales(parts: Parts) -> tuple[Tensor, Tensor]:
    if parts.w13_scale is None or parts.w2_scale is None:
        raise AssertionError("a scaled storage plans its scales")
    return parts.w13_scale, parts.w2_scale


@final
@attrs.frozen
class Fp8Block128Storage(Storage):
    """float8_e4m3fn with a scale for each 128 x 128."""

    weight: torch.dtype = torch.float8_e4m3fn
    scale: ScaleStorage | None = ScaleStorage(("_scale_inv",), (128, 128), ("F32", "BF16", "F8_E8M0"), torch.float32, _widen)

    @override
    def build(self, parts: Parts, order: type[O]) -> AnyExpertWeights[O]:
        return Fp8Block128ExpertWeights(parts.w13, parts.w2, *_scales(parts), order, parts.b13, parts.b2)


@final
@attrs.frozen
class MxFp8Storage(Storage):
    """float8_e4m3fn with an e8m0 scale for each 32 values of a row."""

    weight: torch.dtype = torch.float8_e4m3fn
    scale: ScaleStorage | None = ScaleStorage(("_scale", "_scale_inv"), (1, 32), ("F8_E8M0", "U8"), torch.float8_e8m0fnu, _as_e8m0)

    @override
    def build(self, parts: Parts, order: type[O]) -> AnyExpertWeights[O]:
        return MxFp8ExpertWeights(parts.w13, parts.w2, *_scales(parts), order, parts.b13, parts.b2)


# Where exporters list the modules that they left alone.
_SKIPS: Final = ("modules_to_not_convert", "ignored_layers", "exclude_modules", "ignore")


@final
@attrs.frozen
class Quantization:
    """What ``quantization_config`` says: the storage, and the modules that are not stored so."""

    storage: Storage
    skips: tuple[str, ...] = ()

    def covers(self, module: str) -> bool:
        """Say whether a module is stored quantised.

        An entry of the skip list means a module when its dotted parts occur in a row in the module's name, or when its ``*`` pattern matches.
        """
        return not any(fnmatchcase(module, entry) if "*" in entry else f".{entry.strip('.')}." in f".{module}." for entry in self.skips)


def read_quantization(config: Section) -> Quantization | None:
    """Return what a config says of quantisation; None for plain weights. Raises: CheckpointError for what is not supported."""
    section = config.section("quantization_config")
    if section is None:
        return None
    method = section.text("quant_method")
    section.demand("activation_scheme", ("dynamic",))
    section.demand("fmt", ("e4m3", "float8_e4m3fn"))
    section.demand("expert_dtype", ("fp8",))
    skips = tuple(entry for name in _SKIPS for entry in section.texts(name))
    if method == "fp8":
        section.demand("scale_fmt", ("float", "ue8m0"))
        _demand_block(section, (128, 128), required=True)
        return Quantization(Fp8Block128Storage(), skips)
    if method == "mxfp8":
        section.demand("scale_fmt", ("ue8m0",))
        _demand_block(section, (1, 32), required=False)
        return Quantization(MxFp8Storage(), skips)
    if method == "modelopt":
        inner = section.section("quantization") or section
        inner.demand("quant_algo", ("MXFP8",), required=True)
        inner.demand("group_size", (32,))
        return Quantization(MxFp8Storage(), skips + inner.texts("exclude_modules"))
    raise CheckpointError(
        f"the quantisation {method!r} is not supported" if method else "is missing",
        file=config.file,
        subject=f"{section.place}quant_method",
        expected="fp8 with weight_block_size [128, 128], mxfp8, or modelopt with quant_algo MXFP8",
        got=repr(method) if method else "nothing",
    )


def _demand_block(section: Section, block: tuple[int, int], *, required: bool) -> None:
    if section.values.get("weight_block_size") is None and not required:
        return
    found = section.integers("weight_block_size")
    if found != block:
        raise section.fault("weight_block_size", str(list(block)), list(found) or None)

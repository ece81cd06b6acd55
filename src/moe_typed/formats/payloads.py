"""Payload classes: rows of activations together with their scales.

A format is what a class *is*, not a tag on a tensor: two formats that differ in one fact are two classes, and no annotation can relabel one
as the other.
"""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, TypeAlias, final

import torch
from jaxtyping import BFloat16, Float8e4m3fn, Float16, Float32
from torch import Tensor
from typing_extensions import override

from ..boundary import E8M0, Layout, boundary, value_error
from . import e8m0
from .spec import Format, ScaleOrder, ScaleRounding, ScaleSpec

BLOCK_128 = 128  # DeepSeek-V3's activation group: one scale for 128 channels of a token
MX_GROUP = 32  # OCP Microscaling Formats v1.0: 32 values share a scale


class Payload(ABC):
    """The base of all payload formats. ``data`` has the shape (rows, hidden)."""

    format: ClassVar[Format]
    data: Tensor

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the values as float32 (rows, hidden): the meaning of the payload."""

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.data.shape[0]


class DenseRows(Payload):
    """The base of payloads without scales."""

    @override
    def dequantize(self) -> Tensor:
        return self.data.to(torch.float32)


class ScaledRows(Payload):
    """The base of payloads with scales: value = data * scale."""

    scale: Tensor


@final
@boundary
class Bf16Rows(DenseRows):
    """Rows in bfloat16."""

    format: ClassVar[Format] = Format("bf16", torch.bfloat16)
    data: BFloat16[Tensor, "rows hidden"]


@final
@boundary
class Fp16Rows(DenseRows):
    """Rows in float16."""

    format: ClassVar[Format] = Format("fp16", torch.float16)
    data: Float16[Tensor, "rows hidden"]


@final
@boundary
class Fp32Rows(DenseRows):
    """Rows in float32: for references and for checkpoints that were saved so."""

    format: ClassVar[Format] = Format("fp32", torch.float32)
    data: Float32[Tensor, "rows hidden"]


@final
@boundary
class Fp8Block128Rows(ScaledRows):
    """Rows in float8_e4m3fn, one float32 scale for each 128 channels of a row, scales row-major."""

    format: ClassVar[Format] = Format(
        "fp8-block128", torch.float8_e4m3fn, ScaleSpec(torch.float32, (1, BLOCK_128), ScaleOrder.ROW_MAJOR, ScaleRounding.NONE)
    )
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], Layout(contiguous=True)]
    scale: Annotated[Float32[Tensor, "rows hidden//128"], Layout(contiguous=True)]

    @override
    def dequantize(self) -> Tensor:
        return _apply_groups(self.data, self.scale, BLOCK_128)

    def check_values(self) -> None:
        """Raise BoundaryError for a scale that is not finite."""
        if not bool(torch.isfinite(self.scale).all()):
            raise value_error(self, "scale", "holds an infinity or a NaN", "the rows that were quantised held one")


@final
@boundary
class MxFp8Rows(ScaledRows):
    """Rows in float8_e4m3fn, one e8m0 scale for each 32 channels of a row, scales row-major."""

    format: ClassVar[Format] = Format(
        "mxfp8", torch.float8_e4m3fn, ScaleSpec(torch.float8_e8m0fnu, (1, MX_GROUP), ScaleOrder.ROW_MAJOR, ScaleRounding.POWER_OF_TWO_UP)
    )
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], Layout(contiguous=True)]
    scale: Annotated[E8M0[Tensor, "rows hidden//32"], Layout(contiguous=True)]

    @override
    def dequantize(self) -> Tensor:
        return _apply_groups(self.data, e8m0.decode(self.scale), MX_GROUP)

    def check_values(self) -> None:
        """Raise BoundaryError for a scale byte of 255, which is NaN."""
        if bool((self.scale.view(torch.uint8) == 255).any()):
            raise value_error(self, "scale", "holds the byte 255, which is NaN", "the rows that were quantised held an infinity or a NaN")


AnyDenseRows: TypeAlias = Bf16Rows | Fp16Rows | Fp32Rows


def _apply_groups(data: Tensor, scale: Tensor, group: int) -> Tensor:
    rows, hidden = data.shape
    groups = data.to(torch.float32).view(rows, hidden // group, group)
    return (groups * scale.view(rows, hidden // group, 1)).view(rows, hidden)

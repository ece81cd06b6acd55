"""Rows of a slab, as low-latency libraries deliver it: one stretch of ``capacity`` rows for each local expert, end to end.

The data is flat rows like any other. The scales of a slab are column-major within each expert, which flat scales cannot be: hence own classes. A
slab with row-major scales is ``Fp8Block128Rows``, and one without scales is ``Bf16Rows``.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import Float8e4m3fn, Float32, Int32
from torch import Tensor
from typing_extensions import override

from ...boundary import Layout, boundary
from .. import e8m0
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import BLOCK_128, ScaledRows, apply_groups, check_finite, live_index

_SLAB: Final = ScaleSpec(torch.float32, (1, BLOCK_128), ScaleOrder.SLAB_COLUMN_MAJOR, ScaleRounding.NONE)
_PACKED: Final = ScaleSpec(torch.int32, (1, BLOCK_128), ScaleOrder.SLAB_COLUMN_MAJOR, ScaleRounding.POWER_OF_TWO, per_element=4)

_ROW_MAJOR: Final = Layout(contiguous=True)


def _by_row(scale: Tensor) -> Tensor:
    """Return (local_experts, capacity, n) as (rows, n), row-major: a copy, even of one expert or one column, which flattening alone would view."""
    return scale.clone(memory_format=torch.contiguous_format).flatten(0, 1)


class SlabScaledRows(ScaledRows):
    """The base of rows whose scales lie (local_experts, capacity, groups), the rows of an expert next to each other."""

    @property
    @abstractmethod
    def row_scale(self) -> Tensor:
        """Return the scales as float32 (rows, hidden // 128), row-major: a copy."""

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(self.data, self.row_scale, BLOCK_128)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_finite(self, self.row_scale[live_index(live)])


@final
@boundary
class Fp8Block128SlabRows(SlabScaledRows):
    """Slab rows in float8_e4m3fn, one float32 scale for each 128 channels of a row (DeepEP low latency, Mooncake, NIXL)."""

    format: ClassVar[Format] = Format("fp8-block128-slab", torch.float8_e4m3fn, _SLAB)
    data: Annotated[Float8e4m3fn[Tensor, "local_experts*capacity hidden"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, "local_experts capacity hidden//128"], Layout(stride="capacity*(hidden//128) 1 capacity")]

    @property
    @override
    def row_scale(self) -> Tensor:
        return _by_row(self.scale)


@final
@boundary
class Fp8Block128PackedSlabRows(SlabScaledRows):
    """Slab rows in float8_e4m3fn, one e8m0 scale for each 128 channels of a row, four to an int32, the first in the lowest byte.

    ``use_ue8m0`` of DeepEP and NIXL; their hidden widths are multiples of 512, so that every word is full.
    """

    format: ClassVar[Format] = Format("fp8-block128-packed-slab", torch.float8_e4m3fn, _PACKED)
    data: Annotated[Float8e4m3fn[Tensor, "local_experts*capacity hidden"], _ROW_MAJOR]
    scale: Annotated[Int32[Tensor, "local_experts capacity hidden//512"], Layout(stride="capacity*(hidden//512) 1 capacity")]

    @property
    @override
    def row_scale(self) -> Tensor:
        return e8m0.decode(_by_row(self.scale).view(torch.float8_e8m0fnu))

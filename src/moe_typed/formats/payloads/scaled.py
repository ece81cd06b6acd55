"""Rows in eight bits with float32 scales, or with power-of-two scales packed into int32 words.

float8_e4m3fn (NVIDIA, gfx950) and float8_e4m3fnuz (gfx942) are different formats: the same byte means values that differ by a factor of two.
"""

from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import Float8e4m3fn, Float8e4m3fnuz, Float32, Int8, Int32
from torch import Tensor
from typing_extensions import override

from ...boundary import Layout, boundary
from ...ops.scale_layout.reference import unpack_ue8m0
from .. import e8m0
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import BLOCK_128, ScaledRows, apply_groups, check_e8m0, check_finite, live_index

_TENSOR: Final = ScaleSpec(torch.float32, (0, 0), ScaleOrder.SCALAR, ScaleRounding.NONE)
_TOKEN: Final = ScaleSpec(torch.float32, (1, 0), ScaleOrder.PER_ROW, ScaleRounding.NONE)
_BLOCK: Final = ScaleSpec(torch.float32, (1, BLOCK_128), ScaleOrder.ROW_MAJOR, ScaleRounding.NONE)
_COLUMN: Final = ScaleSpec(torch.float32, (1, BLOCK_128), ScaleOrder.COLUMN_MAJOR_ALIGNED, ScaleRounding.NONE)
_PACKED: Final = ScaleSpec(torch.int32, (1, BLOCK_128), ScaleOrder.COLUMN_MAJOR_ALIGNED, ScaleRounding.POWER_OF_TWO, per_element=4)

_ROW_MAJOR: Final = Layout(contiguous=True)
# DeepGEMM's get_mn_major_tma_aligned_tensor: a TMA box begins at a multiple of 16 bytes, which is four rows of four-byte scales.
_ALIGNED: Final = Layout(stride="1 4*(-(-rows//4))")


class TensorScaledRows(ScaledRows):
    """The base of rows under one scale. ``scale``: float32 (1,)."""

    @override
    def dequantize(self) -> Tensor:
        return self.data.to(torch.float32) * self.scale

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_finite(self, self.scale)


class TokenScaledRows(ScaledRows):
    """The base of rows with a scale each. ``scale``: float32 (rows,)."""

    @override
    def dequantize(self) -> Tensor:
        return self.data.to(torch.float32) * self.scale.unsqueeze(1)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_finite(self, self.scale[live_index(live)])


class BlockScaledRows(ScaledRows):
    """The base of rows with a scale for each 128 channels. ``scale``: float32 (rows, hidden // 128), in an order that the class fixes."""

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(self.data, self.scale, BLOCK_128)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_finite(self, self.scale[live_index(live)])


@final
@boundary
class Fp8TensorRows(TensorScaledRows):
    """Rows in float8_e4m3fn under one float32 scale."""

    format: ClassVar[Format] = Format("fp8-tensor", torch.float8_e4m3fn, _TENSOR)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Float32[Tensor, "1"]


@final
@boundary
class Fp8FnuzTensorRows(TensorScaledRows):
    """Rows in float8_e4m3fnuz under one float32 scale."""

    format: ClassVar[Format] = Format("fp8-fnuz-tensor", torch.float8_e4m3fnuz, _TENSOR)
    data: Annotated[Float8e4m3fnuz[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Float32[Tensor, "1"]


@final
@boundary
class Fp8TokenRows(TokenScaledRows):
    """Rows in float8_e4m3fn with a float32 scale each."""

    format: ClassVar[Format] = Format("fp8-token", torch.float8_e4m3fn, _TOKEN)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, " rows"], _ROW_MAJOR]


@final
@boundary
class Fp8FnuzTokenRows(TokenScaledRows):
    """Rows in float8_e4m3fnuz with a float32 scale each."""

    format: ClassVar[Format] = Format("fp8-fnuz-token", torch.float8_e4m3fnuz, _TOKEN)
    data: Annotated[Float8e4m3fnuz[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, " rows"], _ROW_MAJOR]


@final
@boundary
class Int8TokenRows(TokenScaledRows):
    """Rows in int8 with a float32 scale each."""

    format: ClassVar[Format] = Format("int8-token", torch.int8, _TOKEN)
    data: Annotated[Int8[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, " rows"], _ROW_MAJOR]


@final
@boundary
class Fp8Block128Rows(BlockScaledRows):
    """Rows in float8_e4m3fn, one float32 scale for each 128 channels of a row, scales row-major."""

    format: ClassVar[Format] = Format("fp8-block128", torch.float8_e4m3fn, _BLOCK)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, "rows hidden//128"], _ROW_MAJOR]


@final
@boundary
class Fp8FnuzBlock128Rows(BlockScaledRows):
    """Rows in float8_e4m3fnuz, one float32 scale for each 128 channels of a row, scales row-major."""

    format: ClassVar[Format] = Format("fp8-fnuz-block128", torch.float8_e4m3fnuz, _BLOCK)
    data: Annotated[Float8e4m3fnuz[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, "rows hidden//128"], _ROW_MAJOR]


@final
@boundary
class Fp8Block128ColumnRows(BlockScaledRows):
    """Rows in float8_e4m3fn, one float32 scale for each 128 channels of a row, scales column-major with rows padded to four (DeepGEMM on Hopper)."""

    format: ClassVar[Format] = Format("fp8-block128-column", torch.float8_e4m3fn, _COLUMN)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, "rows hidden//128"], _ALIGNED]


@final
@boundary
class Fp8Block128PackedRows(ScaledRows):
    """Rows in float8_e4m3fn, one e8m0 scale for each 128 channels of a row, four to an int32, column-major (DeepGEMM on Blackwell).

    Byte j of word i, counted from the low end, is the scale of group 4 * i + j; groups that there are not have byte 0.
    """

    format: ClassVar[Format] = Format("fp8-block128-packed", torch.float8_e4m3fn, _PACKED)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[Int32[Tensor, "rows -(-(hidden//128)//4)"], _ALIGNED]

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(self.data, e8m0.decode(self._unpacked()), BLOCK_128)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_e8m0(self, self._unpacked()[live_index(live)])

    def _unpacked(self) -> Tensor:
        return unpack_ue8m0(self.scale, self.data.shape[1] // BLOCK_128)

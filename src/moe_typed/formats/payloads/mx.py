"""Rows in microscaling formats: small floats with a scale for each few of them."""

from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import Float8e4m3fn
from torch import Tensor
from typing_extensions import override

from ...boundary import E8M0, Float4e2m1x2, Layout, boundary
from ...ops.scale_layout.reference import unswizzle
from .. import e8m0
from ..scale_factor import ScaleFactor
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import MX_GROUP, NV_GROUP, ScaledRows, apply_groups, check_e8m0, check_finite, e2m1_values, live_index

_MX: Final = ScaleSpec(torch.float8_e8m0fnu, (1, MX_GROUP), ScaleOrder.ROW_MAJOR, ScaleRounding.POWER_OF_TWO)
_SWIZZLED: Final = ScaleSpec(torch.float8_e8m0fnu, (1, MX_GROUP), ScaleOrder.SWIZZLED_128X4, ScaleRounding.POWER_OF_TWO)
_NV: Final = ScaleSpec(torch.float8_e4m3fn, (1, NV_GROUP), ScaleOrder.ROW_MAJOR, ScaleRounding.TO_DTYPE)

_ROW_MAJOR: Final = Layout(contiguous=True)


@final
@boundary
class MxFp8Rows(ScaledRows):
    """Rows in float8_e4m3fn, one e8m0 scale for each 32 channels of a row, scales row-major."""

    format: ClassVar[Format] = Format("mxfp8", torch.float8_e4m3fn, _MX)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[E8M0[Tensor, "rows hidden//32"], _ROW_MAJOR]

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(self.data, e8m0.decode(self.scale), MX_GROUP)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_e8m0(self, self.scale[live_index(live)])


@final
@boundary
class MxFp8SwizzledRows(ScaledRows):
    """Rows in float8_e4m3fn, one e8m0 scale for each 32 channels of a row, scales in tiles of 128 x 4 as Blackwell's matrix instructions read them.

    The scales are flat: 512 bytes for each 128 rows and 4 groups begun. They cannot be cut by rows, hence are no format for the wire.
    """

    format: ClassVar[Format] = Format("mxfp8-swizzled", torch.float8_e4m3fn, _SWIZZLED)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[E8M0[Tensor, "512*(-(-rows//128))*(-(-(hidden//32)//4))"], _ROW_MAJOR]

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(self.data, e8m0.decode(self._row_major()), MX_GROUP)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_e8m0(self, self._row_major()[live_index(live)])

    def _row_major(self) -> Tensor:
        rows, hidden = self.data.shape
        return unswizzle(self.scale, rows, hidden // MX_GROUP)


@final
@boundary
class MxFp4Rows(ScaledRows):
    """Rows in e2m1, two values a byte, the low nibble first; one e8m0 scale for each 32 channels of a row, scales row-major."""

    format: ClassVar[Format] = Format("mxfp4", torch.float4_e2m1fn_x2, _MX, per_element=2)
    data: Annotated[Float4e2m1x2[Tensor, "rows bytes"], _ROW_MAJOR]
    scale: Annotated[E8M0[Tensor, "rows bytes//16"], _ROW_MAJOR]

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(e2m1_values(self.data), e8m0.decode(self.scale), MX_GROUP)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_e8m0(self, self.scale[live_index(live)])


@final
@boundary
class NvFp4Rows(ScaledRows):
    """Rows in e2m1, two values a byte, the low nibble first; one e4m3 scale for each 16 channels of a row, and one float32 scale over all."""

    format: ClassVar[Format] = Format("nvfp4", torch.float4_e2m1fn_x2, _NV, per_element=2)
    data: Annotated[Float4e2m1x2[Tensor, "rows bytes"], _ROW_MAJOR]
    scale: Annotated[Float8e4m3fn[Tensor, "rows bytes//8"], _ROW_MAJOR]
    global_scale: ScaleFactor

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(e2m1_values(self.data), self.scale.to(torch.float32) * self.global_scale.factor, NV_GROUP)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_finite(self, self.scale[live_index(live)].to(torch.float32))
        check_finite(self, self.global_scale.factor, "global_scale")

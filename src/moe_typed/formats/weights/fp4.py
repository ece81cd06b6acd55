"""Expert weights in e2m1, two values a byte along the reduction, the low nibble first."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Float8e4m3fn, Float32
from torch import Tensor
from typing_extensions import override

from ...boundary import E8M0, Float4e2m1x2, Layout, boundary
from .. import e8m0
from ..payloads.base import MX_GROUP, NV_GROUP, e2m1_values
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import O_co, ScaledExpertWeights, Shard, apply_blocks

_ROW_MAJOR: Final = Layout(contiguous=True)
_MX: Final = ScaleSpec(torch.float8_e8m0fnu, (1, MX_GROUP), ScaleOrder.ROW_MAJOR, ScaleRounding.POWER_OF_TWO)
_NV: Final = ScaleSpec(torch.float8_e4m3fn, (1, NV_GROUP), ScaleOrder.ROW_MAJOR, ScaleRounding.TO_DTYPE)
_DATA: Final[Mapping[str, Shard]] = {"w13": Shard(1, 1, joined=True), "w2": Shard(2, 2), "b13": Shard(1, 1, joined=True)}


class Fp4ExpertWeights(ScaledExpertWeights[O_co]):
    """The base of weights in e2m1: ``w13`` (experts, 2 * inter, hidden // 2), ``w2`` (experts, hidden, inter // 2)."""

    @property
    @override
    def inter(self) -> int:
        return 2 * self.w2.shape[2]


@final
@boundary
class MxFp4ExpertWeights(Fp4ExpertWeights[O_co]):
    """Weights in e2m1, one e8m0 scale for each 32 values along the reduction (gpt-oss, row-major)."""

    format: ClassVar[Format] = Format("mxfp4", torch.float4_e2m1fn_x2, _MX, per_element=2)
    sharded: ClassVar[Mapping[str, Shard]] = {**_DATA, "w13_scale": Shard(1, 1, joined=True), "w2_scale": Shard(2, MX_GROUP)}
    w13: Annotated[Float4e2m1x2[Tensor, "experts 4*inter_bytes hidden//2"], _ROW_MAJOR]
    w2: Annotated[Float4e2m1x2[Tensor, "experts hidden inter_bytes"], _ROW_MAJOR]
    w13_scale: Annotated[E8M0[Tensor, "experts 4*inter_bytes hidden//32"], _ROW_MAJOR]
    w2_scale: Annotated[E8M0[Tensor, "experts hidden inter_bytes//16"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 4*inter_bytes"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return apply_blocks(e2m1_values(self.w13[expert]), e8m0.decode(self.w13_scale[expert]), 1, MX_GROUP)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return apply_blocks(e2m1_values(self.w2[expert]), e8m0.decode(self.w2_scale[expert]), 1, MX_GROUP)


@final
@boundary
class NvFp4ExpertWeights(Fp4ExpertWeights[O_co]):
    """Weights in e2m1, one e4m3 scale for each 16 values along the reduction, and float32 scales over whole matrices, which multiply.

    ``w13_global`` (experts, 2) holds gate's and then up's, whatever the order of the rows; ``w2_global`` (experts,).
    """

    format: ClassVar[Format] = Format("nvfp4", torch.float4_e2m1fn_x2, _NV, per_element=2)
    sharded: ClassVar[Mapping[str, Shard]] = {**_DATA, "w13_scale": Shard(1, 1, joined=True), "w2_scale": Shard(2, NV_GROUP)}
    w13: Annotated[Float4e2m1x2[Tensor, "experts 4*inter_bytes hidden//2"], _ROW_MAJOR]
    w2: Annotated[Float4e2m1x2[Tensor, "experts hidden inter_bytes"], _ROW_MAJOR]
    w13_scale: Annotated[Float8e4m3fn[Tensor, "experts 4*inter_bytes hidden//16"], _ROW_MAJOR]
    w2_scale: Annotated[Float8e4m3fn[Tensor, "experts hidden inter_bytes//8"], _ROW_MAJOR]
    w13_global: Annotated[Float32[Tensor, "experts 2"], _ROW_MAJOR]
    w2_global: Annotated[Float32[Tensor, " experts"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 4*inter_bytes"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        joined = apply_blocks(e2m1_values(self.w13[expert]), self.w13_scale[expert].to(torch.float32), 1, NV_GROUP)
        gate, up = self.order.split(joined, 0)
        return self.order.join(gate * self.w13_global[expert, 0], up * self.w13_global[expert, 1], 0)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        values = apply_blocks(e2m1_values(self.w2[expert]), self.w2_scale[expert].to(torch.float32), 1, NV_GROUP)
        return values * self.w2_global[expert]

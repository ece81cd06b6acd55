"""Expert weights in eight bits: under one scale, with a scale a row, in blocks of 128 x 128, in groups of 32."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Float8e4m3fn, Float32, Int8
from torch import Tensor
from typing_extensions import override

from ...boundary import E8M0, Layout, boundary
from .. import e8m0
from ..payloads import BLOCK_128, MX_GROUP
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import O_co, ScaledExpertWeights, Shard, apply_blocks

_ROW_MAJOR: Final = Layout(contiguous=True)
_TENSOR: Final = ScaleSpec(torch.float32, (0, 0), ScaleOrder.SCALAR, ScaleRounding.NONE)
_CHANNEL: Final = ScaleSpec(torch.float32, (1, 0), ScaleOrder.PER_ROW, ScaleRounding.NONE)
_BLOCK: Final = ScaleSpec(torch.float32, (BLOCK_128, BLOCK_128), ScaleOrder.ROW_MAJOR, ScaleRounding.NONE)
_MX: Final = ScaleSpec(torch.float8_e8m0fnu, (1, MX_GROUP), ScaleOrder.ROW_MAJOR, ScaleRounding.POWER_OF_TWO)

_DATA: Final[Mapping[str, Shard]] = {"w13": Shard(1, 1, joined=True), "w2": Shard(2, 1), "b13": Shard(1, 1, joined=True)}
_CHANNEL_SHARDED: Final[Mapping[str, Shard]] = {**_DATA, "w13_scale": Shard(1, 1, joined=True)}


class ChannelScaledExpertWeights(ScaledExpertWeights[O_co]):
    """The base of weights with a scale for each row: ``w13_scale`` (experts, 2 * inter) in the order of the rows, ``w2_scale`` (experts, hidden)."""

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return self.w13[expert].to(torch.float32) * self.w13_scale[expert].unsqueeze(1)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return self.w2[expert].to(torch.float32) * self.w2_scale[expert].unsqueeze(1)


@final
@boundary
class Fp8TensorExpertWeights(ScaledExpertWeights[O_co]):
    """Weights in float8_e4m3fn, one float32 scale a matrix: ``w13_scale`` (experts, 2) holds gate's and then up's, whatever the order of the rows."""

    format: ClassVar[Format] = Format("fp8-tensor", torch.float8_e4m3fn, _TENSOR)
    sharded: ClassVar[Mapping[str, Shard]] = _DATA
    w13: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w13_scale: Annotated[Float32[Tensor, "experts 2"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, " experts"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        gate, up = self.order.split(self.w13[expert].to(torch.float32), 0)
        return self.order.join(gate * self.w13_scale[expert, 0], up * self.w13_scale[expert, 1], 0)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return self.w2[expert].to(torch.float32) * self.w2_scale[expert]


@final
@boundary
class Fp8ChannelExpertWeights(ChannelScaledExpertWeights[O_co]):
    """Weights in float8_e4m3fn, one float32 scale a row."""

    format: ClassVar[Format] = Format("fp8-channel", torch.float8_e4m3fn, _CHANNEL)
    sharded: ClassVar[Mapping[str, Shard]] = _CHANNEL_SHARDED
    w13: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w13_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Int8ChannelExpertWeights(ChannelScaledExpertWeights[O_co]):
    """Weights in int8, one float32 scale a row."""

    format: ClassVar[Format] = Format("int8-channel", torch.int8, _CHANNEL)
    sharded: ClassVar[Mapping[str, Shard]] = _CHANNEL_SHARDED
    w13: Annotated[Int8[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Int8[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w13_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp8Block128ExpertWeights(ScaledExpertWeights[O_co]):
    """Weights in float8_e4m3fn, one float32 scale for each block of 128 x 128 (DeepSeek-V3's ``weight_scale_inv``, which multiplies).

    Gate and up have scale blocks of their own, hence ``2*(inter//128)``: 128 must divide ``inter`` itself.
    """

    format: ClassVar[Format] = Format("fp8-block128", torch.float8_e4m3fn, _BLOCK)
    sharded: ClassVar[Mapping[str, Shard]] = {**_DATA, "w13_scale": Shard(1, BLOCK_128, joined=True), "w2_scale": Shard(2, BLOCK_128)}
    w13: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w13_scale: Annotated[Float32[Tensor, "experts 2*(inter//128) hidden//128"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden//128 inter//128"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return apply_blocks(self.w13[expert], self.w13_scale[expert], BLOCK_128, BLOCK_128)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return apply_blocks(self.w2[expert], self.w2_scale[expert], BLOCK_128, BLOCK_128)


@final
@boundary
class MxFp8ExpertWeights(ScaledExpertWeights[O_co]):
    """Weights in float8_e4m3fn, one e8m0 scale for each 32 values along the reduction."""

    format: ClassVar[Format] = Format("mxfp8", torch.float8_e4m3fn, _MX)
    sharded: ClassVar[Mapping[str, Shard]] = {**_DATA, "w13_scale": Shard(1, 1, joined=True), "w2_scale": Shard(2, MX_GROUP)}
    w13: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w13_scale: Annotated[E8M0[Tensor, "experts 2*inter hidden//32"], _ROW_MAJOR]
    w2_scale: Annotated[E8M0[Tensor, "experts hidden inter//32"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return apply_blocks(self.w13[expert], e8m0.decode(self.w13_scale[expert]), 1, MX_GROUP)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return apply_blocks(self.w2[expert], e8m0.decode(self.w2_scale[expert]), 1, MX_GROUP)

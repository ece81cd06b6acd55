"""Weights without scales, and int8 weights with a scale a row, prepared for AITER."""

from typing import Annotated, Final, final

from jaxtyping import BFloat16, Float16, Float32, Int8
from torch import Tensor
from typing_extensions import override

from ...boundary import Layout, boundary
from ...formats import (
    Bf16ExpertWeights,
    Bf16Rows,
    Fp16ExpertWeights,
    Fp16Rows,
    GateUpOrder,
    Int8ChannelExpertWeights,
    Int8TokenRows,
)
from ..base import PreparedWeights
from .library import AiterLibrary
from .prepared import (
    TILES,
    AiterOptions,
    AiterWeights,
    Operands,
    Scheme,
    TokenScaledWeights,
    gate_up,
    require_gfx,
    require_no_bias,
    require_zero_pads,
)
from .runner import AiterRunner
from .shuffle import shuffle_weight

_ROW_MAJOR: Final = Layout(contiguous=True)


@final
@boundary
class AiterBf16Weights(AiterWeights, PreparedWeights[AiterRunner, Bf16Rows]):
    """Bfloat16 weights in tiles (``QuantType.No``)."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[BFloat16[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[BFloat16[Tensor, "experts hidden inter"], _ROW_MAJOR]

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.DENSE, self.library.no_quant)


@final
@boundary
class AiterFp16Weights(AiterWeights, PreparedWeights[AiterRunner, Fp16Rows]):
    """Float16 weights in tiles (``QuantType.No``)."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float16[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float16[Tensor, "experts hidden inter"], _ROW_MAJOR]

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.DENSE, self.library.no_quant)


@final
@boundary
class AiterInt8TokenWeights(TokenScaledWeights, PreparedWeights[AiterRunner, Bf16Rows | Int8TokenRows]):
    """Int8 weights in tiles with a scale a row, for rows with a scale each (``QuantType.per_Token``)."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Int8[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Int8[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]


def prepare_bf16(weights: Bf16ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterBf16Weights:
    """Shuffle bfloat16 weights."""
    return AiterBf16Weights(library, options, *_dense(weights, library, options))


def prepare_fp16(weights: Fp16ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterFp16Weights:
    """Shuffle float16 weights."""
    return AiterFp16Weights(library, options, *_dense(weights, library, options))


def prepare_int8(weights: Int8ChannelExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterInt8TokenWeights:
    """Shuffle int8 weights; scales keep their order but for gate and up."""
    w1, w2 = _dense(weights, library, options)
    return AiterInt8TokenWeights(library, options, w1, w2, gate_up(weights.w13_scale, weights.order), weights.w2_scale)


def _dense(
    weights: Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Int8ChannelExpertWeights[GateUpOrder],
    library: AiterLibrary,
    options: AiterOptions,
) -> tuple[Tensor, Tensor]:
    require_gfx(library, weights.format.name)
    require_no_bias(weights)
    TILES.require(weights)
    require_zero_pads(weights, options)
    return shuffle_weight(gate_up(weights.w13, weights.order)), shuffle_weight(weights.w2)

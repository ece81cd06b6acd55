"""Fp8 weights prepared for AITER: under one scale, with a scale a row, in blocks of 128 x 128; for gfx950 (e4m3fn) and for gfx942 (e4m3fnuz).

A checkpoint's e4m3fn byte means twice what the same byte means in e4m3fnuz, so that the bytes stay and the scale is doubled; but 0x80, which is -0
there and NaN here, becomes 0 (``e4m3fn_to_e4m3fnuz``).
"""

from typing import Annotated, Final, final

import attrs
import torch
from jaxtyping import Float8e4m3fn, Float8e4m3fnuz, Float32
from torch import Tensor

from ...boundary import Layout, boundary
from ...formats import (
    Bf16Rows,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp8ChannelExpertWeights,
    Fp8FnuzBlock128Rows,
    Fp8FnuzTensorRows,
    Fp8FnuzTokenRows,
    Fp8TensorExpertWeights,
    Fp8TensorRows,
    Fp8TokenRows,
    GateUpOrder,
    Interleaved,
    ScaleFactor,
)
from ..base import PreparedWeights, UnsupportedError
from .library import AiterLibrary
from .prepared import (
    GFX942,
    GFX950,
    TILES,
    AiterOptions,
    BlockScaledWeights,
    TensorScaledWeights,
    TokenScaledWeights,
    gate_up,
    require_gfx,
    require_no_bias,
    require_zero_pads,
)
from .runner import AiterRunner
from .shuffle import shuffle_weight

_ROW_MAJOR: Final = Layout(contiguous=True)
_NEGATIVE_ZERO: Final = 0x80
_NAN: Final = 0x7F  # of e4m3fn, without the sign


@final
@attrs.frozen(eq=False, kw_only=True)
class StaticScales:
    """The scales that a checkpoint was calibrated with for the rows before each product.

    ``w2_input`` must be given. AITER writes a row between the products for each route that stays here, and nothing for one that a mask drops; without
    a static scale it takes the largest value of all of them, of what was never written too (``fused_moe_2stages``). Every input of this runner has a
    mask, and the host does not know whether a route goes where it is 0.

    ``w13_input``: None, and AITER takes the largest value of the rows of a call; those that go nowhere are zeros then.
    """

    w2_input: ScaleFactor
    w13_input: ScaleFactor | None = None


NEEDS_STATIC: Final = (
    "AITER finds the one scale of fp8-tensor rows between the products among rows that it never wrote, wherever a route goes nowhere: "
    "give the scales that the checkpoint was calibrated with, static=StaticScales(w2_input=...)"
)


@final
@boundary
class AiterFp8TensorWeights(TensorScaledWeights, PreparedWeights[AiterRunner, Bf16Rows | Fp8TensorRows]):
    """E4m3fn weights in tiles, one scale an expert (``QuantType.per_Tensor``). ``a1_scale``, ``a2_scale``: see ``StaticScales``."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[Float32[Tensor, " experts"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, " experts"], _ROW_MAJOR]
    a1_scale: Float32[Tensor, "1"] | None
    a2_scale: Float32[Tensor, "1"]


@final
@boundary
class AiterFp8FnuzTensorWeights(TensorScaledWeights, PreparedWeights[AiterRunner, Bf16Rows | Fp8FnuzTensorRows]):
    """E4m3fnuz weights in tiles, one scale an expert (``QuantType.per_Tensor``). ``a1_scale``, ``a2_scale``: see ``StaticScales``."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float8e4m3fnuz[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fnuz[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[Float32[Tensor, " experts"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, " experts"], _ROW_MAJOR]
    a1_scale: Float32[Tensor, "1"] | None
    a2_scale: Float32[Tensor, "1"]


@final
@boundary
class AiterFp8TokenWeights(TokenScaledWeights, PreparedWeights[AiterRunner, Bf16Rows | Fp8TokenRows]):
    """E4m3fn weights in tiles with a scale a row (``QuantType.per_Token``)."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]


@final
@boundary
class AiterFp8FnuzTokenWeights(TokenScaledWeights, PreparedWeights[AiterRunner, Bf16Rows | Fp8FnuzTokenRows]):
    """E4m3fnuz weights in tiles with a scale a row (``QuantType.per_Token``)."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float8e4m3fnuz[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fnuz[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]


@final
@boundary
class AiterFp8Block128Weights(BlockScaledWeights, PreparedWeights[AiterRunner, Bf16Rows | Fp8Block128Rows]):
    """E4m3fn weights in tiles, one scale a block of 128 x 128 (``QuantType.per_128x128``)."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[Float32[Tensor, "experts 2*(inter//128) hidden//128"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden//128 inter//128"], _ROW_MAJOR]


@final
@boundary
class AiterFp8FnuzBlock128Weights(BlockScaledWeights, PreparedWeights[AiterRunner, Bf16Rows | Fp8FnuzBlock128Rows]):
    """E4m3fnuz weights in tiles, one scale a block of 128 x 128 (``QuantType.per_128x128``)."""

    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float8e4m3fnuz[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fnuz[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[Float32[Tensor, "experts 2*(inter//128) hidden//128"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden//128 inter//128"], _ROW_MAJOR]


@final
@attrs.frozen(eq=False)
class _Matrices:
    """Two weights with their scales."""

    w1: Tensor
    w2: Tensor
    w1_scale: Tensor
    w2_scale: Tensor

    def shuffled(self) -> "_Matrices":
        return _Matrices(shuffle_weight(self.w1), shuffle_weight(self.w2), self.w1_scale, self.w2_scale)

    def fnuz(self) -> "_Matrices":
        return _Matrices(e4m3fn_to_e4m3fnuz(self.w1), e4m3fn_to_e4m3fnuz(self.w2), self.w1_scale * 2, self.w2_scale * 2)


_Fp8Weights = Fp8TensorExpertWeights[GateUpOrder] | Fp8ChannelExpertWeights[GateUpOrder] | Fp8Block128ExpertWeights[GateUpOrder]


def prepare_fp8_tensor(
    weights: Fp8TensorExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions, static: StaticScales | None
) -> AiterFp8TensorWeights:
    """Bring gate and up under one scale (``join_scales``), and shuffle."""
    _check(weights, library, options, GFX950)
    if static is None:
        raise UnsupportedError(NEEDS_STATIC)
    made = _joined(weights).shuffled()
    a1_scale = None if static.w13_input is None else static.w13_input.factor
    return AiterFp8TensorWeights(library, options, made.w1, made.w2, made.w1_scale, made.w2_scale, a1_scale, static.w2_input.factor)


def prepare_fp8_tensor_fnuz(
    weights: Fp8TensorExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions, static: StaticScales | None
) -> AiterFp8FnuzTensorWeights:
    """Do the same in e4m3fnuz: static scales are doubled too."""
    _check(weights, library, options, GFX942)
    if static is None:
        raise UnsupportedError(NEEDS_STATIC)
    made = _joined(weights).fnuz().shuffled()
    a1_scale = None if static.w13_input is None else static.w13_input.factor * 2
    return AiterFp8FnuzTensorWeights(library, options, made.w1, made.w2, made.w1_scale, made.w2_scale, a1_scale, static.w2_input.factor * 2)


def prepare_fp8_token(weights: Fp8ChannelExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterFp8TokenWeights:
    """Shuffle; scales keep their order but for gate and up."""
    _check(weights, library, options, GFX950)
    made = _ordered(weights).shuffled()
    return AiterFp8TokenWeights(library, options, made.w1, made.w2, made.w1_scale, made.w2_scale)


def prepare_fp8_token_fnuz(weights: Fp8ChannelExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterFp8FnuzTokenWeights:
    """Do the same in e4m3fnuz."""
    _check(weights, library, options, GFX942)
    made = _ordered(weights).fnuz().shuffled()
    return AiterFp8FnuzTokenWeights(library, options, made.w1, made.w2, made.w1_scale, made.w2_scale)


def prepare_fp8_block(weights: Fp8Block128ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterFp8Block128Weights:
    """Shuffle; scales keep their order but for gate and up."""
    _check(weights, library, options, GFX950)
    made = _ordered(weights).shuffled()
    return AiterFp8Block128Weights(library, options, made.w1, made.w2, made.w1_scale, made.w2_scale)


def prepare_fp8_block_fnuz(
    weights: Fp8Block128ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions
) -> AiterFp8FnuzBlock128Weights:
    """Do the same in e4m3fnuz."""
    _check(weights, library, options, GFX942)
    made = _ordered(weights).fnuz().shuffled()
    return AiterFp8FnuzBlock128Weights(library, options, made.w1, made.w2, made.w1_scale, made.w2_scale)


def _check(weights: _Fp8Weights, library: AiterLibrary, options: AiterOptions, gfx: str) -> None:
    if {library.facts.gfx, gfx} == {GFX942, GFX950}:
        other, form = ("prepare_aiter_fnuz", "e4m3fnuz") if gfx == GFX950 else ("prepare_aiter", "e4m3fn")
        raise UnsupportedError(f"fp8 is {form} on {library.facts.gfx}: prepare {weights.format.name} weights with {other}")
    require_gfx(library, weights.format.name, gfx)
    if weights.order is Interleaved and isinstance(weights, Fp8Block128ExpertWeights):
        raise UnsupportedError("a block of 128 interleaved rows has one scale for gate and up, which AITER wants apart; quantise them apart")
    require_no_bias(weights)
    TILES.require(weights)
    require_zero_pads(weights, options)
    if gfx == GFX942 and any(bool(((data.view(torch.uint8) & _NAN) == _NAN).any()) for data in (weights.w13, weights.w2)):
        raise UnsupportedError(f"{weights.format.name} weights hold a NaN, whose bytes are numbers in e4m3fnuz")


def _ordered(weights: Fp8ChannelExpertWeights[GateUpOrder] | Fp8Block128ExpertWeights[GateUpOrder]) -> _Matrices:
    return _Matrices(gate_up(weights.w13, weights.order), weights.w2, gate_up(weights.w13_scale, weights.order), weights.w2_scale)


def _joined(weights: Fp8TensorExpertWeights[GateUpOrder]) -> _Matrices:
    w1, w1_scale = join_scales(gate_up(weights.w13, weights.order), weights.w13_scale)
    return _Matrices(w1, weights.w2, w1_scale, weights.w2_scale)


# ---- named rules ---------------------------------------------------------------------------------------------------------------------------


def join_scales(w13: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return gate and up (experts, 2 * inter, hidden) under the larger of their two scales (experts, 2), and that scale (experts,).

    The half with the larger scale keeps its bytes; the other is rounded anew to e4m3fn: never beyond the range, but with fewer steps near zero. AITER
    has one scale an expert.
    """
    joint = scale.amax(1)
    ratio = torch.where(joint.unsqueeze(1) == 0, 1.0, scale / joint.unsqueeze(1))
    experts, rows, hidden = w13.shape
    halves = w13.to(torch.float32).view(experts, 2, rows // 2, hidden) * ratio[:, :, None, None]
    return halves.view(w13.shape).to(w13.dtype), joint


def e4m3fn_to_e4m3fnuz(data: Tensor) -> Tensor:
    """Return the same bytes as e4m3fnuz, where they mean half as much, with -0 as 0."""
    stored = data.view(torch.uint8)
    return torch.where(stored == _NEGATIVE_ZERO, 0, stored).view(torch.float8_e4m3fnuz)

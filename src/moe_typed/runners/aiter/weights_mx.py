"""Microscaled weights prepared for AITER (``QuantType.per_1x32``): mxfp4 in three layouts, one a precision of the rows, and mxfp8.

Which precision AITER chooses depends on its version, on the architecture, on the environment and on the number of rows (``admission``); the layout is
chosen here, once, and a call that would read it as another one is refused.
"""

import enum
from typing import Annotated, ClassVar, Final, final

from jaxtyping import Float8e4m3fn, Float32
from torch import Tensor
from typing_extensions import override

from ...boundary import E8M0, Float4e2m1x2, Layout, boundary
from ...formats import Bf16Rows, GateUpOrder, MxFp4ExpertWeights, MxFp4Rows, MxFp8ExpertWeights, MxFp8Rows
from ..base import PreparedWeights
from ..widths import Widths
from .library import AiterLibrary
from .prepared import (
    GFX950,
    LANES,
    MXFP4_LANES,
    MXFP4_TILES,
    AiterOptions,
    AiterWeights,
    Operands,
    Scheme,
    biases,
    gate_up,
    require_gate_modes,
    require_gfx,
    require_zero_pads,
)
from .runner import AiterRunner
from .shuffle import e8m0_shuffle, shuffle_scale_a16w4, shuffle_weight, shuffle_weight_a16w4

_ROW_MAJOR: Final = Layout(contiguous=True)


@final
class MxFp4Layout(enum.Enum):
    """Choose how mxfp4 weights are prepared, by the rows that their kernels take: ``A<bits of the rows>W4``.

    ``A4W4``: fp4 rows; AITER's choice for silu. ``A16W4``: bf16 rows; its choice for the clamped swiglu and few rows. ``A8W4``: tiles of gate and up
    alternate; fp8 rows on gfx950 where there are enough of them, bf16 rows else, of the same layout.
    """

    A4W4 = "a4w4"
    A16W4 = "a16w4"
    A8W4 = "a8w4"


class MicroscaledWeights(AiterWeights):
    """The base of weights with e8m0 scales for each 32 values."""

    w1_scale: Tensor
    w2_scale: Tensor
    b1: Tensor | None
    b2: Tensor | None


@final
@boundary
class AiterMxFp4A4W4Weights(MicroscaledWeights, PreparedWeights[AiterRunner, Bf16Rows | MxFp4Rows]):
    """Mxfp4 weights in tiles, scales in ``e8m0_shuffle``'s, for fp4 rows."""

    widths: ClassVar[Widths] = MXFP4_TILES
    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float4e2m1x2[Tensor, "experts 4*half hidden//2"], _ROW_MAJOR]
    w2: Annotated[Float4e2m1x2[Tensor, "experts hidden half"], _ROW_MAJOR]
    w1_scale: Annotated[E8M0[Tensor, "256*(-(-(experts*4*half)//256)) 8*(-(-(hidden//32)//8))"], _ROW_MAJOR]
    w2_scale: Annotated[E8M0[Tensor, "256*(-(-(experts*hidden)//256)) 8*(-(-(half//16)//8))"], _ROW_MAJOR]
    b1: Annotated[Float32[Tensor, "experts 4*half"], _ROW_MAJOR] | None = None
    b2: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR] | None = None

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.A4W4, self.library.per_1x32, self.w1_scale, self.w2_scale, self.b1, self.b2)


@final
@boundary
class AiterMxFp4A16W4Weights(MicroscaledWeights, PreparedWeights[AiterRunner, Bf16Rows]):
    """Mxfp4 weights and scales in the order of lanes, all of gate before all of up, for bf16 rows."""

    widths: ClassVar[Widths] = MXFP4_LANES
    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float4e2m1x2[Tensor, "experts 4*half hidden//2"], _ROW_MAJOR]
    w2: Annotated[Float4e2m1x2[Tensor, "experts hidden half"], _ROW_MAJOR]
    w1_scale: Annotated[E8M0[Tensor, "experts*4*half 8*(-(-(hidden//32)//8))"], _ROW_MAJOR]
    w2_scale: Annotated[E8M0[Tensor, "experts*hidden 8*(-(-(half//16)//8))"], _ROW_MAJOR]
    b1: Annotated[Float32[Tensor, "experts 4*half"], _ROW_MAJOR] | None = None
    b2: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR] | None = None

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.A16W4, self.library.per_1x32, self.w1_scale, self.w2_scale, self.b1, self.b2)


@final
@boundary
class AiterMxFp4A8W4Weights(MicroscaledWeights, PreparedWeights[AiterRunner, Bf16Rows | MxFp8Rows]):
    """Mxfp4 weights and scales in the order of lanes, tiles of gate and up alternating (``gate_mode`` "interleave"), for fp8 rows and bf16 rows."""

    widths: ClassVar[Widths] = MXFP4_LANES
    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float4e2m1x2[Tensor, "experts 4*half hidden//2"], _ROW_MAJOR]
    w2: Annotated[Float4e2m1x2[Tensor, "experts hidden half"], _ROW_MAJOR]
    w1_scale: Annotated[E8M0[Tensor, "experts*4*half 8*(-(-(hidden//32)//8))"], _ROW_MAJOR]
    w2_scale: Annotated[E8M0[Tensor, "experts*hidden 8*(-(-(half//16)//8))"], _ROW_MAJOR]
    b1: Annotated[Float32[Tensor, "experts 4*half"], _ROW_MAJOR] | None = None
    b2: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR] | None = None

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.A8W4, self.library.per_1x32, self.w1_scale, self.w2_scale, self.b1, self.b2)


@final
@boundary
class AiterMxFp8Weights(MicroscaledWeights, PreparedWeights[AiterRunner, Bf16Rows | MxFp8Rows]):
    """Mxfp8 weights in the order of lanes, tiles of gate and up alternating; w1's scales as its rows, w2's in ``e8m0_shuffle``'s tiles."""

    widths: ClassVar[Widths] = LANES
    library: AiterLibrary
    options: AiterOptions
    w1: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w1_scale: Annotated[E8M0[Tensor, "experts*2*inter 8*(-(-(hidden//32)//8))"], _ROW_MAJOR]
    w2_scale: Annotated[E8M0[Tensor, "256*(-(-(experts*hidden)//256)) 8*(-(-(inter//32)//8))"], _ROW_MAJOR]
    b1: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR] | None = None
    b2: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR] | None = None

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.MXFP8, self.library.per_1x32, self.w1_scale, self.w2_scale, self.b1, self.b2)


def prepare_mxfp4_a4w4(weights: MxFp4ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterMxFp4A4W4Weights:
    """Shuffle weights and scales in tiles. fp4 products are gfx950's (CDNA4)."""
    require_gfx(library, f"{weights.format.name} a4w4", GFX950)
    AiterMxFp4A4W4Weights.widths.require(weights)
    require_zero_pads(weights, options)
    w1, s1 = gate_up(weights.w13, weights.order), gate_up(weights.w13_scale, weights.order)
    scales = (e8m0_shuffle(s1), e8m0_shuffle(weights.w2_scale))
    return AiterMxFp4A4W4Weights(library, options, shuffle_weight(w1), shuffle_weight(weights.w2), *scales, *biases(weights))


def prepare_mxfp4_a16w4(weights: MxFp4ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterMxFp4A16W4Weights:
    """Shuffle weights and scales in lanes."""
    require_gfx(library, weights.format.name)
    return AiterMxFp4A16W4Weights(library, options, *_in_lanes(weights, AiterMxFp4A16W4Weights.widths, options, interleave=False), *biases(weights))


def prepare_mxfp4_a8w4(weights: MxFp4ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterMxFp4A8W4Weights:
    """Shuffle weights and scales in lanes, gate and up interleaved."""
    require_gfx(library, weights.format.name)
    require_gate_modes(library, "the layout a8w4")
    return AiterMxFp4A8W4Weights(library, options, *_in_lanes(weights, AiterMxFp4A8W4Weights.widths, options, interleave=True), *biases(weights))


def prepare_mxfp8(weights: MxFp8ExpertWeights[GateUpOrder], library: AiterLibrary, options: AiterOptions) -> AiterMxFp8Weights:
    """Shuffle weights in lanes, gate and up interleaved. Microscaled fp8 products are gfx950's (CDNA4)."""
    require_gfx(library, weights.format.name, GFX950)
    require_gate_modes(library, f"the format {weights.format.name}")
    w1, w2, s1, _ = _in_lanes(weights, AiterMxFp8Weights.widths, options, interleave=True)
    return AiterMxFp8Weights(library, options, w1, w2, s1, e8m0_shuffle(weights.w2_scale), *biases(weights))


def _in_lanes(
    weights: MxFp4ExpertWeights[GateUpOrder] | MxFp8ExpertWeights[GateUpOrder], widths: Widths, options: AiterOptions, *, interleave: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return both weights, then both scales."""
    widths.require(weights)
    require_zero_pads(weights, options)
    w1, s1 = gate_up(weights.w13, weights.order), gate_up(weights.w13_scale, weights.order)
    return (
        shuffle_weight_a16w4(w1, gate_up=interleave),
        shuffle_weight_a16w4(weights.w2, gate_up=False),
        shuffle_scale_a16w4(s1, gate_up=interleave),
        shuffle_scale_a16w4(weights.w2_scale, gate_up=False),
    )

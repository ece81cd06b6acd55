"""What all weights prepared for AITER have in common, and what is done to every checkpoint on the way."""

import enum
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Final, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ...formats import ExpertWeights, GateUp, GateUpOrder, MxFp4ExpertWeights
from ..activations import Activation
from ..base import UnsupportedError
from ..widths import Widths
from .library import AiterLibrary
from .shuffle import LANE_COLUMNS, TILE_COLUMNS

if TYPE_CHECKING:
    from aiter import QuantType

    from .runner import AiterRunner

GFX942: Final = "gfx942"  # CDNA3: fp8 is e4m3fnuz, and there is no microscaling
GFX950: Final = "gfx950"  # CDNA4: fp8 is e4m3fn; fp4 and microscaled matrix instructions
_KNOWN_GFX: Final = (GFX942, GFX950)  # on gfx1250 layouts and precisions are others


def _whole(columns: int, per_element: int = 1) -> Widths:
    """Ask for whole tiles of columns; both widths are columns of one of the two weights. Rows come in tiles that are no taller (16, of scales 32)."""
    return Widths(columns * per_element, columns * per_element, why="in which AITER shuffles these weights")


TILES: Final = _whole(TILE_COLUMNS)  # of shuffle_weight
MXFP4_TILES: Final = _whole(TILE_COLUMNS, MxFp4ExpertWeights.format.per_element)
LANES: Final = _whole(LANE_COLUMNS)  # of shuffle_weight_a16w4 and shuffle_scale_a16w4
MXFP4_LANES: Final = _whole(LANE_COLUMNS, MxFp4ExpertWeights.format.per_element)


@final
class Scheme(enum.Enum):
    """Name the layouts of weights by the activations that their kernels multiply them with."""

    DENSE = "as the rows are"
    PER_TENSOR = "fp8 under one scale"
    PER_TOKEN = "with a scale a row"  # noqa: S105 - no password
    PER_BLOCK = "fp8 in blocks of 128"
    A4W4 = "mxfp4 rows, mxfp4 weights"
    A16W4 = "bf16 rows, mxfp4 weights"
    A8W4 = "mxfp8 rows, mxfp4 weights"
    MXFP8 = "mxfp8 rows, mxfp8 weights"

    @property
    def interleaves(self) -> bool:
        """Say whether tiles of gate and up rows alternate, for which ``gate_mode`` is "interleave"."""
        return self in (Scheme.A8W4, Scheme.MXFP8)


@final
@attrs.frozen
class AiterOptions:
    """What a caller may choose. Raises: ValueError for pads below zero.

    ``doweight_stage1``: multiply by the router weight before the activation, and not after the second product; models that are trained so need it.
    ``hidden_pad``, ``intermediate_pad``: how many columns at the end of hidden, and of inter, hold nothing but zeros, so that kernels may skip them.
    """

    doweight_stage1: bool = False
    hidden_pad: int = 0
    intermediate_pad: int = 0

    def __attrs_post_init__(self) -> None:
        for name, pad in (("hidden_pad", self.hidden_pad), ("intermediate_pad", self.intermediate_pad)):
            if pad < 0:
                raise ValueError(f"{name} is {pad}; it must be 0 or more")


DEFAULT_OPTIONS: Final = AiterOptions()


@final
@attrs.frozen(eq=False)
class Operands:
    """What ``fused_moe`` is given beside the two weights, and how they lie. ``a1_scale``, ``a2_scale``: static scales of the rows, float32 (1,)."""

    scheme: Scheme
    quant_type: "QuantType"
    w1_scale: Tensor | None = None
    w2_scale: Tensor | None = None
    b1: Tensor | None = None
    b2: Tensor | None = None
    a1_scale: Tensor | None = None
    a2_scale: Tensor | None = None


class AiterWeights(ABC):
    """The base of weights prepared for AITER: gate rows before up rows, shuffled, with scales in the order that the kernels read.

    What was done is in the class; nothing in the tensors tells.
    """

    widths: ClassVar[Widths] = TILES
    library: AiterLibrary
    options: AiterOptions
    w1: Tensor
    w2: Tensor

    @abstractmethod
    def operands(self) -> Operands:
        """Return what goes with the weights."""

    @property
    def num_experts(self) -> int:
        """Return how many experts there are on this rank."""
        return self.w1.shape[0]

    @property
    def hidden(self) -> int:
        """Return the width of the model."""
        return self.w2.shape[1]

    def runner(self, activation: Activation) -> "AiterRunner":
        """Return the runner over these weights. Raises: UnsupportedError for an activation that AITER's kernels cannot do with them."""
        from .runner import make_runner

        return make_runner(self, activation)


class TensorScaledWeights(AiterWeights):
    """The base of weights with one scale an expert and matrix. ``a1_scale``, ``a2_scale``: static scales of the rows before each product."""

    w1_scale: Tensor
    w2_scale: Tensor
    a1_scale: Tensor | None
    a2_scale: Tensor

    @override
    def operands(self) -> Operands:
        scales = (self.w1_scale, self.w2_scale)
        return Operands(Scheme.PER_TENSOR, self.library.per_tensor, *scales, a1_scale=self.a1_scale, a2_scale=self.a2_scale)


class TokenScaledWeights(AiterWeights):
    """The base of weights with a scale a row, for rows with a scale each."""

    w1_scale: Tensor
    w2_scale: Tensor

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.PER_TOKEN, self.library.per_token, self.w1_scale, self.w2_scale)


class BlockScaledWeights(AiterWeights):
    """The base of weights in blocks of 128 x 128, for rows with a scale for each 128 channels."""

    w1_scale: Tensor
    w2_scale: Tensor

    @override
    def operands(self) -> Operands:
        return Operands(Scheme.PER_BLOCK, self.library.per_128x128, self.w1_scale, self.w2_scale)


# ---- refusals, before any work --------------------------------------------------------------------------------------------------------


def require_gfx(library: AiterLibrary, name: str, *wanted: str) -> None:
    """Raise UnsupportedError unless the architecture is one of ``wanted``, or one that is known if none is given."""
    gfx, allowed = library.facts.gfx, wanted or _KNOWN_GFX
    if gfx not in allowed:
        raise UnsupportedError(f"{name} weights need {' or '.join(allowed)} with AITER; this is {gfx or 'no device that torch knows'}")


def require_gate_modes(library: AiterLibrary, name: str) -> None:
    """Raise UnsupportedError for a version without gate modes."""
    if not library.facts.has_gate_modes:
        raise UnsupportedError(f"AITER {library.facts.version} has no gate modes, which {name} needs; a later one has")


def require_no_bias(weights: ExpertWeights[GateUpOrder]) -> None:
    """Raise UnsupportedError for biases, which AITER ignores without a word unless weights are microscaled."""
    if weights.b13 is not None or weights.b2 is not None:
        raise UnsupportedError(f"AITER drops the biases of {weights.format.name} weights: its kernels add those of mxfp4 and mxfp8 weights alone")


def require_zero_pads(weights: ExpertWeights[GateUpOrder], options: AiterOptions) -> None:
    """Raise UnsupportedError where what is to be skipped holds something. Reads the weights."""
    for name, pad, size in (("hidden_pad", options.hidden_pad, weights.hidden), ("intermediate_pad", options.intermediate_pad, weights.inter)):
        if pad > size:
            raise UnsupportedError(f"{name} = {pad} is more than there is, {size}")
        if pad % weights.format.per_element:
            raise UnsupportedError(f"{name} = {pad} ends within a byte of {weights.format.name} weights")
    hidden, inter = (pad // weights.format.per_element for pad in (options.hidden_pad, options.intermediate_pad))
    if hidden and _holds(weights.w13[:, :, -hidden:]):
        raise UnsupportedError(f"hidden_pad = {options.hidden_pad}, but the last columns of w13 are not zero")
    if inter and _holds(weights.w2[:, :, -inter:]):
        raise UnsupportedError(f"intermediate_pad = {options.intermediate_pad}, but the last columns of w2 are not zero")
    if options.intermediate_pad:
        halves = weights.order.split(bytes_of(weights.w13), 1)
        if any(_holds(half[:, -options.intermediate_pad :].view(weights.w13.dtype)) for half in halves):
            raise UnsupportedError(f"intermediate_pad = {options.intermediate_pad}, but the last rows of gate or up are not zero")


def _holds(values: Tensor) -> bool:
    """Say whether anything is not zero, of either sign."""
    if values.dtype is torch.float4_e2m1fn_x2:
        return bool((values.view(torch.uint8) & 0x77).any())  # two codes a byte, without their signs
    return bool((values.to(torch.float32) != 0).any())


# ---- what is done to tensors ------------------------------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor of small floats as bytes, for torch does not move all of them; others as they are."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def gate_up(joined: Tensor, order: type[GateUpOrder], dim: int = 1) -> Tensor:
    """Return rows, scales or biases with all of gate before all of up: AITER's order, and what its interleaving shuffles begin with."""
    if order is GateUp:
        return joined
    return GateUp.join(*order.split(bytes_of(joined), dim), dim).view(joined.dtype)


def biases(weights: ExpertWeights[GateUpOrder]) -> tuple[Tensor | None, Tensor | None]:
    """Return both biases in float32, which is all that ``fused_moe`` takes, gate before up."""
    b13, b2 = weights.b13, weights.b2
    return (
        None if b13 is None else gate_up(b13, weights.order).to(torch.float32).contiguous(),
        None if b2 is None else b2.to(torch.float32).contiguous(),
    )

"""Which component stands behind an activation. There is no fall-through: what is not named is refused."""

from typing import Final

from ...formats import GateUp, Int8TokenRows
from ..activations import Activation, GeluAndMul, GeluTanhAndMul, SiluAndMul, SwigluClamped, SwigluOai, SwigluStep
from ..base import UnsupportedError
from .components.activation import (
    AscendActivation,
    ClippedSwiglu,
    ClippedSwigluQuant,
    GeluAndMulHalves,
    SortedSwiglu,
    SortedSwigluOai,
    SortedSwigluOaiQuant,
    SortedSwigluQuant,
    StepSwiglu,
    Swiglu,
    SwigluQuant,
)
from .components.rows import HalfRows
from .library import AscendLibrary

_SILU_ALPHA: Final = 1.0  # g * sigmoid(g) is silu

ASCEND_ACTIVATIONS: Final = (SiluAndMul.name, SwigluOai.name, SwigluStep.name, SwigluClamped.name, GeluAndMul.name, GeluTanhAndMul.name)
"""The names of the activations that the Ascend runner does; mxfp8 weights do the first alone."""


def half_activation(library: AscendLibrary, activation: Activation) -> AscendActivation[GateUp, HalfRows]:
    """Return the component that does not quantise. Raises: UnsupportedError for an activation that has none."""
    ops, extension = library.ops, library.extension
    match activation:
        case SiluAndMul():
            return Swiglu(ops) if extension is None else SortedSwiglu(extension)
        case SwigluOai(alpha=alpha, limit=limit):
            return ClippedSwiglu(ops, GateUp, alpha, limit) if extension is None else SortedSwigluOai(extension, alpha, limit)
        case SwigluStep(limit=limit):
            return StepSwiglu(limit) if extension is None else SortedSwiglu(extension, limit)
        case SwigluClamped(limit=limit):
            return ClippedSwiglu(ops, GateUp, _SILU_ALPHA, limit, shift=0.0)
        case GeluAndMul():
            return GeluAndMulHalves()
        case GeluTanhAndMul():
            return GeluAndMulHalves(tanh=True)
        case _:
            raise refuse_activation(activation)


def int8_activation(library: AscendLibrary, activation: Activation) -> AscendActivation[GateUp, HalfRows | Int8TokenRows]:
    """Return the component before a product of int8 rows: one that quantises, where there is one. Raises: as ``half_activation``."""
    ops, extension = library.ops, library.extension
    match activation:
        case SiluAndMul():
            return SwigluQuant(ops) if extension is None else SortedSwigluQuant(extension)
        case SwigluOai(alpha=alpha, limit=limit):
            return ClippedSwigluQuant(ops, GateUp, alpha, limit) if extension is None else SortedSwigluOaiQuant(extension, alpha, limit)
        case SwigluClamped(limit=limit):
            return ClippedSwigluQuant(ops, GateUp, _SILU_ALPHA, limit, shift=0.0)
        case SwigluStep(limit=limit) if extension is not None:
            return SortedSwigluQuant(extension, limit)
        case _:
            return half_activation(library, activation)


def refuse_activation(activation: Activation) -> UnsupportedError:
    """Return the error for an activation that these weights have no component for."""
    return UnsupportedError(f"the Ascend runner has no component for the activation {activation!r}, and does not put another in its place")

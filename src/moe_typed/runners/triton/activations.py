"""What the kernels make of an activation. Importing this does not import Triton."""

from ...formats import GateUp, GateUpOrder, Interleaved, Ungated, UpGate
from ...ops.activation.spec import Split
from ...ops.quantised_product.spec import NOTHING, Epilogue, Formula
from ..activations import (
    Activation,
    GeluAndMul,
    GeluTanhAndMul,
    OpaqueActivation,
    Relu2,
    SiluAndMul,
    SwigluClamped,
    SwigluOai,
    SwigluStep,
    ThenNorm,
)
from ..base import UnsupportedError


def epilogue_of(activation: Activation) -> Epilogue:
    """Return the formula of an activation, which is to be called as it is where the formula is nothing.

    Parameters become floats: a whole number is a float to a type checker, but to Triton another variant of a kernel.

    Raises: UnsupportedError for a class that is not known.
    """
    match activation:
        case SiluAndMul():
            return Epilogue(Formula.GATED)
        case SwigluOai(alpha=alpha, limit=limit):
            return Epilogue(Formula.GATED, float(alpha), float(limit), 1.0)
        case SwigluClamped(limit=limit):
            return Epilogue(Formula.GATED, limit=float(limit))
        case SwigluStep(limit=limit):
            return Epilogue(Formula.STEP, limit=float(limit))
        case GeluAndMul():
            return Epilogue(Formula.GELU)
        case GeluTanhAndMul():
            return Epilogue(Formula.GELU_TANH)
        case Relu2():
            return Epilogue(Formula.RELU2)
        case OpaqueActivation():
            return NOTHING
        case ThenNorm(inner=inner):
            return epilogue_of(inner)
        case _:
            raise UnsupportedError(f"the Triton runner does not know the activation {activation.name!r}")


def split_of(order: type[GateUpOrder], inter: int) -> Split | None:
    """Return where gate and up lie among the columns of the first product, None for experts without a gate.

    Raises: UnsupportedError for an order that the kernels do not know.
    """
    splits = {GateUp: Split(0, inter, 1), UpGate: Split(inter, 0, 1), Interleaved: Split(0, 1, 2), Ungated: None}
    if order not in splits:
        raise UnsupportedError(f"the Triton runner does not know the gate/up order {order.__qualname__}")
    return splits[order]


def is_gate(activation: Activation, order: type[GateUpOrder]) -> bool:
    """Say whether the tuned kernels do it: g * sigmoid(alpha * g) * (u + shift) with limits, over pairs."""
    return order is not Ungated and isinstance(activation, (SiluAndMul, SwigluOai, SwigluClamped))

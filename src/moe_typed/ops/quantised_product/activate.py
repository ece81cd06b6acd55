"""What becomes of the columns of a product, inside a kernel: float32, and NaN stays NaN (comparisons, since tl.minimum passes over it)."""

import triton
import triton.language as tl

from ..up_product.triton import gated
from .spec import Formula

_NOTHING = tl.constexpr(Formula.NOTHING.value)
_STEP = tl.constexpr(Formula.STEP.value)
_GELU = tl.constexpr(Formula.GELU.value)
_GELU_TANH = tl.constexpr(Formula.GELU_TANH.value)
_RELU2 = tl.constexpr(Formula.RELU2.value)
_SQRT_HALF = tl.constexpr(0.5**0.5)
_TWICE_SQRT_2_OVER_PI = tl.constexpr(2.0 * (2.0 / 3.141592653589793) ** 0.5)
_CUBE = tl.constexpr(0.044715)


@triton.jit
def activate_pair(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, shift: tl.tensor, FORMULA: tl.constexpr) -> tl.tensor:
    """See spec.Formula."""
    if FORMULA == _STEP:
        silu = gate * tl.sigmoid(gate)
        clamped = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        value = tl.where(silu > limit, limit, silu) * clamped
    elif FORMULA == _GELU:
        value = 0.5 * gate * (1.0 + tl.erf(gate * _SQRT_HALF)) * up
    elif FORMULA == _GELU_TANH:
        # (1 + tanh(x)) / 2 is sigmoid(2 * x).
        value = gate * tl.sigmoid((gate + gate * gate * gate * _CUBE) * _TWICE_SQRT_2_OVER_PI) * up
    else:
        value = gated(gate, up, alpha, limit, shift)
    return value


@triton.jit
def activate_one(value: tl.tensor, FORMULA: tl.constexpr) -> tl.tensor:
    """See spec.Formula."""
    if FORMULA == _RELU2:
        kept = tl.where(value < 0.0, 0.0, value)
        value = kept * kept
    return value

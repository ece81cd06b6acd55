"""Scores inside kernels, to about 1e-7 of their value at any logit; softmax is left to the kernels, since it takes the whole row."""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG2_E_REST = tl.constexpr(1.9259629911266175e-8)  # log2(e) minus its float32
_LN_2 = tl.constexpr(0.6931471805599453)
_EXP_BOUND = tl.constexpr(104.0)  # beyond it exp(x) is infinite and exp(-x) zero, subnormals included
_SOFTPLUS_BOUND = tl.constexpr(20.0)  # torch.nn.functional.softplus's
_EPSILON = tl.constexpr(1e-20)  # reference.EPSILON


@triton.jit
def exp(x: tl.tensor) -> tl.tensor:
    """Return the exponential. tl.exp is exp2 of a rounded x * log2(e), off by about |x| / 2 ulp; here the rounding error is put back."""
    x = tl.where(x < -_EXP_BOUND, -_EXP_BOUND, tl.where(x > _EXP_BOUND, _EXP_BOUND, x))  # no infinity reaches the fma; NaN passes
    power = x * _LOG2_E
    error = tl.fma(x, _LOG2_E, -power) + x * _LOG2_E_REST
    return tl.exp2(power) * (1.0 + error * _LN_2)


@triton.jit
def score(logits: tl.tensor, SIGMOID: tl.constexpr) -> tl.tensor:
    """Return the sigmoid or else the sqrt_softplus of the logits."""
    if SIGMOID:
        return 1.0 / (1.0 + exp(-logits))
    power = exp(logits)
    shifted = 1.0 + power
    # log1p(power), in which the quotient gives back what 1 + power rounded away (Kahan).
    softplus = tl.where(shifted == 1.0, power, tl.log(shifted) * (power / (shifted - 1.0)))
    return tl.sqrt(tl.where(logits > _SOFTPLUS_BOUND, logits, softplus))


@triton.jit
def renormalize(weights: tl.tensor) -> tl.tensor:
    """Return each row divided by its sum; columns that do not count hold 0."""
    return weights / (tl.sum(weights, 1) + _EPSILON)[:, None]

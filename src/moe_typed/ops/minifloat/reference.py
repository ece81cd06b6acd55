"""Small numbers in torch operations. Everything is exact or rounded once, so that kernels agree bit for bit."""

from itertools import pairwise

import torch
from torch import Tensor

from .spec import E2M1, E8M0_NAN, INT8, MXFP_ROUNDING, Number, power_of_two

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the magnitudes of e2m1 by code
_TWO_TO_MINUS_127 = 0x00400000  # the bits of a float32, a subnormal
_NAN = 0x7FC00000


def divide(value: Tensor, divisor: float) -> Tensor:
    """Return the correctly rounded quotient: torch on CUDA multiplies by the reciprocal where the divisor is a Python number."""
    return value / torch.full((), divisor, dtype=value.dtype, device=value.device)


def encode_e2m1(value: Tensor) -> Tensor:
    """Return the codes of float32 values, uint8: the nearest, ties to the even code, saturating. Zero keeps its sign, and a NaN is 6."""
    magnitude = torch.where(value.abs() < E2M1.max, value.abs(), float(E2M1.max))
    code = torch.zeros(value.shape, dtype=torch.uint8, device=value.device)
    for code_below, (low, high) in enumerate(pairwise(_E2M1)):
        tie = (low + high) / 2
        code += (magnitude >= tie) if code_below % 2 else (magnitude > tie)
    is_negative = torch.signbit(value) & ~torch.isnan(value)
    return torch.where(is_negative, code + 8, code)


def decode_e2m1(code: Tensor) -> Tensor:
    """Return the float32 values of e2m1 codes, uint8 below 16."""
    return torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device=code.device)[code.to(torch.int64)]


def pack_e2m1(codes: Tensor) -> Tensor:
    """Return pairs of codes (..., n) as float4_e2m1fn_x2 (..., n / 2), the first of a pair in the low half of the byte."""
    return (codes[..., 0::2] | codes[..., 1::2] << 4).view(torch.float4_e2m1fn_x2)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Return the codes again."""
    pairs = packed.view(torch.uint8)
    return torch.stack((pairs & 0xF, pairs >> 4), -1).flatten(-2)


def encode_fp8(value: Tensor, number: Number, dtype: torch.dtype) -> Tensor:
    """Return float32 values as float8: the nearest, ties to the even code, finite values saturating. Every NaN is the positive one."""
    return torch.where(torch.isnan(value), torch.nan, value.clamp(-number.max, number.max)).to(dtype)


def encode_int8(value: Tensor) -> Tensor:
    """Return float32 values as int8: the nearest, ties to even, saturating at 127 and -127. A NaN is 127."""
    return torch.where(value < INT8.max, value, float(INT8.max)).clamp(min=-INT8.max).round().to(torch.int8)


def encode_e8m0(amax: Tensor, number: Number, rounding: MXFP_ROUNDING) -> Tensor:
    """Return the scale of groups with the largest magnitudes ``amax``, float32 that are not negative, as float8_e8m0fnu; see spec.power_of_two."""
    rule = power_of_two(number, rounding)
    exponent = ((amax.view(torch.int32) + rule.carry) >> 23) - rule.exponent
    return torch.where(torch.isfinite(amax), exponent.clamp(min=0), E8M0_NAN).to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Return float8_e8m0fnu scales as float32, by the bits: a cast would turn 2^-127 into zero where subnormals are flushed."""
    exponent = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(exponent == 0, _TWO_TO_MINUS_127, torch.where(exponent == E8M0_NAN, _NAN, exponent << 23))
    return bits.view(torch.float32)

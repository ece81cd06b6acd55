"""The e8m0 codec: a byte b stands for 2^(b-127), and 255 for NaN (OCP Microscaling Formats v1.0, section 5.4.1).

There is no zero, no sign and no infinity: byte 0 is 2^-127, which float32 holds as a subnormal.
"""

import torch
from torch import Tensor

from ..ops.minifloat.reference import decode_e8m0
from ..ops.minifloat.spec import E8M0_NAN

_EXPONENT_BITS = 23  # float32: the exponent field starts above 23 mantissa bits
_TWO_TO_MINUS_127_BITS = 0x00400000


def decode(scale: Tensor) -> Tensor:
    """Return e8m0 scales as float32. ``scale``: float8_e8m0fnu, any shape."""
    return decode_e8m0(scale)


def encode_up(value: Tensor) -> Tensor:
    """Return the smallest power of two that is not below each value, as float8_e8m0fnu.

    ``value``: float32, any shape. Zeros and positive values up to 2^-127 give byte 0; negative values, values above 2^127, infinities and NaN
    give byte 255 (NaN), for e8m0 has neither a sign nor an infinity.
    """
    bits = value.contiguous().view(torch.int32)
    exponent = (bits >> _EXPONENT_BITS) & 0xFF
    mantissa = bits & 0x7FFFFF
    # A subnormal above 2^-127 (mantissa 0x400000) needs 2^-126, byte 1: the same carry as for a normal number above its power of two.
    carries = torch.where(exponent == 0, mantissa > _TWO_TO_MINUS_127_BITS, mantissa > 0)
    up = torch.clamp(exponent + carries.to(torch.int32), max=E8M0_NAN)
    negative = (bits < 0) & ((exponent | mantissa) > 0)  # by the bits, as -0.0 is zero and a subnormal is not
    return torch.where(negative, E8M0_NAN, up).to(torch.uint8).view(torch.float8_e8m0fnu)


def is_power_of_two(value: Tensor) -> Tensor:
    """Return, for each float32 value, whether an e8m0 byte holds it exactly."""
    return decode(encode_up(value)) == value

"""The number formats that scaled data is held in, and the rules that choose a power of two for a scale."""

from typing import Final, Literal, NamedTuple, TypeAlias

import torch

NO_NAN: Final = -1
NO_MANTISSA: Final = -1

MXFP_ROUNDING: TypeAlias = Literal["up", "floor", "even"]


class Number(NamedTuple):
    """A format of ``bits``: the sign, an exponent field biased by ``bias``, and ``mantissa`` bits; subnormals where the exponent field is 0.

    Integers have no exponent field, and NO_MANTISSA.
    """

    bits: int
    mantissa: int
    bias: int
    max: int  # the largest finite value
    nan: int  # the code of NaN; e4m3fnuz has it where others have -0.0


E4M3FN: Final = Number(8, 3, 7, 448, 0x7F)
E4M3FNUZ: Final = Number(8, 3, 8, 240, 0x80)
E2M1: Final = Number(4, 1, 1, 6, NO_NAN)
INT8: Final = Number(8, NO_MANTISSA, 0, 127, NO_NAN)  # symmetric: -128 is never written

NUMBERS: Final = {
    torch.float8_e4m3fn: E4M3FN,
    torch.float8_e4m3fnuz: E4M3FNUZ,
    torch.float4_e2m1fn_x2: E2M1,
    torch.int8: INT8,
}

_MANTISSA = 23  # bits of float32
E8M0_NAN: Final = 0xFF


class PowerOfTwo(NamedTuple):
    """A rule for the power of two, as the exponent field of a float32, that a group of the largest magnitude amax is divided by.

    It is the exponent field of amax, after ``carry`` was added to its bits, less ``exponent``; 0, which stands for 2^-127, where that is below 0.
    """

    carry: int
    exponent: int


def power_of_two(number: Number, rounding: MXFP_ROUNDING) -> PowerOfTwo:
    """Return the rule.

    ``up``: the smallest power of two that is not below amax / number.max; nothing saturates (RCEIL, NVIDIA). ``floor``: 2^floor(log2(amax)) over
    the largest power of two of the format; what is above number.max saturates (OCP Microscaling Formats v1.0, section 6.3). ``even``: the same
    after amax was rounded to the mantissa of the format, ties up (AITER's and Quark's; half of what saturates with ``floor`` does not).
    """
    exponent = number.max.bit_length() - 1  # 448 is 1.75 * 2^8
    carry = {
        "up": 2**_MANTISSA - (number.max - 2**exponent) * 2 ** (_MANTISSA - exponent) - 1,  # carries where the mantissa is above that of number.max
        "floor": 0,
        "even": 2 ** (_MANTISSA - number.mantissa - 1),
    }
    return PowerOfTwo(carry[rounding], exponent)

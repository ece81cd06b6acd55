"""Small numbers inside kernels: the functions of reference.py, with the numbers of spec.Number as constants."""

import triton
import triton.language as tl
from triton import knobs

from .spec import E4M3FN, E4M3FNUZ, E8M0_NAN, NO_MANTISSA

_MANTISSA = tl.constexpr(23)  # float32: bits of mantissa,
_BIAS = tl.constexpr(127)  # bias,
_EXPONENT = tl.constexpr(0x7F800000)  # and the exponent's field
_TWO_TO_MINUS_127 = tl.constexpr(0x00400000)  # a subnormal
_NAN = tl.constexpr(0x7FC00000)
_NO_MANTISSA = tl.constexpr(NO_MANTISSA)
_E4M3FN_NAN = tl.constexpr(E4M3FN.nan)
_E4M3FNUZ_NAN = tl.constexpr(E4M3FNUZ.nan)
_E8M0_NAN = tl.constexpr(E8M0_NAN)
_CONVERTS = tl.constexpr(not knobs.runtime.interpret)  # the hardware converts e4m3fn; Triton's interpreter rounds wrongly


@triton.jit
def bits_of(value: tl.tensor) -> tl.tensor:
    """Return the bits of float32 values as int32."""
    return value.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits: tl.tensor) -> tl.tensor:
    """Return the float32 values with these bits, int32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(value: tl.tensor, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MAX: tl.constexpr, NAN: tl.constexpr) -> tl.tensor:
    """Return the codes of float32 values, in the last byte: the nearest, ties to the even code, saturating; a NaN without a code is as MAX."""
    if MANTISSA == _NO_MANTISSA:
        # 1.5 * 2^23 has steps of 1, and its last byte is 0. The choice takes MAX for NaN, and keeps product and sum two roundings.
        code = bits_of(tl.where(value < MAX, value, MAX) + 12582912.0)
    elif NAN == _E4M3FN_NAN and _CONVERTS:
        code = value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        # Added to 2^(23 - MANTISSA) times its binade, a value is rounded to the steps of its code, and their number stands in the last bits. The
        # exponent stands above: shifted onto the number, it completes the code, but for a constant, which start takes out of the last bits.
        # Below the smallest normal number, steps shrink no more.
        shift: tl.constexpr = _MANTISSA - MANTISSA
        start: tl.constexpr = -(shift + _BIAS + 1 - BIAS) % (1 << (BITS - 1 - MANTISSA))
        magnitude = tl.minimum(tl.abs(value), MAX)
        binade = float_of(bits_of(tl.maximum(magnitude, 2.0 ** (1 - BIAS))) & _EXPONENT)
        steps = bits_of(tl.fma(binade, 2.0**shift + start, magnitude))
        code = (steps + (steps >> shift)) & ((1 << (BITS - 1)) - 1)
        sign = bits_of(value) >> (32 - BITS) & (1 << (BITS - 1))
        code = code | (tl.where(code == 0, 0, sign) if NAN == _E4M3FNUZ_NAN else sign)
        if NAN >= 0:
            code = tl.where(value == value, code, NAN)
    return code


@triton.jit
def decode(code: tl.tensor, BITS: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, NAN: tl.constexpr) -> tl.tensor:
    """Return the float32 values of codes, uint8."""
    if MANTISSA == _NO_MANTISSA:
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif NAN == _E4M3FN_NAN and _CONVERTS:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        # Put the fields where float32 has them; what is missing is the difference of the biases, for subnormals too.
        sign_bit: tl.constexpr = 1 << (BITS - 1)
        wide = code.to(tl.int32)
        magnitude = wide & (sign_bit - 1)
        value = float_of(magnitude << (_MANTISSA - MANTISSA) | (wide & sign_bit) << (32 - BITS)) * 2.0 ** (_BIAS - BIAS)
        if NAN >= 0:
            value = tl.where((wide if NAN == _E4M3FNUZ_NAN else magnitude) == NAN, float("nan"), value)
    return value


@triton.jit
def encode_e4m3fn(value: tl.tensor) -> tl.tensor:
    """Return the codes of float32 values, uint8."""
    return encode(value, 8, 3, 7, 448, 0x7F).to(tl.uint8)


@triton.jit
def decode_e4m3fn(code: tl.tensor) -> tl.tensor:
    """Return the float32 values of codes, uint8."""
    return decode(code, 8, 3, 7, 0x7F)


@triton.jit
def encode_e8m0(amax: tl.tensor, CARRY: tl.constexpr, EXPONENT: tl.constexpr) -> tl.tensor:
    """Return the e8m0 bytes, int32, of groups with the largest magnitudes ``amax``; see spec.PowerOfTwo."""
    exponent = tl.maximum(((bits_of(amax) + CARRY) >> _MANTISSA) - EXPONENT, 0)
    return tl.where(amax < float("inf"), exponent, _E8M0_NAN)


@triton.jit
def decode_e8m0(byte: tl.tensor) -> tl.tensor:
    """Return the float32 values of e8m0 bytes, int32."""
    bits = tl.maximum(byte << _MANTISSA, _TWO_TO_MINUS_127)
    return float_of(tl.where(byte == _E8M0_NAN, _NAN, bits))


@triton.jit
def reciprocal_e8m0(byte: tl.tensor) -> tl.tensor:
    """Return 1 over the values of e8m0 bytes, int32 below 254 or NaN: exactly."""
    return float_of(tl.where(byte == _E8M0_NAN, _NAN, (2 * _BIAS - byte) << _MANTISSA))

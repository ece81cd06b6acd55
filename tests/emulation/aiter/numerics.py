"""The number formats between bytes and float32: rounding of scales per version, quantisation, and back."""

import torch
from torch import Tensor

from moe_typed.ops.minifloat.reference import decode_e2m1, decode_e8m0, encode_e2m1, pack_e2m1, unpack_e2m1

from .dtypes import FP8_MAX
from .enums import MxRounding

MX_GROUP = 32
FP8_GROUP = 128
_MX_FP8_FLOAT_SCALE = 256.0  # what per-1x32 fp8 with float32 scales divides amax by; not the largest fp8
_FP4 = torch.float4_e2m1fn_x2
_NAN_BYTE = 0xFF
# The largest value P, the exponent q of the largest power of two, and the mantissa bits.
_TRAITS = {_FP4: (6.0, 2, 1), torch.float8_e4m3fn: (448.0, 8, 3), torch.float8_e4m3fnuz: (240.0, 7, 3)}


def _exponent_field(value: Tensor) -> Tensor:
    return (value.contiguous().view(torch.int32) >> 23) & 0xFF


def e8m0_scale(amax: Tensor, dtype: torch.dtype, rounding: MxRounding = MxRounding.RoundUp) -> Tensor:
    """Return the scale of blocks with the largest magnitudes ``amax``, float32, for payloads of ``dtype``, as float8_e8m0fnu."""
    largest, q, mantissa_bits = _TRAITS[dtype]
    match rounding:
        case MxRounding.RoundUp:
            byte = _rounded_up(amax / largest)
        case MxRounding.Ceil:
            byte = _rounded_up(amax / 2.0**q)
        case MxRounding.RoundDown:
            byte = _exponent_field(amax / 2.0**q)
        case _:
            carried = (amax.contiguous().view(torch.int32) + 2 ** (22 - mantissa_bits)) & 0x7F800000
            byte = _exponent_field(carried.view(torch.float32) / 2.0**q)
    return torch.where(torch.isfinite(amax), byte, _NAN_BYTE).to(torch.uint8).view(torch.float8_e8m0fnu)


def _rounded_up(value: Tensor) -> Tensor:
    mantissa = value.contiguous().view(torch.int32) & 0x7FFFFF
    return (_exponent_field(value) + (mantissa > 0).to(torch.int32)).clamp(max=_NAN_BYTE)


def e8m0_scale_wheel(amax: Tensor) -> Tensor:
    """Return the wheel's scale for fp4: amax / 4, to the nearest power of two, a mantissa of 1.5 going up."""
    quarter = amax / 4.0
    mantissa = quarter.contiguous().view(torch.int32) & 0x7FFFFF
    byte = (_exponent_field(quarter) + (mantissa >= 0x400000).to(torch.int32)).clamp(max=_NAN_BYTE)
    return byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def encode(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 as fp8 or int8: the nearest, saturating."""
    if dtype is torch.int8:
        return value.nan_to_num().round().clamp(-127, 127).to(torch.int8)
    return value.clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)


def largest(dtype: torch.dtype) -> float:
    """Return the largest value of a payload with continuous scales."""
    return 127.0 if dtype is torch.int8 else FP8_MAX[dtype]


def _safe(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def quantize_groups(x: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """Return payload (..., n) and float32 scales (..., n / group) of float32 rows."""
    split = _grouped(x, group)
    scale = _safe(split.abs().amax(-1) / largest(dtype))
    return encode(split / scale[..., None], dtype).flatten(-2), scale


def quantize_tensor(x: Tensor, dtype: torch.dtype, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return payload and one float32 scale (1,), the given one where there is one."""
    chosen = _safe((x.abs().amax() / largest(dtype)).reshape(1)) if scale is None else scale
    return encode(x / chosen, dtype), chosen


def quantize_mx_fp4(x: Tensor, *, wheel: bool) -> tuple[Tensor, Tensor]:
    """Return e2m1 pairs (m, n / 2) and e8m0 scales (m, n / 32)."""
    split = _grouped(x, MX_GROUP)
    amax = split.abs().amax(-1)
    scale = e8m0_scale_wheel(amax) if wheel else e8m0_scale(amax, _FP4)
    return pack_e2m1(encode_e2m1(split / decode_e8m0(scale)[..., None]).flatten(-2)), scale


def quantize_mx_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp8 (m, n) and e8m0 scales (m, n / 32)."""
    split = _grouped(x, MX_GROUP)
    scale = e8m0_scale(split.abs().amax(-1), dtype)
    return encode(split / decode_e8m0(scale)[..., None], dtype).flatten(-2), scale


def quantize_fp8_float_scale(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return fp8 (m, n) and float32 scales (m, n / 32), amax / 256: what per-1x32 gives where no scale_type is asked for."""
    split = _grouped(x, MX_GROUP)
    scale = _safe(split.abs().amax(-1) / _MX_FP8_FLOAT_SCALE)
    return encode(split / scale[..., None], dtype).flatten(-2), scale


def dequantize(payload: Tensor, scale: Tensor) -> Tensor:
    """Return float32 of fp8, int8 or e2m1 pairs; every scale of the last dimension, e8m0 or float32, holds for as many columns as divide."""
    values = decode_e2m1(unpack_e2m1(payload)) if payload.dtype is _FP4 else payload.float()
    factors = decode_e8m0(scale) if scale.dtype is torch.float8_e8m0fnu else scale
    return values * factors.repeat_interleave(values.shape[-1] // factors.shape[-1], -1)

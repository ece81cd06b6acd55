"""Rounding, int4 and scales that are carried in other dtypes."""

from typing import Final

import torch
from torch import Tensor

from tests.emulation.hazards import poison_

INT8_MAX: Final = 127
INT4_MAX: Final = 7
_NIBBLES: Final = 8  # of an int32
_FP19: Final = 0xFFFFE000  # sign, exponent and the upper ten bits of the fraction
_FP19_MARK: Final = 1 << 46
_OFFSET_SHIFT: Final = 37
_OFFSET_BITS: Final = 0x1FF
_LOW_32: Final = 0xFFFFFFFF


def split_last(x: Tensor, size: int) -> Tensor:
    """Return (.., n) as (.., n / size, size)."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def quantize_rows(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return float rows as integers in float32, rounded half to even, and scales amax / limit. A row of zeros has zeros and the scale 0."""
    scale = x.abs().amax(-1) / limit
    quotient = torch.where(scale[..., None] > 0, x / scale[..., None], 0.0)
    return quotient.round().clamp(-limit - 1, limit), scale


def round_half_up(x: Tensor) -> Tensor:
    """Return floor(x + 1/2)."""
    return (x + 0.5).floor()


def to_int8(x: Tensor) -> Tensor:
    """Return integers in float32 as int8, saturated; NaN is undefined."""
    undefined = torch.isnan(x)
    result = x.nan_to_num(0.0).clamp(-128, 127).to(torch.int8)
    return torch.where(undefined, poison_(torch.empty_like(result)), result)


# ---- int4 ------------------------------------------------------------------------------------------------------------------------------


def pack_int4(values: Tensor) -> Tensor:
    """Return integers -8..7 (.., n) as int32 (.., n / 8): element i of a word in bits 4 i .. 4 i + 3."""
    shifts = 4 * torch.arange(_NIBBLES)
    words = ((split_last(values.long(), _NIBBLES) & 15) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_int4(words: Tensor) -> Tensor:
    """Return int32 (.., n / 8) as integers -8..7 (.., n), float32."""
    nibbles = (words.long()[..., None] >> (4 * torch.arange(_NIBBLES))) & 15
    return torch.where(nibbles > INT4_MAX, nibbles - 16, nibbles).flatten(-2).float()


# ---- scales ----------------------------------------------------------------------------------------------------------------------------


def carried_scale(carrier: Tensor) -> Tensor:
    """Return the float32 whose bits are the low half of each int64."""
    low = carrier.view(torch.int64) & _LOW_32
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32).view(torch.float32)


def is_quant_param(carrier: Tensor) -> bool:
    """Return whether npu_trans_quant_param made this: a carrier of bits has zeros in its upper half."""
    return bool((carrier.view(torch.int64) & _FP19_MARK).any())


def quant_param(scale: Tensor, offset: Tensor | None) -> Tensor:
    """Return what npu_trans_quant_param makes of float32 scales."""
    bits = scale.contiguous().view(torch.int32).long() & _FP19
    packed = bits | _FP19_MARK
    if offset is not None:
        packed = packed | ((offset.round().clamp(-256, 255).long() & _OFFSET_BITS) << _OFFSET_SHIFT)
    return packed


def quant_param_parts(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and offset, float32, that npu_trans_quant_param packed."""
    offset = (packed >> _OFFSET_SHIFT) & _OFFSET_BITS
    return carried_scale(packed & _FP19), torch.where(offset > 255, offset - 512, offset).float()

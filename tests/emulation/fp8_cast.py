"""The fp8 cast of the low-latency dispatches, and their packed scales."""

from typing import Final

import torch
from torch import Tensor

GROUP: Final = 128  # columns of one scale
E4M3_MAX: Final = 448.0
AMAX_FLOOR: Final = 1e-4


def cast_fp8(x: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    """Return rows as e4m3fn (rows, hidden) and the scales that multiply them back, float32 (rows, hidden / 128).

    A scale is ``max(amax, 1e-4) / 448``; with ``round_scale`` the power of two at or above that.
    """
    groups = x.float().view(x.size(0), x.size(1) // GROUP, GROUP)
    scale = groups.abs().amax(-1).clamp(min=AMAX_FLOOR) / E4M3_MAX
    if round_scale:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), torch.where(mantissa == 0.5, exponent - 1, exponent))
    return (groups / scale.unsqueeze(-1)).view(x.shape).to(torch.float8_e4m3fn), scale


def pack_ue8m0(scale: Tensor) -> Tensor:
    """Return powers of two (rows, groups) as int32 (rows, groups / 4): the exponent bytes, the first group in the lowest byte."""
    exponent = scale.view(torch.int32) >> 23 & 0xFF
    return exponent.to(torch.uint8).contiguous().view(torch.int32)


def log_format(x: Tensor) -> Tensor:
    """Return bf16 rows after a lossy transport of about 10 bits per value: a sign, and 9 bits of the logarithm within each 128 columns.

    The step is the span of the logarithms in a group, at most 32 octaves, over 510. The real encoding is not documented to the bit.
    """
    groups = x.float().reshape(*x.shape[:-1], x.size(-1) // GROUP, GROUP)
    magnitude = groups.abs()
    top = magnitude.amax(-1, keepdim=True).clamp(min=1e-30).log2()
    low = torch.where(magnitude > 0, magnitude, torch.inf).amin(-1, keepdim=True).clamp(min=1e-30).log2()
    low = torch.maximum(torch.minimum(low, top), top - 32)
    step = ((top - low) / 510).clamp(min=1e-9)
    code = ((magnitude.clamp(min=1e-30).log2() - low) / step).round()
    value = torch.where((magnitude > 0) & (code >= 0), torch.exp2(low + code * step), torch.zeros_like(magnitude))
    return (value * groups.sign()).view(x.shape).to(torch.bfloat16)

"""Microscaling: blocks of 32, a power of two each."""

from typing import Final, final

import attrs
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import MxScaleAlg, NpuDtype

from .numerics import split_last

BLOCK: Final = 32
_BIAS: Final = 127
_NAN: Final = 255  # the e8m0 byte
_LEVELS_E2M1: Final = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_LEVELS_E1M2: Final = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75])


@final
@attrs.frozen(eq=False)
class MxFormat:
    """An element's dtype, the exponent of its largest power of two, its largest value, and its levels by code where it is fp4."""

    dtype: torch.dtype
    emax: int
    largest: float
    levels: Tensor | None = None


E4M3: Final = MxFormat(torch.float8_e4m3fn, 8, 448.0)
E5M2: Final = MxFormat(torch.float8_e5m2, 15, 57344.0)
E2M1: Final = MxFormat(torch.uint8, 2, 6.0, _LEVELS_E2M1)
E1M2: Final = MxFormat(torch.uint8, 0, 1.75, _LEVELS_E1M2)
FORMATS: Final[dict[object, MxFormat]] = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    NpuDtype.FLOAT4_E2M1FN_X2: E2M1,
    NpuDtype.FLOAT4_E1M2FN_X2: E1M2,
}


def exponents(amax: Tensor, kind: MxFormat, alg: MxScaleAlg, lowest: int) -> Tensor:
    """Return the power of two of each block, int32: at least ``lowest``; -127 where amax is 0."""
    ratio = amax.double() / (kind.largest if alg == MxScaleAlg.CEIL else 1.0)
    mantissa, exponent = torch.frexp(ratio)  # mantissa in [1/2, 1)
    result = torch.where(mantissa == 0.5, exponent - 1, exponent) if alg == MxScaleAlg.CEIL else exponent - 1 - kind.emax
    return torch.where(amax > 0, result.clamp(lowest, _BIAS), -_BIAS).int()


def quantize(x: Tensor, kind: MxFormat, alg: MxScaleAlg, lowest: int = -_BIAS, least: float = 0.0) -> tuple[Tensor, Tensor]:
    """Quantise blocks of the last axis of float32 rows.

    Returns: elements (.., n), or (.., n / 2) of fp4, and e8m0 bytes (.., ceil(n / 32)), uint8. ``least``: amax is at least this.
    """
    columns = x.shape[-1]
    blocks = split_last(torch.nn.functional.pad(x, (0, -columns % BLOCK)), BLOCK)
    power = exponents(blocks.abs().amax(-1).clamp(min=least), kind, alg, lowest)
    scaled = torch.ldexp(blocks.double(), -power[..., None]).clamp(-kind.largest, kind.largest).float().flatten(-2)[..., :columns]
    elements = scaled.to(kind.dtype) if kind.levels is None else encode_fp4(scaled, kind.levels)
    return elements, (power + _BIAS).to(torch.uint8)


def pair(scale: Tensor) -> Tensor:
    """Return e8m0 bytes (.., b) as (.., ceil(b / 2), 2); an odd one gets the byte 0."""
    return split_last(torch.nn.functional.pad(scale, (0, scale.shape[-1] % 2)), 2)


def scale_values(scale: Tensor) -> Tensor:
    """Return e8m0 bytes, uint8 or float8_e8m0fnu, as float32."""
    codes = scale.view(torch.uint8).int()
    return torch.where(codes == _NAN, torch.nan, torch.ldexp(torch.ones(codes.shape), codes - _BIAS))


def encode_fp4(x: Tensor, levels: Tensor) -> Tensor:
    """Return values (.., n) as codes of the nearest levels, half to even code, two to a byte (.., n / 2), the first in the low nibble."""
    magnitude = x.abs()
    middles = (levels[1:] + levels[:-1]) / 2
    even_below = torch.arange(len(middles)) % 2 == 0  # a tie goes down where the code below is even
    above = torch.where(even_below, magnitude[..., None] > middles, magnitude[..., None] >= middles)
    code = above.sum(-1).to(torch.uint8) | (torch.signbit(x).to(torch.uint8) << 3)
    low, high = split_last(code, 2).unbind(-1)
    return low | (high << 4)


def decode(elements: Tensor, kind: MxFormat) -> Tensor:
    """Return elements of fp8, or packed ones of fp4 along the last axis, as float32 without their scale."""
    if kind.levels is None:
        return elements.float()
    codes = torch.stack((elements & 15, elements >> 4), -1).flatten(-2).long()
    return kind.levels[codes & 7] * (1 - 2 * (codes >> 3))

"""Named steps from one payload format to another. None of them ever happens implicitly.

Values that are not finite poison their group and nothing else: a group with an infinity or a NaN in it comes back as NaN. A group of zeros
gets the scale 1 (fp8 block 128) or 2^-127 (mxfp8) and comes back as zeros.
"""

from collections.abc import Callable
from typing import Final, Generic, Never, TypeAlias, TypeVar, final

import attrs
import torch

from . import e8m0
from .payloads import BLOCK_128, MX_GROUP, AnyDenseRows, Bf16Rows, DenseRows, Fp8Block128Rows, Fp16Rows, Fp32Rows, MxFp8Rows, Payload, ScaledRows

P = TypeVar("P", bound=Payload)
P_contra = TypeVar("P_contra", bound=Payload, contravariant=True)
Q_co = TypeVar("Q_co", bound=Payload, covariant=True)

E4M3_MAX: Final = 448.0  # the largest finite float8_e4m3fn
SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny


@final
@attrs.frozen(eq=False)
class Conversion(Generic[P_contra, Q_co]):
    """One named conversion of payloads.

    ``source`` lists the classes it takes and ``target`` is the class it makes; ``run`` does it.
    """

    name: str
    source: tuple[type[Payload], ...]
    target: type[Q_co]
    run: Callable[[P_contra], Q_co]

    def bytes_moved(self, source: type[Payload], rows: int, hidden: int) -> int:
        """Return the bytes that the step reads and writes; none where source and target are the same class."""
        if source is self.target:
            return 0
        return source.format.payload_bytes(rows, hidden) + self.target.format.payload_bytes(rows, hidden)


AnyConversion: TypeAlias = Conversion[Never, Payload]


def _grouped(rows: DenseRows, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    count, hidden = rows.data.shape
    if hidden % group:
        raise ValueError(f"cannot quantise {type(rows).__name__} of hidden {hidden} in groups of {group}: {group} must divide hidden")
    groups = rows.data.to(torch.float32).contiguous().view(count, hidden // group, group)
    return groups, groups.abs().amax(dim=2)


def _to_fp8_block128(rows: AnyDenseRows) -> Fp8Block128Rows:
    groups, amax = _grouped(rows, BLOCK_128)
    # A scale below the normal numbers would be zero where the group is not, on any device that flushes them.
    scale = torch.where(amax == 0, 1.0, (amax / E4M3_MAX).clamp(min=SMALLEST_SCALE))
    data = (groups / scale.unsqueeze(2)).to(torch.float8_e4m3fn).view(rows.data.shape)
    return Fp8Block128Rows(data, torch.where(torch.isfinite(scale), scale, torch.nan))


def _to_mxfp8(rows: AnyDenseRows) -> MxFp8Rows:
    groups, amax = _grouped(rows, MX_GROUP)
    scale = e8m0.encode_up(amax / E4M3_MAX)
    data = (groups / e8m0.decode(scale).unsqueeze(2)).to(torch.float8_e4m3fn).view(rows.data.shape)
    return MxFp8Rows(data, scale)


quantize_fp8_block128: Final = Conversion("quantize_fp8_block128", (Bf16Rows, Fp16Rows, Fp32Rows), Fp8Block128Rows, _to_fp8_block128)
"""Quantise each 128 channels of a row to e4m3 with the scale amax / 448. Raises: ValueError where 128 does not divide hidden."""

quantize_mxfp8: Final = Conversion("quantize_mxfp8", (Bf16Rows, Fp16Rows, Fp32Rows), MxFp8Rows, _to_mxfp8)
"""Quantise each 32 channels of a row to e4m3 with the scale amax / 448 rounded up to a power of two, so that nothing saturates."""


def _upscale_bf16(rows: ScaledRows) -> Bf16Rows:
    return Bf16Rows(rows.dequantize().to(torch.bfloat16))


def _upscale_fp16(rows: ScaledRows) -> Fp16Rows:
    return Fp16Rows(rows.dequantize().to(torch.float16))


def _upscale_fp32(rows: ScaledRows) -> Fp32Rows:
    return Fp32Rows(rows.dequantize())


_SCALED: Final = (Fp8Block128Rows, MxFp8Rows)

upscale_bf16: Final = Conversion("upscale_bf16", _SCALED, Bf16Rows, _upscale_bf16)
"""Multiply data by scale and round to bfloat16."""

upscale_fp16: Final = Conversion("upscale_fp16", _SCALED, Fp16Rows, _upscale_fp16)
"""Multiply data by scale and round to float16; values above 65504 become infinite."""

upscale_fp32: Final = Conversion("upscale_fp32", _SCALED, Fp32Rows, _upscale_fp32)
"""Multiply data by scale in float32."""


def _same(rows: P) -> P:
    return rows


def _round_bf16(rows: AnyDenseRows) -> Bf16Rows:
    return Bf16Rows(rows.data.to(torch.bfloat16))


round_bf16: Final = Conversion("round_bf16", (Fp16Rows, Fp32Rows), Bf16Rows, _round_bf16)
"""Round to bfloat16, ties to even."""

bf16_as_is: Final = Conversion("as is", (Bf16Rows,), Bf16Rows, _same)
fp16_as_is: Final = Conversion("as is", (Fp16Rows,), Fp16Rows, _same)
fp32_as_is: Final = Conversion("as is", (Fp32Rows,), Fp32Rows, _same)

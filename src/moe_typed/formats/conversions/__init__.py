"""Named steps from one payload format to another. None of them ever happens implicitly.

These are the reference: torch operations, on any device, the same bits everywhere. ``formats.fused`` has the same steps in one kernel each.
"""

from typing import Final, TypeVar

import torch
from torch import Tensor

from ...ops.quantize import reference as _quantize
from ...ops.scale_layout import reference as _relayout
from ...ops.upscale import reference as _upscale
from ..payloads import Bf16Rows, Fp16Rows, Fp32Rows, Payload
from .base import AS_IS, AnyConversion, Conversion, Convert
from .quantize import Quantizers
from .relayout import Relayouts
from .upscale import AnyScaledRows, Upscalers

P = TypeVar("P", bound=Payload)

quantizers: Final = Quantizers(_quantize)
upscalers: Final = Upscalers(_upscale)
relayouts: Final = Relayouts(_relayout)

quantize_fp8_block128: Final = quantizers.fp8_block128
quantize_mxfp8: Final = quantizers.mxfp8
quantize_mxfp4: Final = quantizers.mxfp4
upscale_bf16: Final = upscalers.bf16
upscale_fp16: Final = upscalers.fp16
upscale_fp32: Final = upscalers.fp32


def _same(rows: P, _live: Tensor | None = None) -> P:
    return rows


def _round_bf16(rows: Fp16Rows | Fp32Rows, _live: Tensor | None = None) -> Bf16Rows:
    return Bf16Rows(rows.data.to(torch.bfloat16))


round_bf16: Final = Conversion("round_bf16", (Fp16Rows, Fp32Rows), Bf16Rows, _round_bf16)
bf16_as_is: Final = Conversion[Bf16Rows, Bf16Rows](AS_IS, (Bf16Rows,), Bf16Rows, _same)
fp16_as_is: Final = Conversion[Fp16Rows, Fp16Rows](AS_IS, (Fp16Rows,), Fp16Rows, _same)
fp32_as_is: Final = Conversion[Fp32Rows, Fp32Rows](AS_IS, (Fp32Rows,), Fp32Rows, _same)

__all__ = [
    "AnyConversion",
    "AnyScaledRows",
    "Conversion",
    "Convert",
    "Quantizers",
    "Relayouts",
    "Upscalers",
    "bf16_as_is",
    "fp16_as_is",
    "fp32_as_is",
    "quantize_fp8_block128",
    "quantize_mxfp4",
    "quantize_mxfp8",
    "quantizers",
    "relayouts",
    "round_bf16",
    "upscale_bf16",
    "upscale_fp16",
    "upscale_fp32",
    "upscalers",
]

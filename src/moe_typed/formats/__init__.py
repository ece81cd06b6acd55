"""Payload classes, checkpoint-layout weight classes, and the named conversions between payloads."""

from .conversions import (
    Conversion,
    bf16_as_is,
    fp16_as_is,
    fp32_as_is,
    quantize_fp8_block128,
    quantize_mxfp8,
    upscale_bf16,
    upscale_fp16,
    upscale_fp32,
)
from .gate_up import GateUp, GateUpOrder, Interleaved, UpGate
from .payloads import AnyDenseRows, Bf16Rows, DenseRows, Fp8Block128Rows, Fp16Rows, Fp32Rows, MxFp8Rows, Payload, ScaledRows
from .spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .weights import (
    AnyExpertWeights,
    Bf16ExpertWeights,
    ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp16ExpertWeights,
    Fp32ExpertWeights,
    MxFp8ExpertWeights,
)

__all__ = [
    "AnyDenseRows",
    "AnyExpertWeights",
    "Bf16ExpertWeights",
    "Bf16Rows",
    "Conversion",
    "DenseRows",
    "ExpertWeights",
    "Format",
    "Fp8Block128ExpertWeights",
    "Fp8Block128Rows",
    "Fp16ExpertWeights",
    "Fp16Rows",
    "Fp32ExpertWeights",
    "Fp32Rows",
    "GateUp",
    "GateUpOrder",
    "Interleaved",
    "MxFp8ExpertWeights",
    "MxFp8Rows",
    "Payload",
    "ScaleOrder",
    "ScaleRounding",
    "ScaleSpec",
    "ScaledRows",
    "UpGate",
    "bf16_as_is",
    "fp16_as_is",
    "fp32_as_is",
    "quantize_fp8_block128",
    "quantize_mxfp8",
    "upscale_bf16",
    "upscale_fp16",
    "upscale_fp32",
]

"""Payload classes: rows of activations together with their scales."""

from .base import BLOCK_128, MX_GROUP, NV_GROUP, DenseRows, Payload, ScaledRows
from .dense import AnyDenseRows, Bf16Rows, Fp16Rows, Fp32Rows
from .head import head
from .mx import MxFp4Rows, MxFp8Rows, MxFp8SwizzledRows, NvFp4Rows
from .scaled import (
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128Rows,
    Fp8FnuzBlock128Rows,
    Fp8FnuzTensorRows,
    Fp8FnuzTokenRows,
    Fp8TensorRows,
    Fp8TokenRows,
    Int8TokenRows,
)
from .slab import Fp8Block128PackedSlabRows, Fp8Block128SlabRows, SlabScaledRows

__all__ = [
    "BLOCK_128",
    "MX_GROUP",
    "NV_GROUP",
    "AnyDenseRows",
    "Bf16Rows",
    "DenseRows",
    "Fp8Block128ColumnRows",
    "Fp8Block128PackedRows",
    "Fp8Block128PackedSlabRows",
    "Fp8Block128Rows",
    "Fp8Block128SlabRows",
    "Fp8FnuzBlock128Rows",
    "Fp8FnuzTensorRows",
    "Fp8FnuzTokenRows",
    "Fp8TensorRows",
    "Fp8TokenRows",
    "Fp16Rows",
    "Fp32Rows",
    "Int8TokenRows",
    "MxFp4Rows",
    "MxFp8Rows",
    "MxFp8SwizzledRows",
    "NvFp4Rows",
    "Payload",
    "ScaledRows",
    "SlabScaledRows",
    "head",
]

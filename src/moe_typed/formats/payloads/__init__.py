"""Payload classes: rows of activations together with their scales."""

from .ascend import Int4TokenRows, MxFp4PairRows, MxFp8PairRows
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
    "Int4TokenRows",
    "Int8TokenRows",
    "MxFp4PairRows",
    "MxFp4Rows",
    "MxFp8PairRows",
    "MxFp8Rows",
    "MxFp8SwizzledRows",
    "NvFp4Rows",
    "Payload",
    "ScaledRows",
    "SlabScaledRows",
    "head",
]

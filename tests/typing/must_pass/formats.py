"""Formats as they are meant to be used: what each conversion makes is known, and a shard is of the class of the whole."""

from typing import assert_type

from moe_typed import Bf16Rows, GateUp, UpGate
from moe_typed.formats import (
    AnyDenseRows,
    AwqExpertWeights,
    Conversion,
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128Rows,
    Fp8TensorRows,
    InverseScaleFactor,
    MxFp4ExpertWeights,
    MxFp8Rows,
    MxFp8SwizzledRows,
    NvFp4Rows,
    ScaleFactor,
    quantizers,
    relayouts,
    shard_inter,
    upscale_bf16,
)


def orders(rows: Bf16Rows) -> None:
    block = quantizers.fp8_block128.run(rows)
    assert_type(relayouts.to_column.run(block), Fp8Block128ColumnRows)
    assert_type(relayouts.to_row.run(relayouts.to_column.run(block)), Fp8Block128Rows)
    assert_type(relayouts.pack.run(block), Fp8Block128PackedRows)
    assert_type(relayouts.swizzle.run(quantizers.mxfp8.run(rows)), MxFp8SwizzledRows)
    assert_type(upscale_bf16.run(quantizers.nvfp4.run(rows)), Bf16Rows)


def scales(given: InverseScaleFactor) -> None:
    assert_type(given.inverted(), ScaleFactor)
    assert_type(given.inverted().inverted(), InverseScaleFactor)
    assert_type(quantizers.nvfp4_static(given.inverted()), Conversion[AnyDenseRows, NvFp4Rows])
    assert_type(quantizers.fp8_tensor_static(given.inverted()), Conversion[AnyDenseRows, Fp8TensorRows])


def rules() -> None:
    assert_type(quantizers.mxfp8_rounded("floor"), Conversion[AnyDenseRows, MxFp8Rows])


def shards(awq: AwqExpertWeights[GateUp], fp4: MxFp4ExpertWeights[UpGate]) -> None:
    assert_type(shard_inter(awq, 0, 2), AwqExpertWeights[GateUp])
    assert_type(shard_inter(fp4, 1, 4), MxFp4ExpertWeights[UpGate])

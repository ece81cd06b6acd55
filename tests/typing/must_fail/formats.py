"""Formats that look alike given for one another."""

from torch import Tensor

from moe_typed import GateUp
from moe_typed.formats import (
    AwqExpertWeights,
    Bf16Rows,
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128Rows,
    Fp8FnuzBlock128Rows,
    Fp8FnuzTokenRows,
    Fp8TokenRows,
    GptqExpertWeights,
    InverseScaleFactor,
    MxFp4Rows,
    MxFp8Rows,
    MxFp8SwizzledRows,
    NvFp4ExpertWeights,
    NvFp4Rows,
    ScaleFactor,
    quantizers,
    relayouts,
    upscale_bf16,
)
from moe_typed.runners.triton import prepare_triton


def deepgemm(rows: Fp8Block128ColumnRows) -> None: ...
def deepgemm_packed(rows: Fp8Block128PackedRows) -> None: ...
def row_major(rows: Fp8Block128Rows) -> None: ...
def swizzled(rows: MxFp8SwizzledRows) -> None: ...
def mx(rows: MxFp8Rows) -> None: ...
def token(rows: Fp8TokenRows) -> None: ...
def gptq(weights: GptqExpertWeights[GateUp]) -> None: ...


def row_major_scales_for_column_major(rows: Fp8Block128Rows) -> None:
    deepgemm(rows)
    # E: Argument 1 to "deepgemm" has incompatible type "Fp8Block128Rows"; expected "Fp8Block128ColumnRows"
    # P: "Fp8Block128Rows" cannot be assigned to parameter "rows" of type "Fp8Block128ColumnRows"


def column_major_scales_for_row_major(rows: Fp8Block128ColumnRows) -> None:
    row_major(rows)
    # E: Argument 1 to "row_major" has incompatible type "Fp8Block128ColumnRows"; expected "Fp8Block128Rows"
    # P: "Fp8Block128ColumnRows" cannot be assigned to parameter "rows" of type "Fp8Block128Rows"


def float32_scales_for_packed(rows: Fp8Block128ColumnRows) -> None:
    deepgemm_packed(rows)
    # E: Argument 1 to "deepgemm_packed" has incompatible type "Fp8Block128ColumnRows"; expected "Fp8Block128PackedRows"
    # P: "Fp8Block128ColumnRows" cannot be assigned to parameter "rows" of type "Fp8Block128PackedRows"


def packed_scales_for_float32(rows: Fp8Block128PackedRows) -> None:
    deepgemm(rows)
    # E: Argument 1 to "deepgemm" has incompatible type "Fp8Block128PackedRows"; expected "Fp8Block128ColumnRows"
    # P: "Fp8Block128PackedRows" cannot be assigned to parameter "rows" of type "Fp8Block128ColumnRows"


def groups_of_32_for_blocks_of_128(rows: MxFp8Rows) -> None:
    row_major(rows)
    # E: Argument 1 to "row_major" has incompatible type "MxFp8Rows"; expected "Fp8Block128Rows"
    # P: "MxFp8Rows" cannot be assigned to parameter "rows" of type "Fp8Block128Rows"


def row_major_scales_for_swizzled(rows: MxFp8Rows) -> None:
    swizzled(rows)
    # E: Argument 1 to "swizzled" has incompatible type "MxFp8Rows"; expected "MxFp8SwizzledRows"
    # P: "MxFp8Rows" cannot be assigned to parameter "rows" of type "MxFp8SwizzledRows"


def swizzled_scales_for_row_major(rows: MxFp8SwizzledRows) -> None:
    mx(rows)
    # E: Argument 1 to "mx" has incompatible type "MxFp8SwizzledRows"; expected "MxFp8Rows"
    # P: "MxFp8SwizzledRows" cannot be assigned to parameter "rows" of type "MxFp8Rows"


def one_fp4_for_the_other(rows: NvFp4Rows) -> MxFp4Rows:
    return rows
    # E: Incompatible return value type (got "NvFp4Rows", expected "MxFp4Rows")
    # P: Type "NvFp4Rows" is not assignable to return type "MxFp4Rows"


def fnuz_for_fn(rows: Fp8FnuzTokenRows) -> None:
    token(rows)
    # E: Argument 1 to "token" has incompatible type "Fp8FnuzTokenRows"; expected "Fp8TokenRows"
    # P: "Fp8FnuzTokenRows" cannot be assigned to parameter "rows" of type "Fp8TokenRows"


def relayout_of_fnuz(rows: Fp8FnuzBlock128Rows) -> None:
    relayouts.to_column.run(rows)
    # E: Argument 1 to "__call__" of "Convert" has incompatible type "Fp8FnuzBlock128Rows"; expected "Fp8Block128Rows"
    # P: "Fp8FnuzBlock128Rows" cannot be assigned to parameter "rows" of type "Fp8Block128Rows"


def swizzled_twice(rows: MxFp8Rows) -> None:
    relayouts.swizzle.run(relayouts.swizzle.run(rows))
    # E: Argument 1 to "__call__" of "Convert" has incompatible type "MxFp8SwizzledRows"; expected "MxFp8Rows"
    # P: "MxFp8SwizzledRows" cannot be assigned to parameter "rows" of type "MxFp8Rows"


def quantised_twice(rows: Bf16Rows) -> None:
    quantizers.mxfp8.run(quantizers.fp8_block128.run(rows))
    # E: Argument 1 to "__call__" of "Convert" has incompatible type "Fp8Block128Rows"; expected "Bf16Rows | Fp16Rows | Fp32Rows"
    # P: "Fp8Block128Rows" cannot be assigned to parameter "rows" of type "AnyDenseRows"


def upscaled_twice(rows: MxFp8Rows) -> None:
    upscale_bf16.run(upscale_bf16.run(rows))
    # E: Argument 1 to "__call__" of "Convert" has incompatible type "Bf16Rows"
    # P: "Bf16Rows" cannot be assigned to parameter "rows" of type "AnyScaledRows"


def divisor_for_factor(data: Tensor, scale: Tensor, given: InverseScaleFactor) -> None:
    NvFp4Rows(data, scale, given)
    # E: Argument 3 to "NvFp4Rows" has incompatible type "InverseScaleFactor"; expected "ScaleFactor"
    # P: "InverseScaleFactor" cannot be assigned to parameter "global_scale" of type "ScaleFactor"


def divisor_for_a_static_scale(given: InverseScaleFactor) -> None:
    quantizers.nvfp4_static(given)
    # E: Argument 1 to "nvfp4_static" of "Quantizers" has incompatible type "InverseScaleFactor"; expected "ScaleFactor"
    # P: "InverseScaleFactor" cannot be assigned to parameter "scale" of type "ScaleFactor"


def inverted_twice(given: ScaleFactor) -> None:
    quantizers.fp8_tensor_static(given.inverted())
    # E: Argument 1 to "fp8_tensor_static" of "Quantizers" has incompatible type "InverseScaleFactor"; expected "ScaleFactor"
    # P: "InverseScaleFactor" cannot be assigned to parameter "scale" of type "ScaleFactor"


def rounding_rule_that_there_is_not() -> None:
    quantizers.mxfp8_rounded("nearest")
    # E: Argument 1 to "mxfp8_rounded" of "Quantizers" has incompatible type "Literal['nearest']"
    # P: "Literal['nearest']" cannot be assigned to parameter "rounding" of type "MXFP_ROUNDING"


def awq_for_gptq(weights: AwqExpertWeights[GateUp]) -> None:
    gptq(weights)
    # E: Argument 1 to "gptq" has incompatible type "AwqExpertWeights[GateUp]"; expected "GptqExpertWeights[GateUp]"
    # P: "AwqExpertWeights[GateUp]" cannot be assigned to parameter "weights" of type "GptqExpertWeights[GateUp]"


def weights_that_a_runner_does_not_take(weights: NvFp4ExpertWeights[GateUp]) -> None:
    prepare_triton(weights)
    # E: No overload variant of "prepare_triton" matches argument type "NvFp4ExpertWeights[GateUp]"
    # P: No overloads for "prepare_triton" match the provided arguments
    # P: "NvFp4ExpertWeights[GateUp]" cannot be assigned to parameter "weights"

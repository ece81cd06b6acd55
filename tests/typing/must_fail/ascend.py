"""What goes wrong on the Ascend NPU without a word, and does not type here. Each case bears the subject of its mismatch."""

import torch
from torch import Tensor

from moe_typed import Bf16ExpertWeights, Bf16Rows, Experts, Fp16Rows, GateUp, Interleaved, MxFp8Rows
from moe_typed.dispatchers import AscendTPDispatcher, Sorted, as_int8, as_they_are
from moe_typed.formats import Int8TokenRows, ModelSlimW4A4PackedExpertWeights, ModelSlimW4A8ExpertWeights
from moe_typed.runners.ascend import AscendW8A8Fp16Weights, prepare_ascend, prepare_ascend_fp16
from moe_typed.runners.ascend.components import (
    DenseMatmul,
    FinalizeKMajor,
    FinalizeRowMajor,
    GroupedMatmul,
    InitRoutingV1,
    InitRoutingV2,
    InitRoutingV2On310P,
    JoinedRows,
    MxFp8Matmul,
    RangeInitRouting,
    Swiglu,
    SwigluQuant,
    Unpermute,
    W4A4Matmul,
)
from moe_typed.runners.ascend.components.init_routing import ActiveRows, ActiveTokens, call_v1, call_v2
from moe_typed.runners.ascend.components.matmul import multiply_w4a8
from moe_typed.runners.ascend.components.rows import HalfRows
from moe_typed.runners.ascend.library import AscendLibrary
from moe_typed.runners.ascend.ops import AclFormat, AscendOps, RoutingQuantMode
from moe_typed.runners.ascend.projections import PlainProjection, ProductThenActivation
from moe_typed.runners.ascend.weights.operands import W4A8Operand, W4A16Operand, W8A8Operand
from moe_typed.runners.ascend.weights.scales import CarriedScale, FlatCarriedScale, Fp32ChannelScale, QuantParam
from moe_typed.stages import (
    AscendRowsInput,
    AscendTPCombineInput,
    AscendTPDispatchOutput,
    CompleteResult,
    GroupCounts,
    GroupEnds,
    PartialResult,
    RowMajorSparseIndex,
)


def mismatch_1_index_order(ops: AscendOps) -> None:
    Sorted(InitRoutingV1(ops, Bf16Rows)).finished_by(FinalizeRowMajor(ops))
    # E: Argument 1 to "finished_by" of "Sorted" has incompatible type "FinalizeRowMajor"; expected "FinalizeRouting[KMajorIndex]"
    # P: "FinalizeRowMajor" is not assignable to "FinalizeRouting[KMajorIndex]"
    Sorted(InitRoutingV2(ops, Bf16Rows)).finished_by(FinalizeKMajor(ops))
    # E: Argument 1 to "finished_by" of "Sorted" has incompatible type "FinalizeKMajor"; expected "FinalizeRouting[RowMajorIndex]"
    # P: "FinalizeKMajor" is not assignable to "FinalizeRouting[RowMajorIndex]"


def mismatch_2_and_6_group_list_kind(ops: AscendOps, rows: Int8TokenRows, operand: W4A8Operand, ends: GroupEnds) -> None:
    multiply_w4a8(ops, rows, operand, ends, torch.bfloat16)
    # E: Argument 4 to "multiply_w4a8" has incompatible type "GroupEnds"; expected "GroupCounts"
    # P: "GroupEnds" is not assignable to "GroupCounts"
    GroupCounts(ends)
    # E: Argument 1 to "GroupCounts" has incompatible type "GroupEnds"; expected "Tensor"
    # P: "GroupEnds" is not assignable to "Tensor"


def mismatch_3_defaults_of_the_group_list_type(matmul: DenseMatmul, rows: Bf16Rows, group_list: Tensor) -> None:
    matmul.multiply(rows, group_list, torch.bfloat16)
    # E: Argument 2 to "multiply" of "DenseMatmul" has incompatible type "Tensor"; expected "GroupEnds | GroupCounts | GroupPairs"
    # P: "Tensor" is not assignable to "GroupEnds"


def mismatch_4_device_decides_the_kind(ops: AscendOps, rows: Fp16Rows, ids: Tensor) -> GroupCounts:
    return InitRoutingV2On310P(ops, Fp16Rows).route(rows, ids, 8).groups
    # E: Incompatible return value type (got "GroupEnds", expected "GroupCounts")
    # P: "GroupEnds" is not assignable to "GroupCounts"


def mismatch_4_rows_that_a_device_does_not_take(ops: AscendOps) -> None:
    InitRoutingV2On310P(ops, Bf16Rows)
    # E: Argument 2 to "InitRoutingV2On310P" has incompatible type "type[Bf16Rows]"; expected "type[Fp16Rows]"
    # P: "type[Bf16Rows]" is not assignable to "type[Fp16Rows]"


def mismatch_5_w4a8_without_its_correction(words: Tensor, scale: CarriedScale) -> None:
    W4A8Operand(words, scale, layout=AclFormat.FRACTAL_NZ)
    # E: Missing positional argument "correction" in call to "W4A8Operand"
    # P: Argument missing for parameter "correction"


def mismatch_7_sign_of_zero_points(words: Tensor, scale: Tensor, zeros: Tensor) -> None:
    W4A16Operand(words, scale, zeros, AclFormat.ND)
    # E: Argument 3 to "W4A16Operand" has incompatible type "Tensor"; expected "AddOffset"
    # P: "Tensor" is not assignable to "AddOffset"


def mismatch_8_int64_carriers(words: Tensor, param: QuantParam, correction: Tensor) -> None:
    W4A8Operand(words, param, correction, AclFormat.FRACTAL_NZ)
    # E: Argument 2 to "W4A8Operand" has incompatible type "QuantParam"; expected "CarriedScale"
    # P: "QuantParam" is not assignable to "CarriedScale"


def mismatch_9_shape_of_the_carried_scale(words: Tensor, flat: FlatCarriedScale, correction: Tensor) -> None:
    W4A8Operand(words, flat, correction, AclFormat.FRACTAL_NZ)
    # E: Argument 2 to "W4A8Operand" has incompatible type "FlatCarriedScale"; expected "CarriedScale"
    # P: "FlatCarriedScale" is not assignable to "CarriedScale"


def mismatch_10_packing(packed: ModelSlimW4A4PackedExpertWeights[GateUp]) -> ModelSlimW4A8ExpertWeights[GateUp]:
    return packed
    # E: (got "ModelSlimW4A4PackedExpertWeights[GateUp]", expected "ModelSlimW4A8ExpertWeights[GateUp]")
    # P: "ModelSlimW4A4PackedExpertWeights[GateUp]" is not assignable to "ModelSlimW4A8ExpertWeights[GateUp]"


def mismatch_11_rows_with_scales_in_another_product(dense: DenseMatmul, int4: W4A4Matmul, rows: Int8TokenRows, groups: GroupCounts) -> None:
    dense.multiply(rows, groups, torch.bfloat16)
    # E: Argument 1 to "multiply" of "DenseMatmul" has incompatible type "Int8TokenRows"; expected "Bf16Rows | Fp16Rows"
    # P: "Int8TokenRows" is not assignable to "Bf16Rows"
    int4.multiply(rows, groups, torch.bfloat16)
    # E: Argument 1 to "multiply" of "W4A4Matmul" has incompatible type "Int8TokenRows"; expected "Int4TokenRows"
    # P: "Int8TokenRows" is not assignable to "Int4TokenRows"


def mismatch_12_activation_whose_rows_the_second_product_does_not_take(
    ops: AscendOps, up: GroupedMatmul[HalfRows], down: GroupedMatmul[HalfRows]
) -> None:
    ProductThenActivation(PlainProjection(up), SwigluQuant(ops)).then(PlainProjection(down))
    # E: Argument 1 to "PlainProjection" has incompatible type "GroupedMatmul[Bf16Rows | Fp16Rows]"; expected "GroupedMatmul[Int8TokenRows]"
    # P: is not assignable to


def mismatch_13_interleaved_and_halves(activation: Swiglu, joined: JoinedRows[Interleaved], groups: GroupCounts) -> None:
    activation.activate(joined, groups)
    # E: Argument 1 to "activate" of "Swiglu" has incompatible type "JoinedRows[Interleaved]"; expected "JoinedRows[GateUp]"
    # P: "JoinedRows[Interleaved]" is not assignable to "JoinedRows[GateUp]"


def mismatch_14_dtype_of_the_model(rows: Int8TokenRows, groups: GroupCounts) -> None:
    AscendRowsInput(rows, groups)
    # E: Missing positional argument "out_dtype" in call to "AscendRowsInput"
    # P: Argument missing for parameter "out_dtype"


def mismatch_15_scale_without_its_dtype(weight: Tensor, scale: Tensor) -> None:
    W8A8Operand(weight, scale, AclFormat.ND)
    # E: Argument 2 to "W8A8Operand" has incompatible type "Tensor"; expected "Bf16ChannelScale"
    # P: "Tensor" is not assignable to "Bf16ChannelScale"


def mismatch_15_scales_for_another_dtype(library: AscendLibrary, operand: W8A8Operand, weight: Tensor, scale: Fp32ChannelScale) -> None:
    AscendW8A8Fp16Weights(library, operand, operand)
    # E: Argument 2 to "AscendW8A8Fp16Weights" has incompatible type "W8A8Operand"; expected "W8A8Fp16Operand"
    # E: Argument 3 to "AscendW8A8Fp16Weights" has incompatible type "W8A8Operand"; expected "W8A8Fp16Operand"
    # P: "W8A8Operand" is not assignable to "W8A8Fp16Operand"
    # P: "W8A8Operand" is not assignable to "W8A8Fp16Operand"
    W8A8Operand(weight, scale, AclFormat.ND)
    # E: Argument 2 to "W8A8Operand" has incompatible type "Fp32ChannelScale"; expected "Bf16ChannelScale"
    # P: "Fp32ChannelScale" is not assignable to "Bf16ChannelScale"


def mismatch_16_active_tokens_and_rows(ops: AscendOps, data: Tensor, ids: Tensor, rows: ActiveRows, tokens: ActiveTokens) -> None:
    call_v1(ops, data, ids, rows)
    # E: Argument 4 to "call_v1" has incompatible type "ActiveRows"; expected "ActiveTokens"
    # P: "ActiveRows" is not assignable to "ActiveTokens"
    call_v2(ops, data, ids, 8, tokens, RoutingQuantMode.NONE)
    # E: Argument 5 to "call_v2" has incompatible type "ActiveTokens"; expected "ActiveRows"
    # P: "ActiveTokens" is not assignable to "ActiveRows"


def mismatch_18_an_index_that_may_hold_minus_one(ops: AscendOps, rows: Tensor, weights: Tensor, index: RowMajorSparseIndex) -> None:
    Unpermute(ops).finalize(rows, weights, index)
    # E: Argument 3 to "finalize" of "Unpermute" has incompatible type "RowMajorSparseIndex"; expected "RowMajorIndex"
    # P: "RowMajorSparseIndex" is not assignable to "RowMajorIndex"
    Sorted(RangeInitRouting(ops, Bf16Rows, 0, 4)).finished_by(FinalizeRowMajor(ops))
    # E: Value of type variable "X" of "Sorted" cannot be "RowMajorSparseIndex"
    # E: Argument 1 to "finished_by" of "Sorted" has incompatible type "FinalizeRowMajor"; expected "FinalizeRouting[RowMajorSparseIndex]"
    # P: "RowMajorSparseIndex" is not assignable to
    # P: Type of "finished_by" is partially unknown


def mismatch_19_partial_and_complete(partial: PartialResult) -> CompleteResult:
    return partial
    # E: Incompatible return value type (got "PartialResult", expected "CompleteResult")
    # P: "PartialResult" is not assignable to "CompleteResult"


def mismatch_19_a_result_of_which_it_is_not_known(combine_input: AscendTPCombineInput, ops: AscendOps) -> Tensor:
    return AscendTPDispatcher(as_they_are(Bf16Rows, ops)).combine(combine_input)
    # E: Incompatible return value type (got "PartialResult | CompleteResult", expected "Tensor")
    # P: "CompleteResult" is not assignable to "Tensor"


def mismatch_21_combine_of_a_dispatch(dispatcher: AscendTPDispatcher[Bf16Rows, Bf16Rows], dispatched: AscendTPDispatchOutput[Bf16Rows]) -> None:
    dispatcher.combine(dispatched)
    # E: Argument 1 to "combine" of "AscendTPDispatcher" has incompatible type "AscendTPDispatchOutput[Bf16Rows]"; expected "AscendTPCombineInput"
    # P: "AscendTPDispatchOutput[Bf16Rows]" is not assignable to "AscendTPCombineInput"


def mismatch_22_scales_in_pairs(matmul: MxFp8Matmul, rows: MxFp8Rows, groups: GroupCounts) -> None:
    matmul.multiply(rows, groups, torch.bfloat16)
    # E: Argument 1 to "multiply" of "MxFp8Matmul" has incompatible type "MxFp8Rows"; expected "MxFp8PairRows"
    # P: "MxFp8Rows" is not assignable to "MxFp8PairRows"


def mismatch_24_payload_of_the_dispatcher(weights: Bf16ExpertWeights[GateUp], ops: AscendOps) -> None:
    AscendTPDispatcher(as_int8(Bf16Rows, ops)).then(Experts(prepare_ascend(weights, ops)))
    # E: Argument 1 to "Experts" has incompatible type "AscendBf16Weights"; expected "PreparedWeights[Runner[Never, RunnerOutput], Int8TokenRows]"
    # P: is not assignable to


def weights_that_say_their_dtype(weights: Bf16ExpertWeights[GateUp], ops: AscendOps) -> None:
    prepare_ascend_fp16(weights, ops)
    # E: No overload variant of "prepare_ascend_fp16" matches argument types "Bf16ExpertWeights[GateUp]", "AscendOps"
    # P: "prepare_ascend_fp16"
    prepare_ascend(prepare_ascend(weights, ops), ops)
    # E: No overload variant of "prepare_ascend" matches argument types "AscendBf16Weights", "AscendOps"
    # P: "prepare_ascend"

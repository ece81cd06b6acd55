"""Payloads that the experts, a layer or a conversion do not take."""

from torch import Tensor

from moe_typed import (
    Bf16Rows,
    ConvertedExperts,
    Experts,
    Fp8Block128Rows,
    MoELayer,
    MxFp8Rows,
    Payload,
    Routing,
    StandardDispatcher,
    StandardDispatchOutput,
    bf16_as_is,
    quantize_fp8_block128,
    quantize_mxfp8,
    upscale_bf16,
)
from moe_typed.formats import Int8TokenRows
from moe_typed.routing import LocalIds, LogicalIds
from moe_typed.runners import ReferenceDenseWeights, ReferenceFp8Block128Weights, ReferenceMxFp8Weights
from moe_typed.runners.triton import TritonFp8ChannelWeights, TritonInt4Weights

Dense = ReferenceDenseWeights
Block = ReferenceFp8Block128Weights
Mx = ReferenceMxFp8Weights


def fp32_scales_to_e8m0_experts(dispatched: StandardDispatchOutput[Fp8Block128Rows], weights: Mx) -> None:
    Experts(weights)(dispatched)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "StandardDispatchOutput[Fp8Block128Rows]"
    # E: expected "DispatchOutput[Bf16Rows | Fp16Rows | Fp32Rows | MxFp8Rows, StandardCombineInput]"
    # P: Type parameter "P_co@DispatchOutput" is covariant, but "Fp8Block128Rows" is not a subtype of "AnyDenseRows | MxFp8Rows"


def e8m0_scales_to_fp32_experts(dispatched: StandardDispatchOutput[MxFp8Rows], weights: Block) -> None:
    Experts(weights)(dispatched)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "StandardDispatchOutput[MxFp8Rows]"
    # E: expected "DispatchOutput[Bf16Rows | Fp16Rows | Fp32Rows | Fp8Block128Rows, StandardCombineInput]"
    # P: Type parameter "P_co@DispatchOutput" is covariant, but "MxFp8Rows" is not a subtype of "AnyDenseRows | Fp8Block128Rows"


def a_wire_that_may_be_either(dispatched: StandardDispatchOutput[Fp8Block128Rows | MxFp8Rows], weights: Mx) -> None:
    Experts(weights)(dispatched)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "StandardDispatchOutput[Fp8Block128Rows | MxFp8Rows]"
    # E: expected "DispatchOutput[Bf16Rows | Fp16Rows | Fp32Rows | MxFp8Rows, StandardCombineInput]"
    # P: Type parameter "P_co@DispatchOutput" is covariant, but "Fp8Block128Rows | MxFp8Rows" is not a subtype of "AnyDenseRows | MxFp8Rows"


def a_wire_that_was_forgotten(dispatched: StandardDispatchOutput[Payload], weights: Mx) -> None:
    Experts(weights)(dispatched)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "StandardDispatchOutput[Payload]"
    # E: expected "DispatchOutput[Bf16Rows | Fp16Rows | Fp32Rows | MxFp8Rows, StandardCombineInput]"
    # P: Type parameter "P_co@DispatchOutput" is covariant, but "Payload" is not a subtype of "AnyDenseRows | MxFp8Rows"


def dense_experts_on_a_quantised_wire(weights: Dense) -> None:
    experts = Experts(weights)
    StandardDispatcher(quantize_fp8_block128).then(experts)
    # E: Argument 1 to "then" of "Dispatcher" has incompatible type "Experts[Bf16Rows | Fp16Rows | Fp32Rows]"; expected "ExpertStage[Fp8Block128Rows]"
    # P: "Experts[AnyDenseRows]" cannot be assigned to parameter "experts" of type "ExpertStage[Fp8Block128Rows]"


def the_same_in_one_line(weights: Dense) -> None:
    StandardDispatcher(quantize_fp8_block128).then(Experts(weights))
    # E: Argument 1 to "Experts" has incompatible type "ReferenceDenseWeights"
    # E: expected "PreparedWeights[Runner[Never, RunnerOutput], Fp8Block128Rows]"
    # P: "Experts[AnyDenseRows]" cannot be assigned to parameter "experts" of type "ExpertStage[Fp8Block128Rows]"


def mxfp8_experts_on_a_block_wire(weights: Mx) -> None:
    experts = Experts(weights)
    StandardDispatcher(quantize_fp8_block128).then(experts)
    # E: Argument 1 to "then" of "Dispatcher" has incompatible type "Experts[Bf16Rows | Fp16Rows | Fp32Rows | MxFp8Rows]"
    # E: expected "ExpertStage[Fp8Block128Rows]"
    # P: Type parameter "P_contra@ExpertStage" is contravariant, but "AnyDenseRows | MxFp8Rows" is not a supertype of "Fp8Block128Rows"


def conversion_to_what_the_experts_do_not_take(weights: Dense) -> None:
    Experts(weights).accepting(quantize_mxfp8)
    # E: Argument 1 to "accepting" of "ExpertStage" has incompatible type "Conversion[Bf16Rows | Fp16Rows | Fp32Rows, MxFp8Rows]"
    # E: expected "Conversion[Bf16Rows | Fp16Rows | Fp32Rows, Bf16Rows | Fp16Rows | Fp32Rows]"
    # P: Type parameter "Q_co@Conversion" is covariant, but "MxFp8Rows" is not a subtype of "AnyDenseRows"


def conversion_from_what_the_wire_is_not(weights: Dense) -> None:
    StandardDispatcher(bf16_as_is).then(Experts(weights).accepting(upscale_bf16))
    # E: Argument 1 to "accepting" of "ExpertStage" has incompatible type "Conversion[Fp8TensorRows | Fp8FnuzTensorRows | Fp8TokenRows
    # E: expected "Conversion[Bf16Rows, Bf16Rows | Fp16Rows | Fp32Rows]"
    # P: "ConvertedExperts[AnyScaledRows]" cannot be assigned to parameter "experts" of type "ExpertStage[Bf16Rows]"


def conversion_run_on_another_format(rows: MxFp8Rows) -> None:
    quantize_fp8_block128.run(rows)
    # E: Argument 1 to "__call__" of "Convert" has incompatible type "MxFp8Rows"; expected "Bf16Rows | Fp16Rows | Fp32Rows"
    # P: "MxFp8Rows" cannot be assigned to parameter "rows" of type "AnyDenseRows"


def layer_given_what_the_model_does_not_hold(weights: Block, rows: MxFp8Rows, routing: Routing[LogicalIds]) -> None:
    StandardDispatcher(quantize_fp8_block128).then(Experts(weights))(rows, routing)
    # E: Argument 1 to "__call__" of "MoELayer" has incompatible type "MxFp8Rows"; expected "Bf16Rows | Fp16Rows | Fp32Rows"
    # P: "MxFp8Rows" cannot be assigned to parameter "rows" of type "AnyDenseRows"


def layer_given_a_tensor(weights: Dense, rows: Tensor, routing: Routing[LogicalIds]) -> None:
    StandardDispatcher(bf16_as_is).then(Experts(weights))(rows, routing)
    # E: Argument 1 to "__call__" of "MoELayer" has incompatible type "Tensor"; expected "Bf16Rows"
    # P: "Tensor" cannot be assigned to parameter "rows" of type "Bf16Rows"


def experts_given_a_tensor(weights: Dense, rows: Tensor) -> None:
    Experts(weights)(rows)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "Tensor"; expected "DispatchOutput[Bf16Rows | Fp16Rows | Fp32Rows, Never]"
    # P: "Tensor" cannot be assigned to parameter "dispatched" of type "DispatchOutput[AnyDenseRows, C@__call__]"


def dispatch_output_around_a_tensor(rows: Tensor, routing: Routing[LocalIds]) -> None:
    StandardDispatchOutput(rows, routing)
    # E: Value of type variable "P_co" of "StandardDispatchOutput" cannot be "Tensor"
    # P: "Tensor" cannot be assigned to parameter "payload" of type "P_co@StandardDispatchOutput"


def relabelled(data: Tensor, scale: Tensor, routing: Routing[LocalIds]) -> StandardDispatchOutput[MxFp8Rows]:
    return StandardDispatchOutput(Fp8Block128Rows(data, scale), routing)
    # E: Argument 1 to "StandardDispatchOutput" has incompatible type "Fp8Block128Rows"; expected "MxFp8Rows"
    # P: Type "StandardDispatchOutput[Fp8Block128Rows]" is not assignable to return type "StandardDispatchOutput[MxFp8Rows]"


def narrowed(dispatched: StandardDispatchOutput[Bf16Rows | MxFp8Rows]) -> StandardDispatchOutput[Bf16Rows]:
    return dispatched
    # E: Incompatible return value type (got "StandardDispatchOutput[Bf16Rows | MxFp8Rows]", expected "StandardDispatchOutput[Bf16Rows]")
    # P: Type "StandardDispatchOutput[Bf16Rows | MxFp8Rows]" is not assignable to return type "StandardDispatchOutput[Bf16Rows]"


def int8_rows_for_fp8_weights_of_triton(dispatched: StandardDispatchOutput[Int8TokenRows], weights: TritonFp8ChannelWeights) -> None:
    Experts(weights)(dispatched)
    # E: Argument 1 to "__call__" of "ExpertStage" has incompatible type "StandardDispatchOutput[Int8TokenRows]"
    # P: Type parameter "P_co@DispatchOutput" is covariant, but "Int8TokenRows" is not a subtype of


def quantised_rows_for_int4_weights_of_triton(weights: TritonInt4Weights) -> None:
    experts = Experts(weights)
    StandardDispatcher(quantize_mxfp8).then(experts)
    # E: Argument 1 to "then" of "Dispatcher" has incompatible type "Experts[Bf16Rows | Fp16Rows | Fp32Rows]"; expected "ExpertStage[MxFp8Rows]"
    # P: "Experts[AnyDenseRows]" cannot be assigned to parameter "experts" of type "ExpertStage[MxFp8Rows]"


# Both arguments of these constructors are open at once, of which mypy says nothing useful: ``then`` and ``accepting`` are the way.


def layer_without_then(weights: Mx) -> None:
    MoELayer(StandardDispatcher(quantize_fp8_block128), Experts(weights))
    # E: Cannot infer value of type parameter "P_co" of "MoELayer"
    # P: Type parameter "P_contra@ExpertStage" is contravariant, but "AnyDenseRows | MxFp8Rows" is not a supertype of "Fp8Block128Rows"


def conversion_without_accepting(weights: Mx) -> None:
    ConvertedExperts(quantize_fp8_block128, Experts(weights))
    # E: Cannot infer value of type parameter "Q" of "ConvertedExperts"
    # P: Type parameter "P_contra@ExpertStage" is contravariant, but "AnyDenseRows | MxFp8Rows" is not a supertype of "Fp8Block128Rows"

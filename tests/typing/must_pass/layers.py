"""From logits to combined output, with every type on the way spelled out."""

from collections.abc import Callable
from typing import assert_type

from torch import Tensor

from moe_typed import (
    Bf16Rows,
    Conversion,
    ConvertedExperts,
    DispatchOutput,
    Experts,
    Fp8Block128Rows,
    Fp16Rows,
    Fp32Rows,
    GateUp,
    GroupedTopK,
    LocalIds,
    LogicalIds,
    MoELayer,
    MxFp8Rows,
    Pending,
    Routing,
    Settled,
    SoftmaxTopK,
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
    SwigluOai,
    TopKSoftmax,
    bf16_as_is,
    from_topk,
    localize,
    prepare_reference,
    quantize_fp8_block128,
    quantize_mxfp8,
    upscale_bf16,
)
from moe_typed.formats import AnyDenseRows, AnyScaledRows, Bf16ExpertWeights, Fp8Block128ExpertWeights, MxFp8ExpertWeights, UpGate
from moe_typed.runners import ReferenceDenseWeights, ReferenceFp8Block128Weights, ReferenceMxFp8Weights


def stage_by_stage(logits: Tensor, data: Tensor, checkpoint: Bf16ExpertWeights[GateUp]) -> Tensor:
    routing = SoftmaxTopK(2, True).route(logits)
    assert_type(routing, Routing[LogicalIds, Settled])
    weights = prepare_reference(checkpoint)
    assert_type(weights, ReferenceDenseWeights)
    experts = Experts(weights)
    assert_type(experts, Experts[Bf16Rows | Fp16Rows | Fp32Rows])
    dispatcher = StandardDispatcher(bf16_as_is)
    assert_type(dispatcher, StandardDispatcher[Bf16Rows, Bf16Rows])
    dispatched = dispatcher.dispatch(Bf16Rows(data), routing)
    assert_type(dispatched, StandardDispatchOutput[Bf16Rows])
    assert_type(dispatched.payload, Bf16Rows)
    assert_type(dispatched.routing, Routing[LocalIds])
    combine_input = experts(dispatched)
    assert_type(combine_input, StandardCombineInput)
    return dispatcher.combine(combine_input)


def as_one_layer(rows: Bf16Rows, routing: Routing[LogicalIds], checkpoint: Fp8Block128ExpertWeights[UpGate]) -> Tensor:
    layer = StandardDispatcher(quantize_fp8_block128).then(Experts(prepare_reference(checkpoint), SwigluOai()))
    assert_type(layer, MoELayer[AnyDenseRows, Fp8Block128Rows, StandardCombineInput])
    return layer(rows, routing)


def behind_a_conversion(rows: Bf16Rows, routing: Routing[LogicalIds], weights: ReferenceDenseWeights) -> Tensor:
    experts = Experts(weights).accepting(upscale_bf16)
    assert_type(experts, ConvertedExperts[AnyScaledRows])
    assert_type(experts(StandardDispatcher(quantize_mxfp8).dispatch(rows, routing)), StandardCombineInput)
    return StandardDispatcher(quantize_fp8_block128).then(experts)(rows, routing)


def the_same_in_one_line(weights: ReferenceDenseWeights) -> MoELayer[AnyDenseRows, Fp8Block128Rows, StandardCombineInput]:
    return StandardDispatcher(quantize_fp8_block128).then(Experts(weights).accepting(upscale_bf16))


def one_wire_for_experts_of_two_formats(
    dispatched: StandardDispatchOutput[Bf16Rows], block: ReferenceFp8Block128Weights, mx: ReferenceMxFp8Weights
) -> tuple[StandardCombineInput, StandardCombineInput]:
    return Experts(block)(dispatched), Experts(mx)(dispatched)


def wire_that_may_be_either(dispatched: StandardDispatchOutput[Bf16Rows | MxFp8Rows], weights: ReferenceMxFp8Weights) -> StandardCombineInput:
    return Experts(weights)(dispatched)


def resolved_once(weights: ReferenceMxFp8Weights) -> None:
    run = Experts(weights).bind(StandardDispatchOutput[MxFp8Rows])
    assert_type(
        run,
        Callable[[DispatchOutput[Bf16Rows | Fp16Rows | Fp32Rows | MxFp8Rows, StandardCombineInput]], StandardCombineInput],
    )


def conversions(rows: Bf16Rows, block: Fp8Block128Rows) -> None:
    assert_type(bf16_as_is, Conversion[Bf16Rows, Bf16Rows])
    assert_type(quantize_fp8_block128, Conversion[AnyDenseRows, Fp8Block128Rows])
    assert_type(quantize_fp8_block128.run(rows), Fp8Block128Rows)
    assert_type(upscale_bf16, Conversion[AnyScaledRows, Bf16Rows])
    assert_type(upscale_bf16.run(block), Bf16Rows)


def prepared(block: Fp8Block128ExpertWeights[GateUp], mx: MxFp8ExpertWeights[UpGate]) -> None:
    assert_type(Experts(prepare_reference(block)), Experts[Bf16Rows | Fp16Rows | Fp32Rows | Fp8Block128Rows])
    assert_type(Experts(prepare_reference(mx)), Experts[Bf16Rows | Fp16Rows | Fp32Rows | MxFp8Rows])


def routings(logits: Tensor, bias: Tensor, ids: Tensor, weights: Tensor) -> None:
    assert_type(TopKSoftmax(4).route(logits), Routing[LogicalIds, Settled])
    assert_type(from_topk(ids, weights, 8), Routing[LogicalIds, Settled])
    pending = GroupedTopK(8, "sigmoid", 8, 4, "top2_sum", True, Pending(2.5), bias).route(logits, live=3)
    assert_type(pending, Routing[LogicalIds, Pending])
    assert_type(localize(pending, 0, 4), Routing[LocalIds, Pending])
    assert_type(localize(pending, 0, 4).space, type[LocalIds])
    assert_type(Routing(ids, weights, LocalIds, 8, Settled(), True, 4), Routing[LocalIds, Settled])

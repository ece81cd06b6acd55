"""Weights prepared for the Triton runner: each format of a checkpoint is a class of its own, and rows that a class takes type."""

from collections.abc import Callable
from typing import assert_type

from moe_typed import Bf16Rows, Experts, GateUp, Interleaved, MxFp8Rows, StandardDispatcher, StandardDispatchOutput, bf16_as_is, quantize_mxfp8
from moe_typed.formats import (
    AwqExpertWeights,
    Bf16UngatedExpertWeights,
    CompressedInt4ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp8TokenRows,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    Int8TokenRows,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    Payload,
)
from moe_typed.runners import Relu2
from moe_typed.runners.expert_rows import deepep_ll_in_place
from moe_typed.runners.posts import deepep_ll_post
from moe_typed.runners.triton import (
    TritonBf16UngatedWeights,
    TritonFp8ChannelWeights,
    TritonFp8TensorWeights,
    TritonInt4Weights,
    TritonInt8ChannelWeights,
    TritonMxFp4Weights,
    TritonMxFp8Weights,
    prepare_triton,
)
from moe_typed.runners.triton.general import TritonGeneralRunner
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.stages import (
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    FlatRowsInput,
    LiveRowsOutput,
    RouteRowsOutput,
    RowsOutput,
    SegmentRowsInput,
    SlabCarry,
    SlabRowsInput,
    StandardCombineInput,
    SummedRowsOutput,
)
from moe_typed.table import Edge, Transition


def eight_bits(
    tensor: Fp8TensorExpertWeights[GateUp],
    channel: Fp8ChannelExpertWeights[GateUp],
    int8: Int8ChannelExpertWeights[Interleaved],
    mx: MxFp8ExpertWeights[GateUp],
) -> None:
    assert_type(prepare_triton(tensor), TritonFp8TensorWeights)
    assert_type(prepare_triton(channel), TritonFp8ChannelWeights)
    assert_type(prepare_triton(int8), TritonInt8ChannelWeights)
    assert_type(prepare_triton(mx), TritonMxFp8Weights)


def four_bits(
    awq: AwqExpertWeights[GateUp], gptq: GptqExpertWeights[GateUp], packed: CompressedInt4ExpertWeights[GateUp], mx: MxFp4ExpertWeights[Interleaved]
) -> None:
    assert_type(prepare_triton(awq), TritonInt4Weights)
    assert_type(prepare_triton(gptq), TritonInt4Weights)
    assert_type(prepare_triton(packed), TritonInt4Weights)
    assert_type(prepare_triton(mx), TritonMxFp4Weights)


def without_a_gate(weights: Bf16UngatedExpertWeights) -> None:
    assert_type(prepare_triton(weights), TritonBf16UngatedWeights)
    assert_type(prepare_triton(weights).runner(Relu2()), TritonGeneralRunner)


def wires(weights: TritonMxFp4Weights) -> None:
    experts = Experts(weights)
    StandardDispatcher(bf16_as_is).then(experts)
    StandardDispatcher(quantize_mxfp8).then(experts)


def quantised_rows(
    weights: TritonMxFp4Weights, mx: StandardDispatchOutput[MxFp8Rows], int8: TritonInt8ChannelWeights, token: StandardDispatchOutput[Int8TokenRows]
) -> None:
    assert_type(Experts(weights)(mx), StandardCombineInput)
    assert_type(Experts(int8)(token), StandardCombineInput)


def either(weights: TritonFp8TensorWeights, token: StandardDispatchOutput[Fp8TokenRows], dense: StandardDispatchOutput[Bf16Rows]) -> None:
    assert_type(Experts(weights)(token), StandardCombineInput)
    assert_type(Experts(weights)(dense), StandardCombineInput)


def routes(runner: TritonGeneralRunner, runner_input: FlatRowsInput) -> None:
    assert_type(runner.run(runner_input), SummedRowsOutput)
    assert_type(runner.run_routes(runner_input), RouteRowsOutput)


def rows_that_lie_by_expert(
    tuned: TritonRunner, general: TritonGeneralRunner, slab: SlabRowsInput, segments: SegmentRowsInput, either: SlabRowsInput | SegmentRowsInput
) -> None:
    assert_type(tuned.run(slab), LiveRowsOutput)
    assert_type(tuned.run(segments), LiveRowsOutput)
    assert_type(tuned.run(either), LiveRowsOutput)
    assert_type(general.run(slab), LiveRowsOutput)
    assert_type(general.run(segments), LiveRowsOutput)


def a_row_of_the_table(runner: TritonRunner) -> None:
    row = Edge(DeepEPLLDispatchOutput[Payload], DeepEPLLCombineInput, SlabRowsInput).pre(deepep_ll_in_place).post(deepep_ll_post)
    assert_type(row, Transition[DeepEPLLDispatchOutput[Payload], DeepEPLLCombineInput, SlabRowsInput, SlabCarry[DeepEPLLHandle], RowsOutput])
    assert_type(row.using(runner), Callable[[DeepEPLLDispatchOutput[Payload]], DeepEPLLCombineInput])

"""What the types of the Ascend NPU say of what fits together."""

from typing import assert_type

from torch import Tensor

from moe_typed import Bf16ExpertWeights, Bf16Rows, Experts, Fp16Rows, GateUp, LogicalIds, MoELayer
from moe_typed.dispatchers import (
    NPU_INT8,
    AscendTPDispatcher,
    DeepEPLLNpuDispatcher,
    ExpertSpread,
    RingArena,
    Sorted,
    TPRouting,
    as_int8,
    as_they_are,
)
from moe_typed.formats import AwqExpertWeights, Int8ChannelExpertWeights, Int8TokenRows
from moe_typed.routing import SlotIds
from moe_typed.runners.ascend import (
    AscendBf16Weights,
    AscendW4A16Fp16Weights,
    AscendW4A16Weights,
    AscendW8A8Fp16Weights,
    AscendW8A8Weights,
    prepare_ascend,
    prepare_ascend_fp16,
)
from moe_typed.runners.ascend.components import FinalizeKMajor, FinalizeRowMajor, InitRoutingV1, InitRoutingV2Int8, Unpermute
from moe_typed.runners.ascend.ops import AscendBuffer, AscendOps
from moe_typed.stages import (
    AscendTPCombineInput,
    CompleteResult,
    DeepEPLLNpuCombineInput,
    OneRank,
    PartialResult,
)


def pairs_that_belong_together(ops: AscendOps) -> None:
    assert_type(Sorted(InitRoutingV1(ops, Bf16Rows)).finished_by(FinalizeKMajor(ops)), TPRouting[Bf16Rows, Bf16Rows])
    assert_type(Sorted(InitRoutingV2Int8(ops, Bf16Rows)).finished_by(FinalizeRowMajor(ops)), TPRouting[Bf16Rows, Int8TokenRows])
    Sorted(InitRoutingV2Int8(ops, Bf16Rows)).finished_by(Unpermute(ops))


def prepared_weights(dense: Bf16ExpertWeights[GateUp], int8: Int8ChannelExpertWeights[GateUp], awq: AwqExpertWeights[GateUp]) -> None:
    assert_type(prepare_ascend(dense), AscendBf16Weights)
    assert_type(prepare_ascend(int8), AscendW8A8Weights)
    assert_type(prepare_ascend_fp16(int8), AscendW8A8Fp16Weights)
    assert_type(prepare_ascend(awq), AscendW4A16Weights)
    assert_type(prepare_ascend_fp16(awq), AscendW4A16Fp16Weights)


def a_quantised_dispatcher_is_for_the_rows_of_its_model(ops: AscendOps, int8: Int8ChannelExpertWeights[GateUp]) -> None:
    dispatcher = AscendTPDispatcher(as_int8(Bf16Rows, ops))
    layer = dispatcher.then(Experts(prepare_ascend(int8, ops)))
    assert_type(layer, MoELayer[Bf16Rows, Int8TokenRows, AscendTPCombineInput, LogicalIds, PartialResult | CompleteResult])
    takes_bf16(layer)
    AscendTPDispatcher(as_int8(Fp16Rows, ops)).then(Experts(prepare_ascend_fp16(int8, ops)))


def takes_bf16(layer: MoELayer[Bf16Rows, Int8TokenRows, AscendTPCombineInput, LogicalIds, PartialResult | CompleteResult]) -> None: ...


def what_combine_returns(ops: AscendOps, combine_input: AscendTPCombineInput) -> Tensor:
    result = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).combine(combine_input)
    return assert_type(result, PartialResult | CompleteResult).completed(OneRank())


def a_layer_over_ranks(buffer: AscendBuffer[int, str, object], int8: Int8ChannelExpertWeights[GateUp], ops: AscendOps) -> None:
    dispatcher = DeepEPLLNpuDispatcher(buffer, NPU_INT8, ExpertSpread(0, 2, 8), max_tokens=16, arena=RingArena())
    layer = dispatcher.then(Experts(prepare_ascend(int8, ops)))
    assert_type(layer.dispatcher.payload, type[Int8TokenRows])
    assert_type(layer, MoELayer[Bf16Rows, Int8TokenRows, DeepEPLLNpuCombineInput, SlotIds])

"""Dispatchers over communication libraries: what belongs to one reaches no other, and each takes what its library can carry."""

import nixl_ep
import torch
from torch import Tensor

from moe_typed import Bf16Rows, Experts, LogicalIds, Routing, quantize_mxfp8
from moe_typed.dispatchers import (
    LL_BF16,
    LL_FP8,
    LL_FP8_ROWS,
    LL_FP8_UE8M0,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    DeepEPv2ExpandedDispatcher,
    DeepEPv2PlainDispatcher,
    ExpertSpread,
    LowLatencyBuffer,
    MooncakeBuffer,
    MooncakeDispatcher,
    MoriLowLatencyDispatcher,
    MoriNormalDispatcher,
    MoriOp,
    NixlDispatcher,
    PairedArena,
    PendingDispatch,
    RingArena,
)
from moe_typed.formats import Fp8Block128SlabRows
from moe_typed.routing import LocalIds, PaddedPhysicalIds, PhysicalIds, Residence, Settled
from moe_typed.runners import ReferenceDenseWeights, ReferenceMxFp8Weights
from moe_typed.stages import (
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    MoriEPLLDispatchOutput,
    MoriEPNormalDispatchOutput,
    ReceivedPerExpert,
)

Slab = Fp8Block128SlabRows


def combine_of_another_library(results: DeepEPLLCombineInput, mooncake: MooncakeDispatcher[Slab], nixl: NixlDispatcher[Slab]) -> None:
    mooncake.combine(results)
    # E: Argument 1 to "combine" of "SlabDispatcher" has incompatible type "DeepEPLLCombineInput"; expected "MooncakeCombineInput"
    # P: "DeepEPLLCombineInput" cannot be assigned to parameter "combine_input" of type "MooncakeCombineInput"
    nixl.combine(results)
    # E: Argument 1 to "combine" of "SlabDispatcher" has incompatible type "DeepEPLLCombineInput"; expected "NixlCombineInput"
    # P: "DeepEPLLCombineInput" cannot be assigned to parameter "combine_input" of type "NixlCombineInput"


def combine_of_the_other_mode(
    weights: ReferenceDenseWeights,
    rows: Bf16Rows,
    slots: Routing[PhysicalIds],
    normal: MoriNormalDispatcher[Bf16Rows, Bf16Rows],
    low_latency: MoriLowLatencyDispatcher[Bf16Rows, Bf16Rows],
) -> None:
    low_latency.combine(Experts(weights)(normal.dispatch(rows, slots)))
    # E: Argument 1 to "combine" of "MoriDispatcher" has incompatible type "MoriEPNormalCombineInput"; expected "MoriEPLLCombineInput"
    # P: "MoriEPNormalCombineInput" cannot be assigned to parameter "combine_input" of type "MoriEPLLCombineInput"


def combine_of_the_other_form(
    weights: ReferenceDenseWeights,
    rows: Bf16Rows,
    slots: Routing[PhysicalIds],
    plain: DeepEPv2PlainDispatcher[Bf16Rows, Bf16Rows],
    expanded: DeepEPv2ExpandedDispatcher[Bf16Rows, Bf16Rows],
) -> None:
    expanded.combine(Experts(weights)(plain.dispatch(rows, slots)))
    # E: Argument 1 to "combine" of "DeepEPv2ExpandedDispatcher" has incompatible type "DeepEPv2PlainCombineInput"
    # E: expected "DeepEPv2ExpandedCombineInput"
    # P: "DeepEPv2PlainCombineInput" cannot be assigned to parameter "combine_input" of type "DeepEPv2ExpandedCombineInput"


def slab_where_an_arena_belongs(dispatched: DeepEPLLDispatchOutput[Bf16Rows]) -> MoriEPLLDispatchOutput[Bf16Rows]:
    return dispatched
    # E: Incompatible return value type (got "DeepEPLLDispatchOutput[Bf16Rows]", expected "MoriEPLLDispatchOutput[Bf16Rows]")
    # P: Type "DeepEPLLDispatchOutput[Bf16Rows]" is not assignable to return type "MoriEPLLDispatchOutput[Bf16Rows]"


def low_latency_where_normal_belongs(dispatched: MoriEPLLDispatchOutput[Bf16Rows]) -> MoriEPNormalDispatchOutput[Bf16Rows]:
    return dispatched
    # E: Incompatible return value type (got "MoriEPLLDispatchOutput[Bf16Rows]", expected "MoriEPNormalDispatchOutput[Bf16Rows]")
    # P: Type "MoriEPLLDispatchOutput[Bf16Rows]" is not assignable to return type "MoriEPNormalDispatchOutput[Bf16Rows]"


def padded_ids_to_mori(mori: MoriNormalDispatcher[Bf16Rows, Bf16Rows], rows: Bf16Rows, padded: Routing[PaddedPhysicalIds]) -> None:
    mori.dispatch(rows, padded)
    # E: Argument 2 to "dispatch" of "MoriNormalDispatcher" has incompatible type "Routing[PaddedPhysicalIds, RoutedScaling]"
    # E: expected "Routing[PhysicalIds, RoutedScaling]"
    # P: "Routing[PaddedPhysicalIds, RoutedScaling]" cannot be assigned to parameter "routing" of type "Routing[PhysicalIds, RoutedScaling]"


def logical_ids_to_a_library(deepep: DeepEPNormalDispatcher[Bf16Rows, Bf16Rows], rows: Bf16Rows, logical: Routing[LogicalIds]) -> None:
    deepep.dispatch(rows, logical)
    # E: Argument 2 to "dispatch" of "DeepEPNormalDispatcher" has incompatible type "Routing[LogicalIds, RoutedScaling]"
    # E: expected "Routing[PhysicalIds | PaddedPhysicalIds, RoutedScaling]"
    # P: "Routing[LogicalIds, RoutedScaling]" cannot be assigned to parameter "routing" of type "Routing[SlotIds, RoutedScaling]"


def counts_of_experts_as_a_count_of_rows(ids: Tensor, weights: Tensor, received: ReceivedPerExpert) -> Routing[LocalIds]:
    return Routing(ids, weights, LocalIds, 4, Settled(), True, received)
    # E: Argument 7 to "Routing" has incompatible type "ReceivedPerExpert"; expected "int | DeviceCount"
    # P: "ReceivedPerExpert" cannot be assigned to parameter "live" of type "int | DeviceCount"


def experts_that_do_not_take_the_wire(deepep: DeepEPLowLatencyDispatcher[Slab], weights: ReferenceMxFp8Weights) -> None:
    deepep.then(Experts(weights))
    # E: Argument 1 to "Experts" has incompatible type "ReferenceMxFp8Weights"
    # E: expected "PreparedWeights[Runner[Never, RunnerOutput], Fp8Block128SlabRows]"
    # P: "Experts[AnyDenseRows | MxFp8Rows]" is not assignable to "ExpertStage[Slab]"


def wires_that_a_library_does_not_have(
    deepep: LowLatencyBuffer[tuple[Tensor, Tensor, int, int, int]], mooncake: MooncakeBuffer, spread: ExpertSpread
) -> None:
    DeepEPLowLatencyDispatcher(deepep, LL_FP8_ROWS, spread, max_tokens=4, topk_idx_t=torch.int64, arena=RingArena())
    # E: Value of type variable "P_co" of "DeepEPLowLatencyDispatcher" cannot be "Fp8Block128Rows"
    # P: "Fp8Block128Rows" is not assignable to type "Bf16Rows | Fp8Block128SlabRows | Fp8Block128PackedSlabRows"
    MooncakeDispatcher(mooncake, LL_FP8_UE8M0, spread, max_tokens=4, active_ranks=None, timeout_us=-1, arena=RingArena())
    # E: Value of type variable "P_co" of "MooncakeDispatcher" cannot be "Fp8Block128PackedSlabRows"
    # P: "Fp8Block128PackedSlabRows" is not assignable to type "Bf16Rows | Fp8Block128SlabRows | Fp8Block128Rows"
    MooncakeDispatcher(mooncake, quantize_mxfp8, spread, max_tokens=4, active_ranks=None, timeout_us=-1, arena=RingArena())
    # E: Argument 2 to "MooncakeDispatcher" has incompatible type "Conversion[Bf16Rows | Fp16Rows | Fp32Rows, MxFp8Rows]"
    # P: "Conversion[AnyDenseRows, MxFp8Rows]" cannot be assigned to parameter "wire"


def buffer_of_another_library(buffer: nixl_ep.Buffer, spread: ExpertSpread) -> None:
    DeepEPLowLatencyDispatcher(buffer, LL_FP8, spread, max_tokens=4, topk_idx_t=torch.int64, arena=RingArena())
    # E: has incompatible type "Buffer"; expected "LowLatencyBuffer[tuple[Tensor, Tensor, int, int, int]]"
    # P: "Buffer" is incompatible with protocol "LowLatencyBuffer[_Handle]"
    MooncakeDispatcher(buffer, LL_BF16, spread, max_tokens=4, active_ranks=None, timeout_us=-1, arena=RingArena())
    # E: has incompatible type "Buffer"; expected "MooncakeBuffer"
    # P: "Buffer" is incompatible with protocol "MooncakeBuffer"


def arena_of_another_kind(op: MoriOp, residence: Residence[PhysicalIds], ring: RingArena) -> None:
    MoriNormalDispatcher(op, quantize_mxfp8, residence, arena=ring)
    # E: has incompatible type "RingArena"; expected "PairedArena"
    # P: "RingArena" is not assignable to "PairedArena"


def layers_that_share_no_arena(op: MoriOp, buffer: LowLatencyBuffer[tuple[Tensor, Tensor, int, int, int]], residence: Residence[PhysicalIds]) -> None:
    MoriNormalDispatcher(op, quantize_mxfp8, residence)
    # E: Missing named argument "arena" for "MoriNormalDispatcher"
    # P: Argument missing for parameter "arena"
    DeepEPLowLatencyDispatcher(buffer, LL_FP8, ExpertSpread(0, 1, 2), max_tokens=4, topk_idx_t=torch.int64)
    # E: Missing named argument "arena" for "DeepEPLowLatencyDispatcher"
    # P: Argument missing for parameter "arena"


def masks_of_another_space(op: MoriOp, residence: Residence[LogicalIds]) -> None:
    MoriNormalDispatcher(op, quantize_mxfp8, residence, arena=PairedArena())
    # E: has incompatible type "Residence[LogicalIds]"; expected "Residence[PhysicalIds]"
    # P: "Residence[LogicalIds]" is not assignable to "Residence[PhysicalIds]"


def payload_before_it_arrived(pending: PendingDispatch[DeepEPLLDispatchOutput[Slab]]) -> None:
    print(pending.payload)
    # E: "PendingDispatch[DeepEPLLDispatchOutput[Fp8Block128SlabRows]]" has no attribute "payload"
    # P: Cannot access attribute "payload" for class "PendingDispatch[DeepEPLLDispatchOutput[Slab]]"
    # P: Type of "payload" is unknown
    # P: Argument type is unknown

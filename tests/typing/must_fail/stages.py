"""Stages of one library or mode where those of another belong, as people come to write it; ``test_foreign_stages`` has every pair."""

from torch import Tensor

from moe_typed import Bf16Rows, DeviceCount, Dispatcher, LocalIds, PhysicalIds, Routing, Settled
from moe_typed.runners.flat_rows import deepep_ll_pre
from moe_typed.runners.posts import deepep_ll_post
from moe_typed.stages import (
    DeepEPLLCombineInput,
    DeepEPLLHandle,
    DeepEPNormalHandle,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2ExpandedHandle,
    LiveRowsOutput,
    MooncakeHandle,
    MoriEPLLDispatchOutput,
    NixlCombineInput,
    PaddedPrefixSum,
    ReceivedPerExpert,
    SlabCarry,
)

LowLatency = Dispatcher[Bf16Rows, Bf16Rows, DeepEPLLCombineInput, PhysicalIds]


def slab_of_another_library(dispatcher: LowLatency, combine_input: NixlCombineInput) -> None:
    dispatcher.combine(combine_input)
    # E: Argument 1 to "combine" of "Dispatcher" has incompatible type "NixlCombineInput"; expected "DeepEPLLCombineInput"
    # P: "NixlCombineInput" cannot be assigned to parameter "combine_input" of type "DeepEPLLCombineInput"


def handle_of_another_mode(hidden_states: Tensor, origin: Routing[PhysicalIds], handle: DeepEPNormalHandle) -> None:
    DeepEPLLCombineInput(hidden_states, origin, handle)
    # E: Argument 3 to "DeepEPLLCombineInput" has incompatible type "DeepEPNormalHandle"; expected "DeepEPLLHandle"
    # P: "DeepEPNormalHandle" cannot be assigned to parameter "handle" of type "DeepEPLLHandle"


def carry_of_another_library(output: LiveRowsOutput, carry: SlabCarry[MooncakeHandle]) -> None:
    deepep_ll_post(output, carry)
    # E: Argument 2 to "deepep_ll_post" has incompatible type "SlabCarry[MooncakeHandle]"; expected "SlabCarry[DeepEPLLHandle]"
    # P: Type parameter "H_co@SlabCarry" is covariant, but "MooncakeHandle" is not a subtype of "DeepEPLLHandle"


def an_arena_is_no_slab(dispatched: MoriEPLLDispatchOutput[Bf16Rows]) -> None:
    deepep_ll_pre(dispatched)
    # E: Argument 1 to "deepep_ll_pre" has incompatible type "MoriEPLLDispatchOutput[Bf16Rows]"; expected "DeepEPLLDispatchOutput[Payload]"
    # P: "MoriEPLLDispatchOutput[Bf16Rows]" cannot be assigned to parameter "dispatched" of type "DeepEPLLDispatchOutput[Payload]"


def counts_per_expert_are_no_total(ids: Tensor, weights: Tensor, received: ReceivedPerExpert) -> None:
    Routing(ids, weights, LocalIds, 8, Settled(), True, received)
    # E: Argument 7 to "Routing" has incompatible type "ReceivedPerExpert"; expected "int | DeviceCount"
    # P: "ReceivedPerExpert" cannot be assigned to parameter "live" of type "int | DeviceCount"


def a_total_is_no_count_per_expert(origin: Routing[PhysicalIds], count: DeviceCount) -> ReceivedPerExpert:
    return count
    # E: Incompatible return value type (got "DeviceCount", expected "ReceivedPerExpert")
    # P: Type "DeviceCount" is not assignable to return type "ReceivedPerExpert"


def padded_ends_are_no_ends_of_live_rows(rows: Bf16Rows, slot_weights: Tensor, ends: PaddedPrefixSum, handle: DeepEPv2ExpandedHandle) -> None:
    DeepEPv2ExpandedDispatchOutput(rows, slot_weights, ends, Settled(), handle)
    # E: Argument 3 to "DeepEPv2ExpandedDispatchOutput" has incompatible type "PaddedPrefixSum"; expected "SegmentEnds"
    # P: "PaddedPrefixSum" cannot be assigned to parameter "segments" of type "SegmentEnds"


def origin_with_local_ids(hidden_states: Tensor, received: Routing[LocalIds], handle: DeepEPLLHandle) -> None:
    DeepEPLLCombineInput(hidden_states, received, handle)
    # E: Argument 2 to "DeepEPLLCombineInput" has incompatible type "Routing[LocalIds, RoutedScaling]"
    # P: Type parameter "I_co@Routing" is covariant, but "LocalIds" is not a subtype of "SlotIds"

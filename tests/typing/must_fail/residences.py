"""Shared slots of another state, and masks, maps and placements over other ids."""

from moe_typed import LocalIds, LogicalIds, Pending, PhysicalIds, Routing, Settled
from moe_typed.routing import (
    ExpertMap,
    ExpertMask,
    PaddedPhysicalIds,
    RankSharedSlots,
    SharedSlots,
    SinkMask,
    StaticPlacement,
    append_rank_shared,
    append_shared,
    in_order,
    localize_by_map,
    map_of,
    mask_of,
    to_sink,
)


def takes_map(expert_map: ExpertMap[LogicalIds]) -> None: ...


def takes_mask(expert_mask: ExpertMask[LogicalIds]) -> None: ...


def takes_sink(mask: SinkMask) -> None: ...


def takes_physical(routing: Routing[PhysicalIds]) -> None: ...


def pending_slots(routing: Routing[LogicalIds, Settled], slots: SharedSlots[Pending]) -> None:
    append_shared(routing, slots)
    # E: Cannot infer value of type parameter "S" of "append_shared"
    # P: "SharedSlots[Pending]" is not assignable to "SharedSlots[Settled]"


def settled_slots(routing: Routing[LogicalIds, Pending], slots: SharedSlots[Settled]) -> None:
    append_shared(routing, slots)
    # E: Cannot infer value of type parameter "S" of "append_shared"
    # P: "SharedSlots[Settled]" is not assignable to "SharedSlots[Pending]"


def pending_rank_slots(routing: Routing[PaddedPhysicalIds, Settled], slots: RankSharedSlots[Pending]) -> None:
    append_rank_shared(routing, slots)
    # E: Cannot infer value of type parameter "S" of "append_rank_shared"
    # P: "RankSharedSlots[Pending]" is not assignable to "RankSharedSlots[Settled]"


def settled_rank_slots(routing: Routing[PaddedPhysicalIds, Pending], slots: RankSharedSlots[Settled]) -> None:
    append_rank_shared(routing, slots)
    # E: Cannot infer value of type parameter "S" of "append_rank_shared"
    # P: "RankSharedSlots[Settled]" is not assignable to "RankSharedSlots[Pending]"


def slots_of_an_unknown_state(routing: Routing[LogicalIds], slots: SharedSlots[Pending]) -> None:
    append_shared(routing, slots)
    # E: Cannot infer value of type parameter "S" of "append_shared"
    # P: "SharedSlots[Pending]" is not assignable to "SharedSlots[RoutedScaling]"


def a_weight_of_ones_own(scaling: Settled) -> None:
    SharedSlots(1, scaling, 0.4)
    # E: Too many arguments for "SharedSlots"
    # P: Expected 2 positional arguments


def rank_slots_for_logical_ids(routing: Routing[LogicalIds, Settled], slots: RankSharedSlots[Settled]) -> None:
    append_rank_shared(routing, slots)
    # E: Argument 1 to "append_rank_shared" has incompatible type "Routing[LogicalIds, Settled]"; expected "Routing[PaddedPhysicalIds, Settled]"
    # P: Type parameter "I_co@Routing" is covariant, but "LogicalIds" is not a subtype of "PaddedPhysicalIds"


def global_slots_for_physical_ids(routing: Routing[PaddedPhysicalIds, Settled], slots: SharedSlots[Settled]) -> None:
    append_shared(routing, slots)
    # E: Argument 1 to "append_shared" has incompatible type "Routing[PaddedPhysicalIds, Settled]"; expected "Routing[LogicalIds, Settled]"
    # P: Type parameter "I_co@Routing" is covariant, but "PaddedPhysicalIds" is not a subtype of "LogicalIds"


def padded_for_physical(routing: Routing[PaddedPhysicalIds]) -> None:
    takes_physical(routing)
    # E: Argument 1 to "takes_physical" has incompatible type "Routing[PaddedPhysicalIds, RoutedScaling]"
    # P: Type parameter "I_co@Routing" is covariant, but "PaddedPhysicalIds" is not a subtype of "PhysicalIds"


def mask_for_map(mask: ExpertMask[LogicalIds]) -> None:
    takes_map(mask)
    # E: Argument 1 to "takes_map" has incompatible type "ExpertMask[LogicalIds]"; expected "ExpertMap[LogicalIds]"
    # P: "ExpertMask[LogicalIds]" is not assignable to "ExpertMap[LogicalIds]"


def map_for_mask(expert_map: ExpertMap[LogicalIds]) -> None:
    takes_mask(expert_map)
    # E: Argument 1 to "takes_mask" has incompatible type "ExpertMap[LogicalIds]"; expected "ExpertMask[LogicalIds]"
    # P: "ExpertMap[LogicalIds]" is not assignable to "ExpertMask[LogicalIds]"


def sink_for_map(sink: SinkMask) -> None:
    takes_map(sink)
    # E: Argument 1 to "takes_map" has incompatible type "SinkMask"; expected "ExpertMap[LogicalIds]"
    # P: "SinkMask" is not assignable to "ExpertMap[LogicalIds]"


def sink_for_mask(sink: SinkMask) -> None:
    takes_mask(sink)
    # E: Argument 1 to "takes_mask" has incompatible type "SinkMask"; expected "ExpertMask[LogicalIds]"
    # P: "SinkMask" is not assignable to "ExpertMask[LogicalIds]"


def mask_for_sink(mask: ExpertMask[LogicalIds]) -> None:
    takes_sink(mask)
    # E: Argument 1 to "takes_sink" has incompatible type "ExpertMask[LogicalIds]"; expected "SinkMask"
    # P: "ExpertMask[LogicalIds]" is not assignable to "SinkMask"


def mask_of_a_mask(expert_map: ExpertMap[LogicalIds]) -> None:
    mask_of(mask_of(expert_map))
    # E: Argument 1 to "mask_of" has incompatible type "ExpertMask[LogicalIds]"
    # P: "ExpertMask[LogicalIds]" is not assignable to "ExpertMap[


def map_of_a_map(expert_map: ExpertMap[LogicalIds]) -> None:
    map_of(expert_map, 4)
    # E: Argument 1 to "map_of" has incompatible type "ExpertMap[LogicalIds]"
    # P: "ExpertMap[LogicalIds]" is not assignable to "ExpertMask[


def a_map_over_other_ids(routing: Routing[PaddedPhysicalIds, Settled], expert_map: ExpertMap[LogicalIds]) -> None:
    localize_by_map(routing, expert_map)
    # E: Cannot infer value of type parameter "I" of "localize_by_map"
    # P: "ExpertMap[LogicalIds]" is not assignable to "ExpertMap[PaddedPhysicalIds]"


def mapped_twice(routing: Routing[LogicalIds, Settled], expert_map: ExpertMap[LogicalIds]) -> None:
    localize_by_map(localize_by_map(routing, expert_map), expert_map)
    # E: Cannot infer value of type parameter "I" of "localize_by_map"
    # P: "ExpertMap[LogicalIds]" is not assignable to "ExpertMap[LocalIds]"


def placed_twice(routing: Routing[LogicalIds, Settled], placement: StaticPlacement) -> None:
    placement.place(placement.place(routing))
    # E: Argument 1 to "place" of "Placement" has incompatible type "Routing[PaddedPhysicalIds, Settled]"; expected "Routing[LogicalIds, Settled]"
    # P: Type parameter "I_co@Routing" is covariant, but "PaddedPhysicalIds" is not a subtype of "LogicalIds"


def in_order_twice(routing: Routing[LogicalIds, Settled]) -> None:
    in_order(in_order(routing))
    # E: Argument 1 to "in_order" has incompatible type "Routing[PaddedPhysicalIds, Settled]"; expected "Routing[LogicalIds, Settled]"
    # P: Type parameter "I_co@Routing" is covariant, but "PaddedPhysicalIds" is not a subtype of "LogicalIds"


def sunk_twice(routing: Routing[LocalIds, Settled]) -> None:
    to_sink(to_sink(routing))
    # E: Argument 1 to "to_sink" has incompatible type "Routing[LocalSinkIds, Settled]"; expected "Routing[LocalIds, Settled]"
    # P: Type parameter "I_co@Routing" is covariant, but "LocalSinkIds" is not a subtype of "LocalIds"

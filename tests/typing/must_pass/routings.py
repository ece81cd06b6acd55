"""Routings on their way, with every id space and every state spelled out."""

from typing import assert_type

import torch
from torch import Tensor

from moe_typed import Bf16Rows, GroupedTopK, LocalIds, LocalSinkIds, LogicalIds, Pending, PhysicalIds, Routing, ScoredTopK, Settled
from moe_typed.routing import (
    BalancedPlacement,
    ExpertMap,
    ExpertMask,
    HashTopK,
    Ids,
    PaddedPhysicalIds,
    RankSharedSlots,
    SharedSlots,
    append_rank_shared,
    append_shared,
    contiguous_map,
    fill_nowhere,
    from_sink,
    fused,
    in_order,
    localize_by_map,
    map_of,
    mask_of,
    mask_padded,
    to_sink,
    weigh_input,
)


def rules_say_where_the_factor_is(logits: Tensor, tokens: Tensor, hashed: HashTopK[Settled], grouped: GroupedTopK[Pending]) -> None:
    assert_type(ScoredTopK(2, "sigmoid", True, Settled(2.5)).route(logits), Routing[LogicalIds, Settled])
    assert_type(ScoredTopK(2, "sigmoid", True, Pending(2.5)).route(logits), Routing[LogicalIds, Pending])
    assert_type(grouped.route(logits), Routing[LogicalIds, Pending])
    assert_type(hashed.route(logits, tokens), Routing[LogicalIds, Settled])
    assert_type(fused.FusedRouter(grouped).route(logits), Routing[LogicalIds, Pending])
    assert_type(fused.FusedHashRouter(hashed).route(logits, tokens), Routing[LogicalIds, Settled])


def shared_slots_take_their_own_state(settled: Routing[LogicalIds, Settled], pending: Routing[LogicalIds, Pending], count: Tensor) -> None:
    assert_type(append_shared(settled, SharedSlots(1, Settled())), Routing[LogicalIds, Settled])
    own = RankSharedSlots(1, 4, 0, 2, Pending(2.5))
    assert_type(own, RankSharedSlots[Pending])
    with_own = append_rank_shared(in_order(pending), own)
    assert_type(with_own, Routing[PaddedPhysicalIds, Pending])
    assert_type(fused.append_rank_shared(in_order(pending), own), Routing[PaddedPhysicalIds, Pending])
    assert_type(mask_padded(with_own, count), Routing[PaddedPhysicalIds, Pending])
    assert_type(fused.mask_padded(settled, count), Routing[LogicalIds, Settled])


def from_experts_to_the_slots_of_a_rank(routing: Routing[LogicalIds, Pending], placement: BalancedPlacement) -> None:
    placed = placement.place(routing)
    assert_type(placed, Routing[PaddedPhysicalIds, Pending])
    assert_type(fill_nowhere(placed), Routing[PhysicalIds, Pending])
    here = contiguous_map(PaddedPhysicalIds, 8, 4, 4, torch.device("cpu"))
    assert_type(here, ExpertMap[PaddedPhysicalIds])
    assert_type(mask_of(here), ExpertMask[PaddedPhysicalIds])
    assert_type(map_of(mask_of(here), 4), ExpertMap[PaddedPhysicalIds])
    local = localize_by_map(placed, here)
    assert_type(local, Routing[LocalIds, Pending])
    assert_type(to_sink(local), Routing[LocalSinkIds, Pending])
    assert_type(from_sink(to_sink(local)), Routing[LocalIds, Pending])


def input_weights_keep_rows_and_space(rows: Bf16Rows, routing: Routing[LocalIds, Settled]) -> tuple[Bf16Rows, Routing[Ids]]:
    weighed, spent = weigh_input(rows, routing)
    assert_type(weighed, Bf16Rows)
    assert_type(spent, Routing[LocalIds, Settled])
    return weighed, spent

"""Shared experts as extra routes: columns behind the routed ones.

The weight of a shared route is no argument. It follows from who owns the routed scaling factor: 1 where the factor is settled, 1 / factor where
combine will still multiply by it. Slots are made for one of these states, ``SharedSlots[S]``, and take routings in that state alone.

The functions are the reference; those of the same names in ``fused`` do the same in one launch.
"""

from collections.abc import Callable
from typing import Generic, TypeAlias, TypeVar, final

from torch import Tensor

from ..boundary import boundary
from ..ops.shared_slots import reference
from .ids import LogicalIds, PaddedPhysicalIds
from .routing import Routing, live_tensor
from .scaling import RoutedScaling

S = TypeVar("S", bound=RoutedScaling)

Append: TypeAlias = Callable[[Tensor, Tensor, int, int, float, Tensor | None], tuple[Tensor, Tensor]]
AppendInterleaved: TypeAlias = Callable[[Tensor, Tensor, int, int, int, float, Tensor | None], tuple[Tensor, Tensor]]


@final
@boundary
class SharedSlots(Generic[S]):
    """``num_shared`` shared experts, numbered behind the routed ones: E, E + 1, ... ``scaling``: the state of the routings that they are added to."""

    num_shared: int
    scaling: S


@final
@boundary
class RankSharedSlots(Generic[S]):
    """``num_shared`` shared experts on every rank, in slots behind its ``num_local_routed`` routed ones (DeepEP's interleaved layout).

    A row goes to the shared slots of its own rank, ``ep_rank`` of ``ep_size``. ``scaling``: the state of the routings that they are added to.
    """

    num_shared: int
    num_local_routed: int
    ep_rank: int
    ep_size: int
    scaling: S


def append_shared(routing: Routing[LogicalIds, S], slots: SharedSlots[S]) -> Routing[LogicalIds, S]:
    """Return the routing with a column for each shared expert.

    Padding rows get -1 and weight 0 in every column. Without shared experts the routing comes back as it is.
    Raises: ValueError when it has shared columns already, or its scaling is not the one that the slots were made for.
    """
    return append_with(reference.append_shared, routing, slots)


def append_rank_shared(routing: Routing[PaddedPhysicalIds, S], slots: RankSharedSlots[S]) -> Routing[PaddedPhysicalIds, S]:
    """Return the routing with a column for each shared slot of its own rank, its routed ids moved up by the shared slots of the ranks before.

    An id of -1 stays; padding rows get -1 and weight 0 in every column. Without shared experts the routing comes back as it is.
    Raises: ValueError as ``append_shared``, and when the slots are not those of ``routing.num_experts`` routed experts.
    """
    return append_rank_with(reference.append_shared_interleaved, routing, slots)


def append_with(function: Append, routing: Routing[LogicalIds, S], slots: SharedSlots[S]) -> Routing[LogicalIds, S]:
    """Do ``append_shared`` by an implementation of the kernel."""
    routing.demand(LogicalIds)
    _check(routing, slots.scaling)
    if slots.num_shared <= 0:
        return routing
    experts, live = routing.num_experts, live_tensor(routing.live, routing.topk_ids)
    weight = routing.scaling.shared_weight
    ids, weights = function(routing.topk_ids, routing.topk_weights, slots.num_shared, experts, weight, live)
    return routing.extended(ids, weights, experts + slots.num_shared, slots.num_shared, experts)


def append_rank_with(function: AppendInterleaved, routing: Routing[PaddedPhysicalIds, S], slots: RankSharedSlots[S]) -> Routing[PaddedPhysicalIds, S]:
    """Do ``append_rank_shared`` by an implementation of the kernel."""
    routing.demand(PaddedPhysicalIds)
    _check(routing, slots.scaling)
    if not 0 <= slots.ep_rank < slots.ep_size or slots.ep_size * slots.num_local_routed != routing.num_experts:
        raise ValueError(
            f"the slots are those of rank {slots.ep_rank} of {slots.ep_size} with {slots.num_local_routed} routed experts each, "
            f"but the routing is over {routing.num_experts}"
        )
    if slots.num_shared <= 0:
        return routing
    live, weight = live_tensor(routing.live, routing.topk_ids), routing.scaling.shared_weight
    ids, weights = function(routing.topk_ids, routing.topk_weights, slots.num_shared, slots.num_local_routed, slots.ep_rank, weight, live)
    first = reference.first_local_shared_id(slots.num_local_routed, slots.num_shared, slots.ep_rank)
    return routing.extended(ids, weights, routing.num_experts + slots.ep_size * slots.num_shared, slots.num_shared, first)


def _check(routing: Routing[LogicalIds, S] | Routing[PaddedPhysicalIds, S], scaling: S) -> None:
    if routing.num_shared:
        raise ValueError(f"the routing has {routing.num_shared} shared columns already; they are appended once")
    if type(routing.scaling) is not type(scaling) or routing.scaling.shared_weight != scaling.shared_weight:
        raise ValueError(f"the slots were made for routings that are {scaling}, but this one is {routing.scaling}: its shared weight would be wrong")

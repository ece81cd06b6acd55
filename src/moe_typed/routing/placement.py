"""From the experts of a model to the slots of the ranks: logical ids to physical ones, redundant copies among them.

An expert has one slot or several. Which copy a route goes to is the placement's rule, and every rule is a function of the routing and of what the
placement holds: no generator is advanced, so all ranks that see the same routing choose alike.
"""

from abc import ABC, abstractmethod
from typing import TypeVar, final

import torch
from jaxtyping import Int32
from torch import Tensor
from typing_extensions import override

from ..boundary import boundary, value_error
from .ids import LogicalIds, PaddedPhysicalIds, PhysicalIds
from .routing import Routing, live_mask
from .scaling import RoutedScaling

S = TypeVar("S", bound=RoutedScaling)

# Knuth's multiplicative hash (The Art of Computer Programming, volume 3, section 6.4): 2^32 divided by the golden ratio, made odd.
_HASH = 2654435761
_MASK_32 = 0xFFFFFFFF


class Placement(ABC):
    """The base of all placements over ``num_slots`` physical slots."""

    num_slots: int

    @abstractmethod
    def slots_of(self, topk_ids: Tensor) -> Tensor:
        """Return int32 (rows, k): the slot of each route. ``topk_ids``: int32 logical ids, -1 for a route that goes nowhere; its slot is ignored."""

    @property
    @abstractmethod
    def num_experts(self) -> int:
        """Return how many logical experts are placed."""

    def place(self, routing: Routing[LogicalIds, S]) -> Routing[PaddedPhysicalIds, S]:
        """Return the routing over slots. A route that goes nowhere still does, with -1 and weight 0: so do all of a padding row.

        Raises: ValueError when the routing is over another number of experts; BoundaryError for ids in another space.
        """
        routing.demand(LogicalIds)
        if routing.num_experts != self.num_experts:
            raise ValueError(f"the placement holds {self.num_experts} experts, but the routing is over {routing.num_experts}")
        nowhere = _nowhere(routing)
        slots = self.slots_of(torch.where(nowhere, -1, routing.topk_ids))
        weights = torch.where(nowhere, 0.0, routing.topk_weights)
        return routing.moved(torch.where(nowhere, -1, slots), weights, PaddedPhysicalIds, self.num_slots)


@final
@boundary
class StaticPlacement(Placement):
    """One slot an expert. ``slots``: int32 (experts,)."""

    slots: Int32[Tensor, " experts"]
    num_slots: int

    @property
    @override
    def num_experts(self) -> int:
        return self.slots.shape[0]

    @override
    def slots_of(self, topk_ids: Tensor) -> Tensor:
        return self.slots[topk_ids]

    def check_values(self) -> None:
        """Raise BoundaryError for a slot that is not one of the slots, or is the slot of two experts."""
        _check_slots(self, "slots", self.slots, self.num_slots)


class CopiedPlacement(Placement):
    """The base of placements with several slots an expert.

    ``slots``: int32 (experts, most), of which the first ``copies[e]`` of expert e count; ``copies``: int32 (experts,).
    """

    slots: Tensor
    copies: Tensor

    @abstractmethod
    def _turns(self, topk_ids: Tensor) -> Tensor:
        """Return an integer for each route, or each row; modulo the number of copies it is the copy that the route takes."""

    @property
    @override
    def num_experts(self) -> int:
        return self.slots.shape[0]

    @override
    def slots_of(self, topk_ids: Tensor) -> Tensor:
        return self.slots[topk_ids, self._turns(topk_ids) % self.copies[topk_ids]]

    def check_values(self) -> None:
        """Raise BoundaryError for an expert without a copy, or a slot that is not one of the slots, or holds two copies."""
        if bool((self.copies < 1).any()) or bool((self.copies > self.slots.shape[1]).any()):
            raise value_error(self, "copies", f"holds a count outside 1..{self.slots.shape[1]}")
        counted = torch.arange(self.slots.shape[1], device=self.slots.device) < self.copies.unsqueeze(1)
        _check_slots(self, "slots", self.slots[counted], self.num_slots)


@final
@boundary
class HashedPlacement(CopiedPlacement):
    """Copies chosen by a hash of (row, column, seed): random in effect, and the same on every rank."""

    slots: Int32[Tensor, "experts most"]
    copies: Int32[Tensor, " experts"]
    num_slots: int
    seed: int

    @override
    def _turns(self, topk_ids: Tensor) -> Tensor:
        place = torch.arange(topk_ids.numel(), device=topk_ids.device, dtype=torch.int64).view_as(topk_ids)
        mixed = (place + self.seed) * _HASH & _MASK_32
        return ((mixed ^ mixed >> 15) * _HASH & _MASK_32) >> 8


@final
@boundary
class BalancedPlacement(CopiedPlacement):
    """Copies chosen by the load of the batch: the routes of an expert take its copies in turn, so that copies differ by one route at most."""

    slots: Int32[Tensor, "experts most"]
    copies: Int32[Tensor, " experts"]
    num_slots: int

    @override
    def _turns(self, topk_ids: Tensor) -> Tensor:
        flat = topk_ids.flatten()
        by_expert, order = torch.sort(flat, stable=True)
        first = torch.searchsorted(by_expert, by_expert)  # where the run of each entry's expert begins
        position = torch.arange(flat.numel(), device=flat.device) - first
        return torch.empty_like(position).scatter_(0, order, position).view_as(topk_ids)


def _check_slots(placement: Placement, name: str, slots: Tensor, num_slots: int) -> None:
    if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= num_slots):
        raise value_error(placement, name, f"holds a slot outside 0..{num_slots - 1}")
    if slots.numel() and int(torch.bincount(slots).max()) > 1:
        raise value_error(placement, name, "holds a slot twice: a slot holds one expert")


def _nowhere(routing: Routing[LogicalIds, S] | Routing[PaddedPhysicalIds, S]) -> Tensor:
    return (routing.topk_ids < 0) | ~live_mask(routing)


def in_order(routing: Routing[LogicalIds, S]) -> Routing[PaddedPhysicalIds, S]:
    """Return the routing where expert e has slot e and no other: the placement of an engine without redundant experts. The tensors are the same."""
    routing.demand(LogicalIds)
    return routing.moved(routing.topk_ids, routing.topk_weights, PaddedPhysicalIds, routing.num_experts)


def fill_nowhere(routing: Routing[PaddedPhysicalIds, S], slot: int = 0) -> Routing[PhysicalIds, S]:
    """Return the routing with every route that goes nowhere sent to a slot with weight 0, for consumers that know no sentinel.

    The slots are ``slot`` and those after it, round and round, without those that the row goes to: no row names a slot twice, for which AITER would
    take the weight of the last. Such a route, padding rows among them, costs its share of dispatch and of the GEMMs.
    Raises: ValueError when there is no such slot, or fewer slots than routes of a row.
    """
    num_slots, k = routing.num_experts, routing.topk_ids.shape[1]
    if not 0 <= slot < num_slots:
        raise ValueError(f"slot {slot} is not one of the {num_slots} slots")
    if k > num_slots:
        raise ValueError(f"{k} routes of a row cannot go to {num_slots} slots, each once")
    routing.demand(PaddedPhysicalIds)
    ids = routing.topk_ids
    nowhere = _nowhere(routing)
    candidates = (torch.arange(k, dtype=torch.int32, device=ids.device) + slot) % num_slots  # as many as routes: enough of them are free
    is_taken = ((ids.unsqueeze(2) == candidates) & ~nowhere.unsqueeze(2)).any(1)
    free_first = candidates[torch.sort(is_taken.to(torch.int8), dim=1, stable=True).indices]
    turn = (nowhere.cumsum(1) - 1).clamp(min=0)
    filled = torch.where(nowhere, free_first.gather(1, turn), ids)
    return routing.moved(filled, torch.where(nowhere, 0.0, routing.topk_weights), PhysicalIds, num_slots)

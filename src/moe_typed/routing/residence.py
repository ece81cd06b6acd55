"""Which slots are on this rank, in the three forms that kernels ask for.

All are int32 over slots, and none can stand for another:

* ``ExpertMask``: 1 for a slot of this rank, 0 for any other.
* ``ExpertMap``: the local number of a slot of this rank, -1 for any other.
* ``SinkMask``: over local slots and the sink after them: 1 for each local slot, 0 for the sink.
"""

from typing import Generic, TypeVar, final

import torch
from jaxtyping import Int32
from torch import Tensor

from ..boundary import boundary, value_error
from .ids import Ids, LocalIds, LocalSinkIds
from .routing import Routing, live_mask
from .scaling import RoutedScaling

# The id space, as everywhere. Masks and maps are invariant in it: a map of one space has no common base with a routing in another.
I = TypeVar("I", bound=Ids)  # noqa: E741
S = TypeVar("S", bound=RoutedScaling)


@final
@boundary
class ExpertMask(Generic[I]):
    """Mark the slots of this rank. ``mask``: int32 (slots,), 1 or 0. ``space``: the ids that index it."""

    mask: Int32[Tensor, " slots"]
    space: type[I]

    def check_values(self) -> None:
        """Raise BoundaryError for entries other than 0 and 1: such as those of a map."""
        if bool(((self.mask != 0) & (self.mask != 1)).any()):
            raise value_error(self, "mask", "holds something other than 0 and 1", "an ExpertMap holds local numbers and -1")


@final
@boundary
class ExpertMap(Generic[I]):
    """Number the slots of this rank. ``local``: int32 (slots,), 0 to ``num_local`` - 1 each once, or -1. ``space``: the ids that index it."""

    local: Int32[Tensor, " slots"]
    space: type[I]
    num_local: int

    def check_values(self) -> None:
        """Raise BoundaryError unless each local number stands exactly once and -1 everywhere else: a mask does not."""
        numbers = self.local[self.local != -1].sort().values
        if not torch.equal(numbers, torch.arange(self.num_local, dtype=torch.int32, device=numbers.device)):
            raise value_error(
                self, "local", f"does not hold each of 0..{self.num_local - 1} once and -1 everywhere else", "an ExpertMask holds 0 and 1"
            )


@final
@boundary
class Residence(Generic[I]):
    """Say which slots are on this rank, in both forms, made once for all layers: ``mask`` for AITER, ``map`` for what wants local ids.

    AITER numbers the marked slots in ascending order (the running sum of its mask), so that the map must, too.
    """

    mask: ExpertMask[I]
    map: ExpertMap[I]

    def check_values(self) -> None:
        """Raise BoundaryError for a map that does not number the slots of the mask, in ascending order."""
        if not torch.equal(map_of(self.mask, self.map.num_local).local, self.map.local):
            raise value_error(self, "map", "does not number the slots that the mask marks, in ascending order", "map_of makes the map of a mask")


@final
@boundary
class SinkMask:
    """Mark the local slots before the sink. ``mask``: int32 (local slots + 1,), all 1 but the last, which is 0 (AITER's form for local ids)."""

    mask: Int32[Tensor, "local_slots_and_sink"]

    def check_values(self) -> None:
        """Raise BoundaryError for anything but ones and a last zero."""
        if self.mask.numel() < 1 or int(self.mask[-1]) != 0 or not bool((self.mask[:-1] == 1).all()):
            raise value_error(self, "mask", "is not all ones with a last zero")


def contiguous_map(space: type[I], num_slots: int, first: int, count: int, device: torch.device) -> ExpertMap[I]:
    """Return the map of a rank that holds slots ``first`` to ``first + count - 1``. Raises: ValueError when they are not among the slots."""
    if first < 0 or count < 1 or first + count > num_slots:
        raise ValueError(f"slots {first}..{first + count - 1} do not lie within the {num_slots} slots")
    local = torch.arange(num_slots, dtype=torch.int32, device=device) - first
    return ExpertMap(torch.where((local >= 0) & (local < count), local, -1), space, count)


def mask_of(expert_map: ExpertMap[I]) -> ExpertMask[I]:
    """Return the mask of a map."""
    return ExpertMask((expert_map.local >= 0).to(torch.int32), expert_map.space)


def contiguous_residence(space: type[I], num_slots: int, first: int, count: int, device: torch.device) -> Residence[I]:
    """Return the residence of a rank that holds slots ``first`` to ``first + count - 1``. Raises: ValueError as ``contiguous_map``."""
    expert_map = contiguous_map(space, num_slots, first, count, device)
    return Residence(mask_of(expert_map), expert_map)


def map_of(expert_mask: ExpertMask[I], num_local: int) -> ExpertMap[I]:
    """Return the map that numbers the marked slots in their order. ``num_local``: how many are marked, which the host cannot read without waiting."""
    marked = expert_mask.mask == 1
    numbers = marked.cumsum(0, dtype=torch.int32) - 1
    return ExpertMap(torch.where(marked, numbers, -1), expert_mask.space, num_local)


def sink_mask(num_local: int, device: torch.device) -> SinkMask:
    """Return the mask of ``num_local`` local slots and the sink after them."""
    mask = torch.ones(num_local + 1, dtype=torch.int32, device=device)
    mask[-1] = 0
    return SinkMask(mask)


def localize_by_map(routing: Routing[I, S], expert_map: ExpertMap[I]) -> Routing[LocalIds, S]:
    """Return the routing over the slots of this rank; a route to any other, and every route of a padding row, becomes -1 with weight 0.

    Raises: ValueError when the map is over another number of slots than the routing, or over another id space.
    """
    slots = expert_map.local.shape[0]
    if slots != routing.num_experts or expert_map.space is not routing.space:
        raise ValueError(
            f"the map is over {slots} {expert_map.space.title} slots, but the routing over {routing.num_experts} {routing.space.title} ones"
        )
    goes = (routing.topk_ids >= 0) & live_mask(routing)
    local = expert_map.local[torch.where(goes, routing.topk_ids, 0)]
    here = goes & (local >= 0)
    return routing.moved(torch.where(here, local, -1), torch.where(here, routing.topk_weights, 0.0), LocalIds, expert_map.num_local)


def to_sink(routing: Routing[LocalIds, S]) -> Routing[LocalSinkIds, S]:
    """Return the routing with every -1, and every route of a padding row, sent to the sink slot, ``num_experts`` of the routing."""
    routing.demand(LocalIds)
    nowhere = routing.topk_ids < 0
    if not routing.all_live:
        nowhere = nowhere | ~live_mask(routing)
    ids = torch.where(nowhere, routing.num_experts, routing.topk_ids)
    return routing.moved(ids, routing.topk_weights, LocalSinkIds, routing.num_experts)


def from_sink(routing: Routing[LocalSinkIds, S]) -> Routing[LocalIds, S]:
    """Return the routing with every id at the sink slot turned back to -1."""
    routing.demand(LocalSinkIds)
    ids = torch.where(routing.topk_ids == routing.num_experts, -1, routing.topk_ids)
    return routing.moved(ids, routing.topk_weights, LocalIds, routing.num_experts)

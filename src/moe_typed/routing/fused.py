"""The kernels of routing: the functions and rules of this room in one launch each. Importing this imports Triton.

Every function here does what its namesake without Triton does. Weights agree to the last bits of float32; ids agree too, but where two experts'
scores lie so close that the last bits decide between them.
"""

from typing import Generic, TypeVar, final

from torch import Tensor
from typing_extensions import override

from ..boundary import boundary
from ..ops.hash_gate.triton import hash_gate
from ..ops.local_ids.triton import local_ids
from ..ops.padded_rows.triton import fill_padded_rows
from ..ops.shared_slots import triton as shared_slots
from ..ops.topk_gate.triton import topk_gate
from . import padded, shared
from .ids import Ids, LocalIds, LogicalIds, PaddedPhysicalIds
from .routing import DeviceCount, Routing, localize_with
from .scaling import RoutedScaling
from .topk import HashTopK, Router, Selection, apply_gate, apply_hash

I = TypeVar("I", bound=Ids)  # noqa: E741  the id space, as everywhere
S = TypeVar("S", bound=RoutedScaling)
S_co = TypeVar("S_co", bound=RoutedScaling, covariant=True)


@final
@boundary
class FusedRouter(Router[S_co]):
    """A selection rule in one kernel."""

    rule: Selection[S_co]

    @override
    def route(self, logits: Tensor, live: int | DeviceCount | None = None) -> Routing[LogicalIds, S_co]:
        return apply_gate(topk_gate, self.rule.gate, logits, live)


@final
@boundary
class FusedHashRouter(Generic[S_co]):
    """A hash rule in one kernel."""

    rule: HashTopK[S_co]

    def route(self, logits: Tensor, token_ids: Tensor, live: int | DeviceCount | None = None) -> Routing[LogicalIds, S_co]:
        """See HashTopK.route."""
        return apply_hash(hash_gate, self.rule, logits, token_ids, live)


def localize(routing: Routing[LogicalIds, S], first: int, count: int) -> Routing[LocalIds, S]:
    """See routing.localize."""
    return localize_with(local_ids, routing, first, count)


def append_shared(routing: Routing[LogicalIds, S], slots: shared.SharedSlots[S]) -> Routing[LogicalIds, S]:
    """See shared.append_shared."""
    return shared.append_with(shared_slots.append_shared, routing, slots)


def append_rank_shared(routing: Routing[PaddedPhysicalIds, S], slots: shared.RankSharedSlots[S]) -> Routing[PaddedPhysicalIds, S]:
    """See shared.append_rank_shared."""
    return shared.append_rank_with(shared_slots.append_shared_interleaved, routing, slots)


def mask_padded(routing: Routing[I, S], count: Tensor) -> Routing[I, S]:
    """See padded.mask_padded."""
    return padded.mask_with(fill_padded_rows, routing, count)

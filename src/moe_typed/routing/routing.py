"""The routing of a batch: which experts each row goes to, and with what weight."""

from collections.abc import Callable
from typing import Annotated, Generic, TypeAlias, final

import torch
from jaxtyping import Float32, Int32
from torch import Tensor
from typing_extensions import TypeVar

from ..boundary import Dim, boundary, value_error
from ..ops.local_ids.reference import local_ids
from .ids import Ids, LocalIds, LogicalIds
from .scaling import RoutedScaling, Settled

I_co = TypeVar("I_co", bound=Ids, covariant=True)
S_co = TypeVar("S_co", bound=RoutedScaling, covariant=True, default=RoutedScaling)
J = TypeVar("J", bound=Ids)
S = TypeVar("S", bound=RoutedScaling)
Localize: TypeAlias = Callable[[Tensor, Tensor, int, int, Tensor | None], tuple[Tensor, Tensor]]


@final
@boundary
class DeviceCount:
    """A number of live rows that lives on the device, and may change between two replays of one CUDA graph."""

    count: Int32[Tensor, "1"]


@final
@boundary
class Routing(Generic[I_co, S_co]):
    """Say for each row which ``k`` experts it goes to.

    ``topk_ids``: int32 (rows, k) in the id space ``space`` over ``num_experts`` slots. ``topk_weights``: float32 (rows, k). ``scaling``: who
    applies the routed scaling factor. ``renormalized``: whether the weights of a row were divided by their sum. ``live``: how many leading rows are
    real; the rest are padding and give zeros. ``num_shared``: how many trailing columns are shared-expert slots, ``first_shared`` and those after
    it, each once in a row; None where the host does not know which.
    """

    topk_ids: Int32[Tensor, "rows k"]
    topk_weights: Float32[Tensor, "rows k"]
    space: type[I_co]
    num_experts: Annotated[int, Dim("experts")]
    scaling: S_co
    renormalized: bool
    live: int | DeviceCount
    num_shared: int = 0
    first_shared: int | None = None

    def demand(self, space: type[Ids]) -> None:
        """Raise BoundaryError unless the ids are in ``space``: at every debug level, for callers that no checker has read."""
        if self.space is not space:
            hint = "ids are mapped once, and each map takes the space that it is for"
            raise value_error(self, "space", f"is {self.space.__qualname__}, expected {space.__qualname__}", hint)

    def moved(self, topk_ids: Tensor, topk_weights: Tensor, space: type[J], num_experts: int) -> "Routing[J, S_co]":
        """Return the routing with other ids and weights, in another id space over other slots; where the shared slots went is not known."""
        return Routing(topk_ids, topk_weights, space, num_experts, self.scaling, self.renormalized, self.live, self.num_shared)

    def extended(self, topk_ids: Tensor, topk_weights: Tensor, num_experts: int, num_shared: int, first_shared: int) -> "Routing[I_co, S_co]":
        """Return the routing with shared columns behind the others, over the slots that there are now."""
        return Routing(topk_ids, topk_weights, self.space, num_experts, self.scaling, self.renormalized, self.live, num_shared, first_shared)

    def limited(self, topk_ids: Tensor, topk_weights: Tensor, live: DeviceCount) -> "Routing[I_co, S_co]":
        """Return the routing with fewer live rows, and ids and weights that say so."""
        return Routing(
            topk_ids, topk_weights, self.space, self.num_experts, self.scaling, self.renormalized, live, self.num_shared, self.first_shared
        )

    def head(self, rows: int) -> "Routing[I_co, S_co]":
        """Return the routing of the first ``rows`` rows, which hold all live ones where the count is on the device."""
        live = min(self.live, rows) if isinstance(self.live, int) else self.live
        return Routing(
            self.topk_ids[:rows],
            self.topk_weights[:rows],
            self.space,
            self.num_experts,
            self.scaling,
            self.renormalized,
            live,
            self.num_shared,
            self.first_shared,
        )

    @property
    def all_live(self) -> bool:
        """Say whether the host knows that every row is live."""
        return isinstance(self.live, int) and self.live == self.topk_ids.shape[0]

    def count_live(self) -> int:
        """Return how many rows are live; waits for the device where the count lives there."""
        return self.live if isinstance(self.live, int) else int(self.live.count.item())

    def check_values(self) -> None:
        """Raise BoundaryError for ids outside their space, weights that are not finite, or a live count beyond the rows."""
        rows, k = self.topk_ids.shape
        live = self.count_live()
        if not 0 <= live <= rows:
            raise value_error(self, "live", f"is {live}, but there are {rows} rows")
        if not 0 <= self.num_shared <= k:
            raise value_error(self, "num_shared", f"is {self.num_shared}, but there are {k} columns")
        if live and k:
            low, high = self.space.bounds(self.num_experts)
            ids = self.topk_ids[:live]
            least, most = int(ids.min()), int(ids.max())
            if least < low or most > high:
                worst = least if least < low else most
                raise value_error(
                    self,
                    "topk_ids",
                    f"holds the id {worst}, but {self.space.title} ids over {self.num_experts} experts lie in {low}..{high}",
                    "was an id mapped twice, or not at all?",
                )
            if not bool(torch.isfinite(self.topk_weights[:live]).all()):
                raise value_error(self, "topk_weights", "holds an infinity or a NaN")
            self._check_shared(ids, k - self.num_shared)

    def _check_shared(self, ids: Tensor, routed: int) -> None:
        """Raise BoundaryError for a row that goes somewhere and lacks a shared id, or has one among its routed ids."""
        if not self.num_shared or self.first_shared is None:
            return
        expected = range(self.first_shared, self.first_shared + self.num_shared)
        shared = torch.tensor(expected, device=ids.device)
        goes = (ids >= 0).any(1, keepdim=True)
        if bool(((ids[:, routed:] != shared) & goes).any()):
            raise value_error(self, "topk_ids", f"lacks a shared id in a row: its last {self.num_shared} columns must hold {[*expected]}")
        if bool(torch.isin(ids[:, :routed], shared).any()):
            raise value_error(self, "topk_ids", "holds a shared id twice in a row", "the router spends a column on it, and it is appended as well")


def live_mask(routing: Routing[Ids]) -> Tensor:
    """Return bool (rows, 1), true for live rows; no host sync."""
    rows = torch.arange(routing.topk_ids.shape[0], device=routing.topk_ids.device).unsqueeze(1)
    return rows < (routing.live if isinstance(routing.live, int) else routing.live.count)


def first_repeat(ids: Tensor, counted: Tensor) -> tuple[int, int] | None:
    """Return row and id of the first id that stands twice in a row among the ``counted`` ones, None where there is none. Waits for the device."""
    others = -1 - torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device)  # each of them once, and no id
    ordered = torch.where(counted, ids, others).sort(1).values
    again = (ordered[:, 1:] == ordered[:, :-1]).nonzero()
    if not again.shape[0]:
        return None
    row, column = (int(place) for place in again[0])
    return row, int(ordered[row, column])


def live_tensor(live: int | DeviceCount | None, like: Tensor) -> Tensor | None:
    """Return the live count as int32 (1,) on the device, None where every row is live."""
    if live is None or (isinstance(live, int) and live == like.shape[0]):
        return None
    return torch.full((1,), live, dtype=torch.int32, device=like.device) if isinstance(live, int) else live.count


def localize(routing: Routing[LogicalIds, S], first: int, count: int) -> Routing[LocalIds, S]:
    """Return the routing over the ``count`` experts from ``first`` on, which this rank holds.

    A route to any other expert, and every route of a padding row, becomes -1 and keeps its place, its weight set to 0; but where the rank holds
    every expert, nothing is to be done: ids and weights stay as they are, and the live count says which rows are padding.
    Raises: ValueError when the range does not lie within the experts; BoundaryError for ids in another space.
    """
    return localize_with(local_ids, routing, first, count)


def localize_with(function: Localize, routing: Routing[LogicalIds, S], first: int, count: int) -> Routing[LocalIds, S]:
    """Do ``localize`` by an implementation of the kernel."""
    routing.demand(LogicalIds)
    if first < 0 or count < 1 or first + count > routing.num_experts:
        raise ValueError(f"experts {first}..{first + count - 1} do not lie within the {routing.num_experts} experts of this routing")
    ids, weights = routing.topk_ids, routing.topk_weights
    if count < routing.num_experts:
        ids, weights = function(ids, weights, first, count, live_tensor(routing.live, ids))
    return routing.moved(ids, weights, LocalIds, count)


def from_topk(topk_ids: Tensor, topk_weights: Tensor, num_experts: int, *, renormalized: bool = True) -> Routing[LogicalIds, Settled]:
    """Return the routing that an engine's own router chose: logical ids, nothing left to scale, every row live."""
    return Routing(topk_ids, topk_weights, LogicalIds, num_experts, Settled(), renormalized, topk_ids.shape[0])


def from_int64_topk(topk_ids: Tensor, topk_weights: Tensor, num_experts: int, *, renormalized: bool = True) -> Routing[LogicalIds, Settled]:
    """Do the same for a router whose ids are int64, as those of torch.topk are. Raises: TypeError for ids of any other dtype."""
    if topk_ids.dtype != torch.int64:
        raise TypeError(f"the ids must be int64; got {topk_ids.dtype}")
    return from_topk(topk_ids.to(torch.int32), topk_weights, num_experts, renormalized=renormalized)


def int64_ids(routing: Routing[Ids]) -> Tensor:
    """Return the ids of a routing as int64 (rows, k), for libraries that take no other (DeepEP's dispatch)."""
    return routing.topk_ids.to(torch.int64)

"""Which rank this is, and how slots are spread over ranks."""

from typing import final

import attrs

from ..routing import PaddedPhysicalIds, PhysicalIds, Routing, SlotIds


@final
@attrs.frozen
class ExpertSpread:
    """Spread ``num_experts`` slots over ``ranks`` ranks: rank r holds as many as any other, the first of them slot r * ``local``.

    A dispatcher compares both with what its library's object says of its group, as far as that says it: NIXL's tells its rank alone.

    Raises: ValueError for a rank that there is not, or slots that cannot be spread evenly.
    """

    rank: int
    ranks: int
    num_experts: int

    def __attrs_post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.ranks} ranks")
        if self.num_experts < 1 or self.num_experts % self.ranks:
            raise ValueError(f"{self.num_experts} expert slots cannot be spread evenly over {self.ranks} ranks")

    @property
    def local(self) -> int:
        """Return how many slots a rank holds."""
        return self.num_experts // self.ranks

    @property
    def first(self) -> int:
        """Return the first slot of this rank."""
        return self.rank * self.local

    def demand_group(self, library: str, rank: int, ranks: int | None) -> None:
        """Raise ValueError for another rank, or number of ranks, than those of a library's object; None: it does not tell how many there are."""
        if rank != self.rank or ranks not in (None, self.ranks):
            group = f"rank {rank}" if ranks is None else f"rank {rank} of {ranks}"
            raise ValueError(f"the spread is of rank {self.rank} of {self.ranks}, but the object of {library} is {group}")

    def expected_rows(self, rows: int, k: int) -> int:
        """Return about how many rows an expert gets, at least 1, where every rank has ``rows`` rows: a hint for schedules, not a bound."""
        return (rows * self.ranks * k + self.num_experts) // self.num_experts

    def demand(self, rows: int, routing: Routing[SlotIds]) -> None:
        """Raise BoundaryError for ids that are not of slots, and ValueError for another number of slots or of rows."""
        if routing.space is not PhysicalIds and routing.space is not PaddedPhysicalIds:
            routing.demand(PaddedPhysicalIds)
        if routing.num_experts != self.num_experts:
            raise ValueError(f"the routing is over {routing.num_experts} slots, but the dispatcher over {self.num_experts}")
        if routing.topk_ids.shape[0] != rows:
            raise ValueError(f"the routing is of {routing.topk_ids.shape[0]} rows, but there are {rows}")

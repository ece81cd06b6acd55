"""Which rank this is, and how slots are spread over ranks."""

from typing import final

import attrs

from ..routing import PaddedPhysicalIds, PhysicalIds, Routing, SlotIds


@final
@attrs.frozen
class ExpertSpread:
    """Spread ``num_experts`` slots over ``ranks`` ranks: rank r holds as many as any other, the first of them slot r * ``local``.

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

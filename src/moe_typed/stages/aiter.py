"""What AITER's fused MoE takes. It knows no -1, and reads an expert mask whose length is the number of ids that there are: one class an id domain."""

from typing import Annotated, final

import torch
from torch import Tensor

from ..boundary import Floating, Layout, Rename, boundary, value_error
from ..formats import Payload
from ..routing import ExpertMask, LocalSinkIds, PhysicalIds, Routing, first_repeat, live_mask
from .base import RunnerInput


@final
@boundary
class AiterSinkInput(RunnerInput):
    """Flat rows whose ids are local, with the sink slot for routes to nowhere; every row is live. Router weights pending.

    The runner has the mask of this domain: ones, and a zero for the sink.
    """

    payload: Payload
    routing: Routing[LocalSinkIds]
    out_dtype: torch.dtype

    def check_values(self) -> None:
        """Raise BoundaryError for an expert that stands twice in a row, and for rows that go somewhere and whose data cannot be right."""
        stays = self.routing.topk_ids < self.routing.num_experts
        _check_distinct(self, self.routing.topk_ids, stays & live_mask(self.routing))
        self.payload.check_live(stays.any(1))


@final
@boundary
class AiterSlotInput(RunnerInput):
    """Flat rows whose ids are physical slots over all ranks; ``mask`` says which are on this one. Router weights pending.

    Rows from ``routing.live`` on are stale, and so are their results. ``output``: where to write, a view of a library's staging memory; None for
    fresh memory.
    """

    payload: Payload
    routing: Routing[PhysicalIds]
    mask: Annotated[ExpertMask[PhysicalIds], Rename({"slots": "experts"})]
    out_dtype: torch.dtype
    output: Annotated[Floating[Tensor, "rows out_hidden"], Layout(contiguous=True)] | None = None

    def check_values(self) -> None:
        """Raise BoundaryError for memory of another dtype, a slot of this rank twice in a live row, or live data that cannot be right."""
        if self.output is not None and self.output.dtype != self.out_dtype:
            raise value_error(self, "output", f"is {self.output.dtype}, but the results are {self.out_dtype}")
        live = self.routing.count_live()
        ids = self.routing.topk_ids[:live]
        _check_distinct(self, ids, self.mask.mask[ids.clamp(0, self.routing.num_experts - 1).long()] == 1)
        self.payload.check_live(live)


def _check_distinct(runner_input: RunnerInput, ids: Tensor, stays: Tensor) -> None:
    """Raise BoundaryError for a row with one expert twice: the sort has one place for it, and the weight of the last one wins (``moe_sorting``)."""
    repeat = first_repeat(ids, stays)
    if repeat is not None:
        row, expert = repeat
        hint = (
            "AITER would keep the weight of the last one alone: add their weights, and send the others to the sink or, with weight 0, to other slots."
        )
        raise value_error(runner_input, "routing", f"names {expert} twice in row {row}", hint)

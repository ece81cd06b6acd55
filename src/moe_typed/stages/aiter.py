"""What AITER's fused MoE takes. It knows no -1, and reads an expert mask whose length is the number of ids that there are: one class an id domain."""

from typing import Annotated, final

import torch
from torch import Tensor

from ..boundary import Floating, Layout, Rename, boundary, value_error
from ..formats import Payload
from ..routing import ExpertMask, LocalSinkIds, PhysicalIds, Routing
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
        """Raise BoundaryError for rows beyond a live count, which this input cannot say, and for live rows whose data cannot be right."""
        goes = (self.routing.topk_ids < self.routing.num_experts).any(1)
        self.payload.check_live(goes)


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
        """Raise BoundaryError for memory of another dtype than the results, and for live rows whose data cannot be right."""
        if self.output is not None and self.output.dtype != self.out_dtype:
            raise value_error(self, "output", f"is {self.output.dtype}, but the results are {self.out_dtype}")
        self.payload.check_live(self.routing.count_live())

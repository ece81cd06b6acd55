"""Flat rows: what a runner takes and returns when it does its own permutation (reference, Triton)."""

from typing import final

from torch import Tensor

from ..boundary import Floating, boundary
from ..formats import Payload
from ..routing import LocalIds, Routing, live_mask
from .base import RunnerInput, RunnerOutput


@final
@boundary
class FlatRowsInput(RunnerInput):
    """Rows in any order with their routes to this rank's experts; router weights pending."""

    payload: Payload
    routing: Routing[LocalIds]

    def check_values(self) -> None:
        """Raise BoundaryError for live rows with a route whose data cannot be right: gaps and stale rows of a library have none."""
        goes = (self.routing.topk_ids >= 0) & live_mask(self.routing)
        self.payload.check_live(goes.any(1))


class RowsOutput(RunnerOutput):
    """The base of one result a row: router weights applied, summed over k, in the order of the input rows; live rows without a route are zero."""

    hidden_states: Tensor


@final
@boundary
class SummedRowsOutput(RowsOutput):
    """One result a row; padding rows are zero like all rows without a route. ``hidden_states``: bf16, fp16 or fp32 (rows, hidden)."""

    hidden_states: Floating[Tensor, "rows hidden"]


@final
@boundary
class LiveRowsOutput(RowsOutput):
    """One result a live row; what the others hold is undefined. ``hidden_states``: bf16, fp16 or fp32 (rows, hidden)."""

    hidden_states: Floating[Tensor, "rows hidden"]


@final
@boundary
class RouteRowsOutput(RunnerOutput):
    """One result a route, router weights pending, nothing summed. ``hidden_states``: bf16, fp16 or fp32 (rows, k, hidden)."""

    hidden_states: Floating[Tensor, "rows k hidden"]

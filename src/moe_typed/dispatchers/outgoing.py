"""What every dispatcher over a communication library does before it calls the library."""

from typing import final

import torch
from torch import Tensor

from ..boundary import boundary, value_error
from ..formats import Payload
from ..routing import Routing, SlotIds, live_mask
from ..stages import CombineInput
from .errors import CapacityError


@final
@boundary
class OutgoingRows:
    """Where rows and their routes meet, before a library is given pointers to both: with debug on, as many routes as rows, on one device."""

    payload: Payload
    routing: Routing[SlotIds]

    def check_values(self) -> None:
        """Raise BoundaryError for live rows whose data cannot be right."""
        self.payload.check_live(self.routing.count_live())


def refuse_tracing(dispatcher: object) -> None:
    """Raise RuntimeError inside ``torch.compile``.

    A library's call has state that a graph would not show: arenas, counters, other ranks. With ``fullgraph=True`` this is the error; without it the
    graph breaks here, and the call runs as it is.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{dispatcher!r} calls a communication library, which torch.compile cannot trace: compile what is before and after it")


def same_origin(combine_input: CombineInput, given: Routing[SlotIds], sent: Routing[SlotIds]) -> None:
    """Raise BoundaryError for a combine input whose origin is not the routing that was dispatched: its weights would meet the ids of that one."""
    if given is not sent:
        reason = f"is {_about(given)}, but the rows of this handle were dispatched by {_about(sent)}"
        raise value_error(combine_input, "origin", reason, "Hand on the origin of the dispatch output as it is; change no weights after dispatch.")


def _about(routing: Routing[SlotIds]) -> str:
    rows, k = routing.topk_ids.shape
    return f"the routing {id(routing):#x} of {rows} rows x {k}"


def check_capacity(rows: int, most: int) -> None:
    """Raise CapacityError for more rows than a rank may send."""
    if rows > most:
        raise CapacityError(
            f"{rows} rows are more than the {most} that a rank may send (num_max_dispatch_tokens_per_rank): split the batch, or make a larger buffer"
        )


def masked_ids(routing: Routing[SlotIds], dtype: torch.dtype) -> Tensor:
    """Return the ids in the library's dtype, contiguous, with -1 for all routes of padding rows; no host sync."""
    ids = routing.topk_ids if routing.all_live else torch.where(live_mask(routing), routing.topk_ids, -1)
    return ids.to(dtype).contiguous()

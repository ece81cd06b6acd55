"""What every dispatcher over a communication library does before it calls the library."""

import torch
from torch import Tensor

from ..routing import Routing, SlotIds, live_mask
from .errors import CapacityError


def refuse_tracing(dispatcher: object) -> None:
    """Raise RuntimeError inside ``torch.compile``.

    A library's call has state that a graph would not show: arenas, counters, other ranks. With ``fullgraph=True`` this is the error; without it the
    graph breaks here, and the call runs as it is.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(f"{dispatcher!r} calls a communication library, which torch.compile cannot trace: compile what is before and after it")


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

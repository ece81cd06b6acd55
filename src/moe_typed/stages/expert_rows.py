"""Rows that lie by local expert, as a runner takes them where they lie: a row has one route, to the expert whose place it has.

Two classes, since one says what the other cannot. A slab begins at a multiple of its capacity whatever the others hold, while a segment begins behind
the one before it, so that the ends of segments cannot tell an empty slab. And the rows of slabs have no weights here: the library's combine applies
them, where segments have one for each row, which the runner applies.
"""

from typing import Annotated, final

from jaxtyping import Float32
from torch import Tensor

from ..boundary import Dim, boundary, value_error
from ..formats import Payload
from .base import RunnerInput
from .counts import ReceivedPerExpert, SegmentEnds
from .deepep_v2 import check_segments
from .slab import check_slab


@final
@boundary
class SlabRowsInput(RunnerInput):
    """Rows in slabs: row expert * ``capacity`` + i is row i of a local expert; from an expert's count on they are stale, and so are their results.

    The library's combine applies the router's weights: here each row counts once. ``most_rows``: no more are live in all, which sizes
    launches. ``expected_rows``: about as many has an expert; a hint for the schedule, not a bound.
    """

    payload: Payload
    received: ReceivedPerExpert
    capacity: Annotated[int, Dim("capacity")]
    most_rows: int
    expected_rows: int

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_slab``, and for more live rows than there can be."""
        check_slab(self, self.payload, self.received, self.capacity)
        live = int(self.received.counts.sum())
        if live > self.most_rows:
            raise value_error(
                self, "received", f"counts {live} rows, but no more than {self.most_rows} can be live", "results of the others are lost"
            )


@final
@boundary
class SegmentRowsInput(RunnerInput):
    """Rows in one segment for each local expert; what lies in the gaps and behind the last one is undefined, and so are its results.

    ``slot_weights``: float32 (rows,), the router weight of each row, pending: the runner applies it. ``expected_rows``: about as many has an expert;
    a hint for the schedule, not a bound.
    """

    payload: Payload
    segments: SegmentEnds
    slot_weights: Float32[Tensor, " rows"]
    expected_rows: int

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_segments``."""
        check_segments(self, self.payload, self.segments)

"""How many rows of an arena are looked at. Most of an arena is never filled, and what runs over all of it runs over stale rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor
from typing_extensions import override

from .errors import ReceiveCapError
from .spread import ExpertSpread


class ReceiveCap(ABC):
    """The base of all caps."""

    @abstractmethod
    def bound(self, spread: ExpertSpread, rows: int) -> int | None:
        """Return the most rows that can arrive, before anything is sent; None for no bound. ``rows``: how many this rank sends."""

    @abstractmethod
    def verify(self, total: Tensor) -> None:
        """Raise ReceiveCapError where more rows arrived. ``total``: int32 (1,) on the device; a cap that holds by proof does not read it."""


@final
class WholeArena(ReceiveCap):
    """Cut nothing."""

    @override
    def __repr__(self) -> str:
        return "WholeArena()"

    @override
    def bound(self, spread: ExpertSpread, rows: int) -> None:
        return None

    @override
    def verify(self, total: Tensor) -> None:
        pass


@final
class BySenders(ReceiveCap):
    """Cut to what all ranks send together: a row arrives at a rank once or not at all, so that no more can.

    ``sender_rows`` returns how many rows each rank sends in this dispatch, which the engine knows on the host; equal on all ranks. Inside a CUDA
    graph it is asked once, hence must say what holds at every replay: the rows that the graph was captured with.
    """

    def __init__(self, sender_rows: Callable[[], Sequence[int]]) -> None:
        self._sender_rows = sender_rows

    @override
    def __repr__(self) -> str:
        return "BySenders()"

    @override
    def bound(self, spread: ExpertSpread, rows: int) -> int:
        """Return the sum. Raises: ValueError for a number of ranks, or of rows of this rank, that is not so."""
        senders = self._sender_rows()
        if len(senders) != spread.ranks:
            raise ValueError(f"sender_rows tells of {len(senders)} ranks, and there are {spread.ranks}")
        if senders[spread.rank] < rows:
            raise ValueError(f"sender_rows says that rank {spread.rank} sends {senders[spread.rank]} rows, but it sends {rows}")
        return sum(senders)

    @override
    def verify(self, total: Tensor) -> None:
        pass


@final
class VerifiedCap(ReceiveCap):
    """Cut to a number of rows that was guessed, and look whether it was enough: the host waits for the device, so that no CUDA graph can hold it."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    @override
    def __repr__(self) -> str:
        return f"VerifiedCap({self.rows})"

    @override
    def bound(self, spread: ExpertSpread, rows: int) -> int:
        return self.rows

    @override
    def verify(self, total: Tensor) -> None:
        arrived = int(total.item())
        if arrived > self.rows:
            raise ReceiveCapError(f"{arrived} rows arrived, and the cap is {self.rows}: raise it, or bound it by what the ranks send (BySenders)")

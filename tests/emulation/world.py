"""Ranks of one process: a thread each, which meet in collectives.

A rank that raises makes every other rank raise ``PeerFailedError`` where it waits; a rank that returns while another waits for it, ranks that wait in
different collectives, and a wait of ``timeout`` seconds raise ``EmulatedHang``, where real ranks would hang. So nothing blocks for ever.
Ranks can be dead from the start: they run nothing, and a collective that needs all ranks hangs.
"""

import contextvars
import threading
from collections.abc import Callable
from typing import Final, Generic, TypeVar, cast, final

import torch

T = TypeVar("T")

TIMEOUT: Final = 20.0  # seconds


@final
class PeerFailedError(RuntimeError):
    """Tell a waiting rank that another one raised."""


@final
class EmulatedHang(RuntimeError):  # noqa: N818 - a hang is no error of the real library: that is the trouble
    """Tell that real ranks would wait for each other and never meet."""


class _Round(Generic[T]):
    """One meeting: what each rank brought, by rank."""

    def __init__(self) -> None:
        self.values: dict[int, T] = {}
        self.names: dict[int, str] = {}


@final
class World:
    """``ranks`` ranks, of which some are ``dead``. All random orders of the emulations follow from ``seed``."""

    def __init__(self, ranks: int, *, seed: int = 0, timeout: float = TIMEOUT, dead: frozenset[int] = frozenset()) -> None:
        if ranks < 1:
            raise ValueError(f"a world has one rank or more, not {ranks}")
        self.ranks = ranks
        self.living = [rank for rank in range(ranks) if rank not in dead]
        self._seed = seed
        self._timeout = timeout
        self._turn = threading.Condition()
        self._reset()

    def _reset(self) -> None:
        self._open = _Round[object]()
        self._left: set[int] = set()
        self._failed: int | None = None
        self._errors: list[BaseException] = []

    def group(self, rank: int) -> "Group":
        """Return the group as one rank sees it; what the libraries are constructed with."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of {self.ranks}")
        return Group(self, rank)

    def generator(self, rank: int, salt: int) -> torch.Generator:
        """Return a generator that depends on the seed, the rank and ``salt`` alone, not on how threads interleave."""
        return torch.Generator().manual_seed((self._seed * 1_000_003 + salt) * 1_009 + rank)

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Run ``body`` for each rank at once, each in its thread, and return the results by rank (of the living ones).

        Raises: the first error that a rank raised by itself (not because another failed).
        """
        self._reset()
        results: dict[int, T] = {}

        def work(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except BaseException as error:  # raised again in the caller's thread
                self._leave(rank, error)
            else:
                self._leave(rank, None)

        threads = [
            threading.Thread(target=contextvars.copy_context().run, args=(work, rank), name=f"rank {rank}", daemon=True) for rank in self.living
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=3 * self._timeout)
        with self._turn:
            if self._errors:
                raise self._errors[0]
            if len(results) < len(self.living):
                raise EmulatedHang(f"ranks {sorted(set(self.living) - set(results))} still run")
        return [results[rank] for rank in self.living]

    def _leave(self, rank: int, error: BaseException | None) -> None:
        with self._turn:
            self._left.add(rank)
            if error is not None and not isinstance(error, PeerFailedError):
                self._errors.append(error)
                self._failed = rank if self._failed is None else self._failed
            self._turn.notify_all()

    def exchange(self, rank: int, name: str, value: T) -> list[T]:
        """Meet the other ranks in the collective ``name`` and return what all brought, by rank; see ``meet``."""
        if len(self.living) < self.ranks:
            raise EmulatedHang(f"rank {rank} waits in {name} for ranks {sorted(set(range(self.ranks)) - set(self.living))}, which are dead")
        return list(self.meet(rank, name, value).values())

    def meet(self, rank: int, name: str, value: T) -> dict[int, T]:
        """Meet the other living ranks in the collective ``name`` and return what each brought, by rank.

        Tensors are shared, not copied: clone what may change.

        Raises: PeerFailedError when another rank raised; EmulatedHang when the ranks cannot meet.
        """
        with self._turn:
            meeting = self._open
            meeting.values[rank] = value
            meeting.names[rank] = name
            if len(meeting.values) == len(self.living):
                self._open = _Round[object]()
                self._turn.notify_all()
            self._turn.wait_for(lambda: self._is_over(meeting), timeout=self._timeout)
            if len(meeting.values) == len(self.living):
                if len(set(meeting.names.values())) > 1:
                    raise EmulatedHang(f"ranks wait in different collectives: {dict(sorted(meeting.names.items()))}")
                return {peer: cast(T, meeting.values[peer]) for peer in self.living}
            if self._failed is not None:
                raise PeerFailedError(f"rank {self._failed} failed while rank {rank} was in {name}")
            missing = sorted(set(self.living) - set(meeting.values))
            raise EmulatedHang(f"rank {rank} waits in {name} for ranks {missing}" + (", which left" if self._left else ""))

    def _is_over(self, meeting: _Round[object]) -> bool:
        return len(meeting.values) == len(self.living) or self._failed is not None or bool(self._left)


@final
class Group:
    """A process group as one rank sees it: ``rank()``, ``size()``, and the collectives of the emulation."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self._rank = rank
        self._salt = 0

    def rank(self) -> int:
        """Return the rank that this group object belongs to."""
        return self._rank

    def size(self) -> int:
        """Return the number of ranks."""
        return self.world.ranks

    def exchange(self, name: str, value: T) -> list[T]:
        """Meet the other ranks; see World.exchange."""
        return self.world.exchange(self._rank, name, value)

    def meet(self, name: str, value: T) -> dict[int, T]:
        """Meet the other living ranks; see World.meet."""
        return self.world.meet(self._rank, name, value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.world.exchange(self._rank, "barrier", None)

    def permutation(self, count: int) -> list[int]:
        """Return an order that the real library leaves open; another one at each call."""
        self._salt += 1
        order = torch.randperm(count, generator=self.world.generator(self._rank, self._salt))
        return [int(index) for index in order.unbind()]

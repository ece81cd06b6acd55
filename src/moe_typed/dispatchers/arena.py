"""How many results of one library object are alive at once. A library overwrites older ones without a word; an arena refuses before it can.

An arena belongs to the library's object, not to a layer: dispatchers over one object share one arena.
"""

import weakref
from typing import final

from typing_extensions import override

from ..stages import Handle
from .errors import ArenaError


@final
class RingArena:
    """Buffers that take turns: a dispatch overwrites the result of the one ``results`` dispatches before it (low-latency libraries: 2)."""

    def __init__(self, results: int = 2) -> None:
        if results < 1:
            raise ValueError(f"an arena holds one result or more, not {results}")
        self._results = results
        self._held: list[weakref.ref[Handle[object]]] = []
        self._is_unsure = False

    @override
    def __repr__(self) -> str:
        return f"RingArena({self._results})"

    def claim(self) -> None:
        """Begin a dispatch. Raises: ArenaError when the result that it would overwrite is not combined yet.

        After a dispatch that failed, nobody knows whose turn it is: then any open result counts.
        """
        doomed = self._held if self._is_unsure else self._held[: max(0, len(self._held) - self._results + 1)]
        if any((handle := held()) is not None and handle.open for held in doomed):
            raise ArenaError(
                f"{self._results} results of this library are alive at once, and this dispatch would overwrite one that is not combined yet: "
                "combine it first, or discard its handle"
            )
        if self._is_unsure:
            self._held.clear()
        self._is_unsure = True

    def hold(self, handle: Handle[object]) -> None:
        """End a dispatch that succeeded, whose result lasts as long as its handle is open."""
        self._is_unsure = False
        self._held = [*self._held[max(0, len(self._held) - self._results + 1) :], weakref.ref(handle)]


@final
class PairedArena:
    """One buffer whose counters only a combine sets back (MoRI): each dispatch is combined before the next, or all ranks reset.

    A dispatch adds to the total received that the one before it left behind, so that the combine after both would read past the arena.
    """

    def __init__(self) -> None:
        self._handle: weakref.ref[Handle[object]] | None = None
        self._is_paired = True

    @override
    def __repr__(self) -> str:
        return "PairedArena()"

    def claim(self) -> None:
        """Begin a dispatch. Raises: ArenaError when the last one is not combined yet, or ended without a combine."""
        if not self._is_paired:
            handle = None if self._handle is None else self._handle()
            if handle is not None and handle.open:
                raise ArenaError("one result of this library is alive at once, and this dispatch would overwrite it: combine it first")
            raise ArenaError(
                "the last dispatch ended without a combine, which alone sets the library's counters back: reset the dispatcher on every rank"
            )
        self._is_paired, self._handle = False, None

    def hold(self, handle: Handle[object]) -> None:
        """End a dispatch that succeeded."""
        self._handle = weakref.ref(handle)

    def settle(self) -> None:
        """Note that the last dispatch was combined, or that the library was reset."""
        self._is_paired = True

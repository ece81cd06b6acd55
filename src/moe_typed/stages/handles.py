"""Communication handles: what a library's combine needs of the dispatch that it answers, usable once."""

import logging
import warnings
from abc import ABC
from typing import Generic, TypeVar, final

T_co = TypeVar("T_co", covariant=True)

_log = logging.getLogger("moe_typed.stages")


@final
class HandleError(RuntimeError):
    """Say that a handle cannot be used: it was used already, its combine failed, or another dispatcher made it."""


@final
class HandleWarning(RuntimeWarning):
    """Say that a dispatch was never combined: other ranks may wait for it, and its arena stays taken."""


class Handle(ABC, Generic[T_co]):
    """The base of all handles: one class a library and mode.

    ``value``: what the library returned. ``owner``: the dispatcher that made it, the only one that may use it.
    """

    _end: str | None = "was never made"  # until __init__ is through

    def __init__(self, value: T_co, owner: object) -> None:
        self._value = value
        self._owner = owner
        self._end = None

    @property
    def open(self) -> bool:
        """Say whether the handle can still be used."""
        return self._end is None

    def consume(self, by: object) -> T_co:
        """Return the value and end the handle. ``by``: the dispatcher that combines.

        Raises: HandleError for a second use, a use after failure, or a dispatcher that did not make the handle; the last leaves it usable.
        """
        if self._end is not None:
            raise HandleError(f"{type(self).__qualname__} {self._end}; a dispatch is combined once")
        if by is not self._owner:
            raise HandleError(
                f"{type(self).__qualname__} was made by {self._owner!r}, and {by!r} cannot use it: combine with the dispatcher that dispatched"
            )
        self._end = "was consumed already"
        return self._value

    def fail(self, error: BaseException) -> None:
        """End the handle because of an error between its dispatch and the end of its combine."""
        self._end = f"ended with an error ({type(error).__name__}: {error})"

    def discard(self, reason: str) -> None:
        """End the handle on purpose, without a combine. ``reason`` is what a later use says."""
        self._end = f"was discarded ({reason})"

    def __del__(self) -> None:
        """Report a handle that ends unused."""
        if self._end is None:
            text = f"{type(self).__qualname__} was never consumed: combine each dispatch, or discard its handle with a reason"
            _log.warning(text)
            warnings.warn(text, HandleWarning, stacklevel=1, source=self)

"""Events of DeepEP and NIXL. Data of a call that was asked to be asynchronous arrives when its event is waited for."""

from collections.abc import Callable, Sequence
from typing import final

from torch import Tensor


@final
class EventHandle:
    """A raw event, on which the data of a call may depend."""

    def __init__(self, *, arrive: Callable[[], None] | None = None) -> None:
        self._arrive = arrive

    def current_stream_wait(self) -> None:
        """Wait, whereupon the data is there."""
        if self._arrive is not None:
            self._arrive()


@final
class EventOverlap:
    """An event, or none when the call was not asked to be asynchronous."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self._release = False
        self._hooks: list[Callable[[], None]] = []

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Wait. Raises: AssertionError when there is no event."""
        if self.event is None:
            raise AssertionError("no event: the call was not asynchronous")
        self.event.current_stream_wait()
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook_after_wait: Callable[[], None]) -> None:
        """Call a function after the next wait (ElasticBuffer alone)."""
        self._hooks.append(hook_after_wait)

    def __call__(self, release_handle: bool = False) -> "EventOverlap":
        """Return itself, for ``with``."""
        self._release = release_handle
        return self

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, exc_type: object, exc_value: object, traceback: object) -> None:
        if self.event is not None:
            self.current_stream_wait(self._release)


def finished(arrive: Callable[[], None] | None, tensors: Sequence[Tensor]) -> EventOverlap:
    """Return the event of a call: a real one when its data arrives later."""
    return EventOverlap() if arrive is None else EventOverlap(EventHandle(arrive=arrive), tuple(tensors))

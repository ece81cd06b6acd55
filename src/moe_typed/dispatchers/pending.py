"""Results on their way: calls that were started, whose tensors are undefined until they are waited for."""

import logging
import warnings
from collections.abc import Callable
from typing import Generic, TypeVar, final

from torch import Tensor

from ..stages import Handle, HandleError, HandleWarning

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)

_log = logging.getLogger("moe_typed.stages")


class _Once(Generic[T]):
    """A function that is called once. An error ends the handle."""

    def __init__(self, finish: Callable[[], T], handle: Handle[object], what: str) -> None:
        self._finish: Callable[[], T] | None = finish
        self._handle = handle
        self._what = what

    @property
    def open(self) -> bool:
        """Say whether it was not called yet."""
        return self._finish is not None

    def __call__(self) -> T:
        finish, self._finish = self._finish, None
        if finish is None:
            raise HandleError(f"{self._what} was waited for already; keep what the first wait returned")
        try:
            return finish()
        except Exception as error:
            self._handle.fail(error)
            raise


@final
class PendingDispatch(Generic[D_co]):
    """A dispatch that was started. Neither payload nor counts can be reached before ``wait``, on the stream that it was started on."""

    def __init__(self, finish: Callable[[], D_co], handle: Handle[object]) -> None:
        self._once = _Once(finish, handle, "this dispatch")

    def wait(self) -> D_co:
        """Return the dispatch output. Raises: HandleError for a second time."""
        return self._once()


@final
class PendingCombine:
    """A combine that was started. One that is never waited for is reported when it goes: its handle cannot, which is consumed already."""

    def __init__(self, finish: Callable[[], Tensor], handle: Handle[object]) -> None:
        self._handle = handle
        self._once = _Once(finish, handle, "this combine")

    def __del__(self) -> None:
        """Report a combine that was never waited for."""
        if self._once.open:
            text = f"a combine of {type(self._handle).__qualname__} was started and never waited for: its result is lost, and the receive is not done"
            _log.warning(text)
            warnings.warn(text, HandleWarning, stacklevel=1, source=self)

    def wait(self) -> Tensor:
        """Return the routed output (rows, hidden). Raises: HandleError for a second time."""
        return self._once()

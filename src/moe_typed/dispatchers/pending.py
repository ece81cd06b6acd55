"""Results on their way: calls that were started, whose tensors are undefined until they are waited for."""

from collections.abc import Callable
from typing import Generic, TypeVar, final

from torch import Tensor

from ..stages import Handle, HandleError

T = TypeVar("T")
D_co = TypeVar("D_co", covariant=True)


class _Once(Generic[T]):
    """A function that is called once. An error ends the handle."""

    def __init__(self, finish: Callable[[], T], handle: Handle[object], what: str) -> None:
        self._finish: Callable[[], T] | None = finish
        self._handle = handle
        self._what = what

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
    """A combine that was started."""

    def __init__(self, finish: Callable[[], Tensor], handle: Handle[object]) -> None:
        self._once = _Once(finish, handle, "this combine")

    def wait(self) -> Tensor:
        """Return the routed output (rows, hidden). Raises: HandleError for a second time."""
        return self._once()

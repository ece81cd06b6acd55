from types import TracebackType
from typing import Self

from torch import Tensor

from .nixl_ep_cpp import EventHandle as EventHandle

class EventOverlap:
    event: EventHandle | None
    extra_tensors: tuple[Tensor, ...] | None
    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None: ...
    def current_stream_wait(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

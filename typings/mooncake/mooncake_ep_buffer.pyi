# mooncake-transfer-engine 0.3.13.
from collections.abc import Callable
from types import TracebackType
from typing import Literal, Self, TypeAlias, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from .ep import EventHandle

_Scaled: TypeAlias = tuple[Tensor, Tensor]  # values and scales
_Handle: TypeAlias = tuple[Tensor, Tensor, int, int, int]
_Hook: TypeAlias = Callable[[], None]

class EventOverlap:
    event: EventHandle | None
    extra_tensors: tuple[Tensor, ...] | None
    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None: ...
    def current_stream_wait(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

class Buffer:
    rank: int
    group_size: int
    group: ProcessGroup
    num_ep_buffer_bytes: int
    def __init__(self, group: ProcessGroup, num_ep_buffer_bytes: int = 0, disable_p2p: bool = False) -> None: ...
    @staticmethod
    def get_ep_buffer_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int: ...
    def connect(self, is_update: bool = False) -> None: ...
    def update_ep_member(self) -> None: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        active_ranks: Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: Literal[True],
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[_Scaled, Tensor, _Handle, EventOverlap, _Hook | None]: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        active_ranks: Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: Literal[False],
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor, Tensor, _Handle, EventOverlap, _Hook | None]: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        active_ranks: Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool | None = None,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[_Scaled | Tensor, Tensor, _Handle, EventOverlap, _Hook | None]: ...
    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        active_ranks: Tensor | None,
        timeout_us: int,
        handle: _Handle,
        zero_copy: Literal[False] = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, _Hook | None]: ...

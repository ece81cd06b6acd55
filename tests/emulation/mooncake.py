"""Mooncake EP, ``mooncake.mooncake_ep_buffer.Buffer``: the fast path, and the fallback over torch collectives.

The class takes what the real one takes, and keyword-only ``fallback`` (no RDMA and no P2P), ``maca`` and ``mode``. Dead ranks are those of the world.
"""

from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias, final, overload

import torch
from torch import Tensor

from tests.emulation.events import EventHandle
from tests.emulation.hazards import Mode, Reason, host_check, late, misuse, python_check
from tests.emulation.low_latency import HIDDEN_SIZES, LowLatency
from tests.emulation.world import EmulatedHang, Group

Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]
Handle: TypeAlias = tuple[Tensor, Tensor, int, int, int]
Hook: TypeAlias = Callable[[], None]

MAX_TOPK: Final = 11
FOR_EVER: Final = -1  # microseconds


@final
class EventOverlap:
    """An event, or none when the call was not asked to be asynchronous."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None) -> None:
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self) -> None:
        """Wait. Raises: AssertionError when there is no event."""
        python_check(self.event is not None, "no event: the call was not asynchronous")
        assert self.event is not None
        self.event.current_stream_wait()

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, kind: object, error: object, trace: object, /) -> None:
        if self.event is not None:
            self.event.current_stream_wait()


def _nothing() -> None:
    """Do nothing: the hook of the fallback."""


@final
class EmulatedMooncakeBuffer:
    """``mooncake.mooncake_ep_buffer.Buffer``."""

    def __init__(
        self,
        group: Group,
        num_ep_buffer_bytes: int = 0,
        disable_p2p: bool = False,
        *,
        fallback: bool = False,
        maca: bool = False,
        mode: Mode = "strict",
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.num_ep_buffer_bytes = num_ep_buffer_bytes
        self._fallback = fallback
        self._maca = maca
        self._mode: Mode = mode
        self._engine = LowLatency(group, mode, zero_padded=fallback)
        self._members = torch.ones(group.size(), dtype=torch.int32)  # what the process group knows of its health
        group.meet("Buffer", None)

    @staticmethod
    def get_ep_buffer_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Return a number of bytes for two arenas; not the real library's to the byte."""
        return 2 * 3 * num_experts * num_max_dispatch_tokens_per_rank * (hidden * 2 + hidden // 32 + 16)

    def connect(self, is_update: bool = False) -> None:
        """Connect to all ranks, or again to those that changed."""
        self.group.meet("connect", is_update)

    def update_ep_member(self) -> None:
        """Connect again; all ranks are taken for healthy until they do not answer."""
        self.group.meet("update_ep_member", None)
        self._members.fill_(1)

    def _health(self, active_ranks: Tensor | None, timeout_us: int) -> list[bool]:
        """Return which ranks take part, and write 0 for those that do not answer in time. Raises: EmulatedHang when it waits for ever."""
        mask = self._members if active_ranks is None else active_ranks
        python_check(mask.dtype == torch.int32 and mask.is_contiguous(), f"active_ranks is int32, not {mask.dtype}")
        if mask.shape != (self.group_size,):
            misuse(self._mode, Reason.HEALTH_MASK, f"active_ranks has shape {tuple(mask.shape)}, and there are {self.group_size} ranks")
            mask = torch.ones(self.group_size, dtype=torch.int32)
        dead = [rank for rank in range(self.group_size) if rank not in self.group.world.living and bool(mask[rank])]
        if dead and (timeout_us == FOR_EVER or self._fallback):
            raise EmulatedHang(f"rank {self.rank} waits for ever for ranks {dead}")
        mask[dead] = 0
        return [bool(value) for value in mask.unbind()]

    def _deliver(self, tensors: Sequence[Tensor], *, async_finish: bool, return_recv_hook: bool) -> tuple[EventOverlap, Hook | None]:
        if self._fallback:
            return EventOverlap(EventHandle(), tuple(tensors)), _nothing
        host_check(not (async_finish and return_recv_hook), "not both async_finish and return_recv_hook")
        if return_recv_hook:
            return EventOverlap(), late(tensors)
        return (EventOverlap(EventHandle(arrive=late(tensors)), tuple(tensors)) if async_finish else EventOverlap()), None

    def _check_routes(self, ids: Tensor, tokens: int) -> None:
        python_check(ids.dtype == torch.int64, f"topk_idx is int64, not {ids.dtype}")
        python_check(ids.dim() == 2 and ids.is_contiguous() and ids.size(0) == tokens, "topk_idx is (tokens, topk), contiguous")
        python_check(ids.size(1) <= MAX_TOPK, f"at most {MAX_TOPK} routes")

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
    ) -> tuple[tuple[Tensor, Tensor], Tensor, Handle, EventOverlap, Hook | None]: ...

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
    ) -> tuple[Tensor, Tensor, Handle, EventOverlap, Hook | None]: ...

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
    ) -> tuple[Rows, Tensor, Handle, EventOverlap, Hook | None]: ...

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
    ) -> tuple[Rows, Tensor, Handle, EventOverlap, Hook | None]:
        """Send each token once to each of its experts."""
        max_tokens = num_max_dispatch_tokens_per_rank
        if self._maca and use_fp8:
            raise NotImplementedError("MACA has no fp8 dispatch")
        fp8 = not self._maca if use_fp8 is None else use_fp8
        python_check(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x is bfloat16 (tokens, hidden), contiguous")
        python_check(x.size(1) % 128 == 0, f"hidden is a multiple of 128, not {x.size(1)}")
        self._check_routes(topk_idx, x.size(0))
        python_check(x.size(0) <= max_tokens, f"{x.size(0)} tokens are more than {max_tokens}")
        python_check(num_experts % self.group_size == 0, f"{num_experts} experts over {self.group_size} ranks")
        python_check(not fp8 or self.group_size * max_tokens % 4 == 0, "ranks * max_tokens is a multiple of 4 for fp8")
        host_check(self._fallback or x.size(1) in HIDDEN_SIZES, f"hidden is one of {HIDDEN_SIZES}, not {x.size(1)}")
        active = self._health(active_ranks, timeout_us)
        got = self._engine.dispatch(x, topk_idx, max_tokens, num_experts, active, use_fp8=fp8, round_scale=False, packed=False)
        event, hook = self._deliver(got.tensors(), async_finish=async_finish, return_recv_hook=return_recv_hook)
        handle = (got.src_info, got.layout_range, max_tokens, x.size(1), num_experts)
        return got.payload if got.scale is None else (got.payload, got.scale), got.count, handle, event, hook

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        active_ranks: Tensor | None,
        timeout_us: int,
        handle: Handle,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Return the weighted sum of the unweighted rows of each token's experts; those of inactive ranks are missing from it."""
        if zero_copy:
            raise NotImplementedError("zero_copy")
        src_info, layout_range, max_tokens, hidden, experts = handle
        python_check(x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape == (*src_info.shape, hidden), "x is bfloat16 like what was received")
        python_check(src_info.size(1) == self.group_size * max_tokens, "the handle belongs to this number of ranks and tokens")
        self._check_routes(topk_idx, topk_weights.size(0))
        python_check(topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape, "topk_weights is float32 like topk_idx")
        active = self._health(active_ranks, timeout_us)
        combined = self._engine.combine(x, topk_idx, topk_weights, src_info, layout_range, experts, active)
        combined = combined if out is None else out.copy_(combined)
        event, hook = self._deliver([combined], async_finish=async_finish, return_recv_hook=return_recv_hook)
        return combined, event, hook

    def get_next_combine_buffer(self, handle: Handle) -> Tensor:
        """Raise NotImplementedError."""
        raise NotImplementedError("get_next_combine_buffer")

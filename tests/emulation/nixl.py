"""NIXL EP, ``nixl_ep.Buffer``, in low-latency mode. Shapes follow the number of ranks that take part, which changes over time.

The class takes what the real one takes, and keyword-only ``world``, ``topk_idx_t`` (of the build) and ``mode``. Dead ranks are those of the world.
"""

from collections.abc import Callable
from typing import Final, Literal, TypeAlias, final, overload

import torch
from torch import Tensor

from tests.emulation import low_latency_calls
from tests.emulation.events import EventOverlap
from tests.emulation.hazards import EmulatedTrap, Mode, host_check, python_check
from tests.emulation.low_latency import HIDDEN_SIZES, LowLatency
from tests.emulation.nixl_high_throughput import HighThroughputMethods
from tests.emulation.world import Group, World

Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]
LowLatencyHandle: TypeAlias = tuple[Tensor, Tensor, int, int]
Hook: TypeAlias = Callable[[], None]

MAX_TOPK: Final = 16
NIXL_HIDDEN_SIZES: Final = (*HIDDEN_SIZES, 3584)


@final
class EmulatedNixlBuffer(HighThroughputMethods):
    """``nixl_ep.Buffer``. High throughput is not emulated."""

    def __init__(
        self,
        disable_ll_nvlink: bool = False,
        explicitly_destroy: bool = False,
        rank: int = 0,
        low_latency_mode: bool = True,
        group: Group | None = None,
        comm: object | None = None,
        tcp_store_group: object | None = None,
        timeout_ms: int = 30000,
        *,
        world: World,
        topk_idx_t: torch.dtype = torch.int32,
        mode: Mode = "strict",
    ) -> None:
        super().__init__(low_latency_mode=low_latency_mode)
        self.rank = rank
        self.explicitly_destroy = explicitly_destroy
        self.topk_idx_t = topk_idx_t
        self._world = world
        self._mode: Mode = mode
        self._limits = low_latency_calls.Limits(topk_idx_t, MAX_TOPK, NIXL_HIDDEN_SIZES)
        self._engine = LowLatency(world.group(rank), mode)
        self._connected = {rank}
        self._masked: Tensor | None = None
        self._local = 0

    @property
    def group_size(self) -> int:
        """Return one past the highest rank that is connected."""
        return max(self._connected) + 1

    @staticmethod
    def get_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Return a number of bytes for two arenas; not the real library's to the byte."""
        return 2 * 3 * num_experts * num_max_dispatch_tokens_per_rank * (hidden * 2 + hidden // 32 + 16)

    def destroy(self) -> None:
        """Destroy; AssertionError unless the buffer was made to be destroyed explicitly."""
        python_check(self.explicitly_destroy, "explicitly_destroy was not set")

    # ---- members -------------------------------------------------------------------------------------------------------------------

    def update_memory_buffers(self, num_ranks: int, num_experts_per_rank: int, num_rdma_bytes: int, num_nvl_bytes: int = 0) -> None:
        """Allocate, once: a second call raises RuntimeError."""
        host_check(self._masked is None, "buffers are allocated once")
        self._masked = torch.zeros(num_ranks, dtype=torch.int32)
        self._local = num_experts_per_rank

    def _mask(self) -> Tensor:
        host_check(self._masked is not None, "update_memory_buffers comes first")
        assert self._masked is not None
        return self._masked

    def connect_ranks(self, remote_ranks: list[int], activate: bool = True) -> None:
        """Connect to ranks; those that are not activated stay masked."""
        host_check(all(0 <= rank < self._mask().numel() for rank in remote_ranks), f"at most {self._mask().numel()} ranks")
        self._connected |= set(remote_ranks)
        for rank in remote_ranks:
            self._mask()[rank] = int(not activate)

    def disconnect_ranks(self, remote_ranks: list[int]) -> None:
        """Disconnect the last ranks: others raise RuntimeError."""
        rest = self._connected - set(remote_ranks)
        host_check(self.rank in rest and all(rank > max(rest) for rank in remote_ranks), "only the tail of the ranks can be disconnected")
        self._connected = rest

    def update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out, or take it in again."""
        self._mask()[rank_to_mask] = int(mask)

    def query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write the mask, 1 for a rank that is left out, into int32 [largest number of ranks]."""
        host_check(mask_status.dtype == torch.int32 and mask_status.shape == self._mask().shape, "mask_status is int32 [max ranks]")
        mask_status.copy_(self._mask())

    def clean_mask_buffer(self) -> None:
        """Take all ranks in again."""
        self._mask().zero_()

    def set_tcp_store_group(self, tcp_store_group: object | None) -> None:
        """Do nothing: ranks of a process need no store."""

    def barrier(self) -> None:
        """Wait for all living ranks."""
        self._world.meet(self.rank, "barrier", None)

    def _active(self, bound: int) -> list[bool]:
        """Return which ranks below ``bound`` take part; those that do not answer are masked from now on."""
        for rank in self._connected - set(self._world.living):
            self._mask()[rank] = 1
        return [rank in self._connected and not bool(self._mask()[rank]) for rank in range(bound)]

    # ---- low latency ---------------------------------------------------------------------------------------------------------------

    @overload
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: Literal[True] = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[tuple[Tensor, Tensor], Tensor, LowLatencyHandle, EventOverlap, Hook | None]: ...

    @overload
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        *,
        use_fp8: Literal[False],
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Tensor, Tensor, LowLatencyHandle, EventOverlap, Hook | None]: ...

    @overload
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]: ...

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send each token once to each of its experts. Raises: EmulatedTrap for an id out of range."""
        host_check(self.low_latency_mode, "the buffer was made for high throughput")
        most = self._mask().numel()
        if num_experts is not None:
            host_check(num_experts % self._local == 0, f"{num_experts} experts are no multiple of {self._local}")
            host_check(self.group_size <= num_experts // self._local <= most, f"experts of {self.group_size} to {most} ranks, not {num_experts}")
        bound = self.group_size if num_experts is None else num_experts // self._local
        experts = bound * self._local
        if bool((topk_idx >= experts).any()):
            raise EmulatedTrap(f"an id is not below {experts}")
        got = low_latency_calls.dispatch(
            self._engine,
            self._limits,
            self._active(bound),
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        handle = (got.src_info, got.layout_range, num_max_dispatch_tokens_per_rank, x.size(1))
        return got.recv, got.count, handle, got.event, got.hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Hook | None]:
        """Return the weighted sum of the unweighted rows of each token's experts; those of masked ranks are missing from it."""
        host_check(self.low_latency_mode, "the buffer was made for high throughput")
        src_info, layout_range, max_tokens, hidden = handle
        host_check(x.size(-1) == hidden, "x has the hidden size of the handle")
        return low_latency_calls.combine(
            self._engine,
            self._limits,
            self._mode,
            self._active(layout_range.size(1)),
            x,
            topk_idx,
            topk_weights,
            src_info,
            layout_range,
            max_tokens,
            layout_range.numel(),
            combine_wait_recv_cost_stats,
            out,
            use_logfmt=use_logfmt,
            zero_copy=zero_copy,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )

    dispatch = low_latency_dispatch
    combine = low_latency_combine

    def get_next_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return the registered buffer that zero_copy sends, bf16, not contiguous."""
        return self._engine.combine_buffer(handle[0], handle[3])

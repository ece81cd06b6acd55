"""The low-latency methods of ``deep_ep.Buffer``."""

from abc import ABC
from collections.abc import Callable
from typing import Final, Literal, TypeAlias, overload

import torch
from torch import Tensor

from tests.emulation import low_latency_calls
from tests.emulation.deep_ep_common import check_torch_deterministic, topk_idx_t
from tests.emulation.events import EventOverlap
from tests.emulation.hazards import EmulatedTrap, Mode, host_check
from tests.emulation.low_latency import HIDDEN_SIZES, LowLatency
from tests.emulation.world import Group

Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]
LowLatencyHandle: TypeAlias = tuple[Tensor, Tensor, int, int, int]
Hook: TypeAlias = Callable[[], None]

_LIMITS: Final = low_latency_calls.Limits(topk_idx_t, max_topk=11, hidden_sizes=HIDDEN_SIZES)


class LowLatencyMethods(ABC):
    """The half of ``deep_ep.Buffer`` that is about low latency."""

    def __init__(self, group: Group, mode: Mode, rdma_bytes: int | None, qps: int, *, shrink: bool) -> None:
        self.group = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.low_latency_mode = rdma_bytes is not None
        self._mode: Mode = mode
        self._rdma_bytes = rdma_bytes or 0
        self._qps = qps
        self._shrink = shrink
        self._masked = torch.zeros(self.group_size, dtype=torch.int32)
        self._low_latency = LowLatency(group, mode)

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Return a number of bytes for two arenas of rows with room for scales, a multiple of 128; not the real library's to the byte."""
        message = hidden * 2 + hidden // 32 + 16
        return -(-2 * 3 * num_experts * num_max_dispatch_tokens_per_rank * message // 128) * 128

    @overload
    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
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
        num_experts: int,
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
        num_experts: int,
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
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, LowLatencyHandle, EventOverlap, Hook | None]:
        """Send each token once to each of its experts."""
        check_torch_deterministic()
        size = (num_max_dispatch_tokens_per_rank, x.size(-1), self.group_size, num_experts)
        host_check(self.low_latency_mode, "the buffer was not made in low_latency_mode")
        host_check(self._rdma_bytes >= self.get_low_latency_rdma_size_hint(*size), "num_rdma_bytes is below the hint")
        if self._qps < num_experts // self.group_size:
            raise EmulatedTrap(f"num_qps_per_rank {self._qps} is below the number of local experts")
        got = low_latency_calls.dispatch(
            self._low_latency,
            _LIMITS,
            self._active(),
            x,
            topk_idx,
            num_max_dispatch_tokens_per_rank,
            num_experts,
            cumulative_local_expert_recv_stats,
            dispatch_wait_recv_cost_stats,
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )
        handle = (got.src_info, got.layout_range, num_max_dispatch_tokens_per_rank, x.size(1), num_experts)
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
        """Return the weighted sum of the unweighted rows of each token's experts."""
        check_torch_deterministic()
        src_info, layout_range, max_tokens, hidden, experts = handle
        host_check(x.size(-1) == hidden, "x has the hidden size of the handle")
        return low_latency_calls.combine(
            self._low_latency,
            _LIMITS,
            self._mode,
            self._active(),
            x,
            topk_idx,
            topk_weights,
            src_info,
            layout_range,
            max_tokens,
            experts,
            combine_wait_recv_cost_stats,
            out,
            use_logfmt=use_logfmt,
            zero_copy=zero_copy,
            async_finish=async_finish,
            return_recv_hook=return_recv_hook,
        )

    def get_next_low_latency_combine_buffer(self, handle: LowLatencyHandle) -> Tensor:
        """Return the registered buffer (local experts, ranks * max_tokens, hidden), bf16, that zero_copy sends."""
        return self._low_latency.combine_buffer(handle[0], handle[3])

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Clean, together with all ranks."""
        self.group.exchange("clean_low_latency_buffer", (num_max_dispatch_tokens_per_rank, hidden, num_experts))

    def _active(self) -> list[bool]:
        return [not bool(value) for value in self._masked.unbind()]

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Leave a rank out, or take it in again."""
        host_check(self._shrink, "enable_shrink was not set")
        self._masked[rank_to_mask] = int(mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """Write the mask, 1 for a rank that is left out, into int32 [ranks]."""
        host_check(self._shrink, "enable_shrink was not set")
        host_check(mask_status.dtype == torch.int32 and mask_status.shape == self._masked.shape, "mask_status is int32 [ranks]")
        mask_status.copy_(self._masked)

    def low_latency_clean_mask_buffer(self) -> None:
        """Take all ranks in again."""
        host_check(self._shrink, "enable_shrink was not set")
        self._masked.zero_()

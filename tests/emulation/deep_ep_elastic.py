"""DeepEP 2.1.0, ``deep_ep.ElasticBuffer``, on one node. The class takes what the real one takes, and ``mode``."""

from collections.abc import Sequence
from typing import Final, TypeAlias, final, overload

import torch
from torch import Tensor

from tests.emulation import elastic
from tests.emulation.deep_ep_common import check_ids, check_torch_deterministic
from tests.emulation.elastic import EPHandle
from tests.emulation.events import EventHandle, EventOverlap, finished
from tests.emulation.hazards import Mode, host_check, late, python_check
from tests.emulation.world import Group

Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]

MAX_TOPK: Final = 32
SMS: Final = 24  # what num_sms=0 stands for; the emulation has no use for it


def _check_events(events: Sequence[object], *, allocate_on_comm_stream: bool) -> None:
    for event in events:
        if event is not None:
            if not isinstance(event, EventHandle):
                raise TypeError(f"an EventHandle is needed, not {type(event).__name__}")
            host_check(allocate_on_comm_stream, "previous events need allocate_on_comm_stream")


@final
class EmulatedElasticBuffer:
    """``deep_ep.ElasticBuffer``: one row for each (token, rank), or each (token, expert) with ``do_expand``."""

    def __init__(
        self,
        group: Group,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
        *,
        mode: Mode = "strict",
    ) -> None:
        python_check(num_bytes is not None or (num_max_tokens_per_rank > 0 and hidden > 0 and num_topk > 0), "num_bytes, or the shape that gives it")
        self.group = group
        self.rank_idx = group.rank()
        self.num_ranks = group.size()
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.explicitly_destroy = explicitly_destroy
        self._deterministic = deterministic
        self._mode: Mode = mode
        group.exchange("ElasticBuffer", None)

    @staticmethod
    def get_buffer_size_hint(
        group: Group,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Return a number of bytes; not the real library's to the byte."""
        return elastic.size_hint(group.size(), num_max_tokens_per_rank, hidden, num_topk)

    @staticmethod
    def capture() -> EventHandle:
        """Return an event of now."""
        return EventHandle()

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Wait for all ranks."""
        self.group.barrier()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return one RDMA rank, and all ranks by NVLink."""
        return 1, self.group.size()

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return one scale-out rank, and all ranks to scale up."""
        return 1, self.group.size()

    def destroy(self) -> None:
        """Destroy; AssertionError unless the buffer was made to be destroyed explicitly."""
        python_check(self.explicitly_destroy, "explicitly_destroy was not set")

    @overload
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, EPHandle, EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor | None, EPHandle, EventOverlap]: ...

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Send rows by new routes, or by the layout of a handle."""
        check_torch_deterministic()
        _check_events((previous_event, previous_event_before_epilogue), allocate_on_comm_stream=allocate_on_comm_stream)
        if num_experts is None and num_sms == 0:
            raise TypeError("the number of SMs is chosen by num_experts, which is None: pass num_experts even with a handle")
        rows, scale = x if isinstance(x, tuple) else (x, None)
        if handle is None:
            python_check(topk_idx is not None, "topk_idx, or a handle")
            ids, do_cpu_sync = topk_idx, True if do_cpu_sync is None else do_cpu_sync
            max_tokens = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            alignment = 1 if expert_alignment is None else expert_alignment
            experts = num_experts
        else:
            python_check(topk_idx is None and not do_cpu_sync, "a handle has its ids and counts")
            python_check(num_max_tokens_per_rank in (None, handle.num_max_tokens_per_rank), "num_max_tokens_per_rank is not that of the handle")
            python_check(expert_alignment in (None, handle.expert_alignment), "expert_alignment is not that of the handle")
            ids, do_expand, do_cpu_sync = handle.topk_idx, handle.do_expand, False
            max_tokens, alignment, experts = handle.num_max_tokens_per_rank, handle.expert_alignment, handle.num_experts
        python_check(experts is not None, "num_experts is needed without a handle")
        assert ids is not None and experts is not None  # noqa: PT018 - for mypy
        self._check(rows, scale, ids, topk_weights, experts, max_tokens)
        host_check(do_expand or not do_zero_padding, "do_zero_padding is of do_expand")
        stats, local = cumulative_local_expert_recv_stats, experts // self.group.size()
        if stats is not None:
            host_check(stats.dtype == torch.int32 and stats.shape == (local,) and stats.is_contiguous(), "statistics are int32 [local experts]")
        options = elastic.Options(
            experts,
            max_tokens,
            alignment,
            num_sms or SMS,
            expand=do_expand,
            exact=do_cpu_sync,
            deterministic=self._deterministic,
            zero_padding=do_zero_padding,
            column_major=use_tma_aligned_col_major_sf,
        )
        kept = ids.clone() if do_handle_copy and handle is None else ids
        sent = elastic.Sent(rows.clone(), None if scale is None else scale.clone(), kept, None if topk_weights is None else topk_weights.clone())
        got = elastic.dispatch(self.group, self._mode, sent, options, handle)
        if stats is not None:
            stats += got.counts
        event = finished(late(got.tensors()) if async_with_compute_stream else None, got.tensors())
        return got.x if got.scale is None else (got.x, got.scale), got.ids, got.weights, got.handle, event

    def _check(self, rows: Tensor, scale: Tensor | None, ids: Tensor, weights: Tensor | None, experts: int, max_tokens: int) -> None:
        host_check(rows.dim() == 2 and rows.is_contiguous() and rows.size(1) * rows.dtype.itemsize % 16 == 0, "rows: contiguous, whole 16 bytes")
        host_check(rows.size(0) <= max_tokens, f"{rows.size(0)} tokens are more than {max_tokens}")
        check_ids(ids)
        host_check(ids.size(0) == rows.size(0) and ids.size(1) <= MAX_TOPK, f"a row of at most {MAX_TOPK} routes for each token")
        host_check(experts % self.group.size() == 0, f"{experts} experts over {self.group.size()} ranks")
        if scale is not None:
            host_check(scale.dtype.itemsize == 4, f"scales have elements of 4 bytes, not {scale.dtype}")
            host_check(scale.dim() == 2 and scale.size(0) == rows.size(0), "one row of scales for each token")
        if weights is not None:
            host_check(
                weights.dtype == torch.float32 and weights.is_contiguous() and weights.shape == ids.shape, "topk_weights is float32 like topk_idx"
            )

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum the rows of each token, plainly."""
        check_torch_deterministic()
        _check_events((previous_event, previous_event_before_epilogue), allocate_on_comm_stream=allocate_on_comm_stream)
        host_check(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x is bfloat16 (rows, hidden), contiguous")
        rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        host_check(x.size(0) == rows, f"x has {x.size(0)} rows and {rows} were received")
        if topk_weights is not None:
            shape = (rows,) if handle.do_expand else (rows, handle.topk_idx.size(1))
            host_check(topk_weights.dtype == torch.float32 and topk_weights.shape == shape, f"topk_weights is float32 {shape}")
        extra: Sequence[Tensor] = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        for term in extra:
            host_check(term.dtype == x.dtype and term.shape == (handle.topk_idx.size(0), x.size(1)), "bias has the dtype of x and (tokens, hidden)")
        combined, weights = elastic.combine(self.group, x, handle, topk_weights, extra)
        tensors = [combined] if weights is None else [combined, weights]
        return combined, weights, finished(late(tensors) if async_with_compute_stream else None, tensors)

"""Mooncake's imitation of DeepEP V2, ``mooncake.mooncake_elastic_buffer``: a subset with fewer checks.

The class takes what the real one takes, and ``mode``.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
from torch import Tensor

from tests.emulation import elastic
from tests.emulation.events import EventHandle
from tests.emulation.hazards import Mode, Reason, host_check, late, misuse, poisoned, read_memory
from tests.emulation.mooncake import EventOverlap
from tests.emulation.world import Group

Rows: TypeAlias = Tensor | tuple[Tensor, Tensor]

SMS: Final = 24  # what num_sms=None stands for; the emulation has no use for it


@final
@dataclass(frozen=True, eq=False)
class MooncakeEPHandle:
    """The layout of a dispatch, with fewer fields than DeepEP's; ``native_handle`` is what combine reads."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    token_metadata_at_forward: Tensor | None
    channel_linked_list: Tensor | None
    native_handle: object = None

    @property
    def num_recv_tokens(self) -> int:
        """Return the number of rows that the results have."""
        return self.recv_src_metadata.size(0)


def _layout(handle: MooncakeEPHandle) -> elastic.EPHandle:
    if not isinstance(handle.native_handle, elastic.EPHandle):
        raise RuntimeError("the handle has no native handle")
    return handle.native_handle


def _read(mode: Mode, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the kernel reads through the address of a matrix."""
    if tensor.dtype != dtype:
        misuse(mode, Reason.DTYPE, f"{name} is read as {dtype}, and is {tensor.dtype}")
    if not tensor.is_contiguous():
        misuse(mode, Reason.LAYOUT, f"{name} is read as contiguous, and has strides {tensor.stride()}")
    return read_memory(tensor, (tensor.size(0), tensor.size(1)), dtype)


@final
class EmulatedMooncakeElasticBuffer:
    """``mooncake.mooncake_elastic_buffer.ElasticBuffer``."""

    def __init__(
        self,
        group: Group,
        num_bytes: int | None = None,
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
        if not allow_multiple_reduction:
            raise NotImplementedError("allow_multiple_reduction=False")
        self.group = group
        self.rank_idx = group.rank()
        self.num_ranks = group.size()
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self._deterministic = deterministic
        self._mode: Mode = mode
        group.exchange("ElasticBuffer", None)

    def destroy(self) -> None:
        """Do nothing."""

    def update_ep_member(self) -> None:
        """Connect again, together with all ranks."""
        self.group.exchange("update_ep_member", None)

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

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False) -> None:
        """Wait for all ranks."""
        self.group.barrier()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return one RDMA rank, and all ranks by NVLink."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return one scale-out rank, and all ranks to scale up."""
        return 1, self.num_ranks

    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int:
        """Return a number that the emulation has no use for."""
        return SMS

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        handle: MooncakeEPHandle | None = None,
        do_expand: bool = False,
        do_cpu_sync: bool | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[Rows, Tensor, Tensor | None, MooncakeEPHandle, EventOverlap]:
        """Send rows by new routes, or by the layout of a handle. With ``do_expand`` the returned ids are never written."""
        rows, scale = x if isinstance(x, tuple) else (x, None)
        cached = None if handle is None else _layout(handle)
        if cached is None:
            host_check(topk_idx is not None, "topk_idx, or a handle")
            assert topk_idx is not None
            ids = _read(self._mode, "topk_idx", topk_idx, torch.int64)
            experts = self._inferred(ids) if num_experts is None else num_experts
            max_tokens = self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank
            alignment, exact = expert_alignment or 1, do_cpu_sync is None or do_cpu_sync
        else:
            ids, experts, max_tokens = cached.topk_idx, cached.num_experts, cached.num_max_tokens_per_rank
            alignment, exact, do_expand = cached.expert_alignment, False, cached.do_expand
        if do_expand:
            warnings.warn("do_expand leaves recv_topk_idx unwritten", stacklevel=2)
        host_check(rows.size(0) <= max_tokens, f"{rows.size(0)} tokens are more than {max_tokens}")
        host_check(experts % self.num_ranks == 0, f"{experts} experts over {self.num_ranks} ranks")
        weights = None if topk_weights is None else _read(self._mode, "topk_weights", topk_weights, torch.float32)
        options = elastic.Options(
            experts,
            max_tokens,
            alignment,
            num_sms or SMS,
            expand=do_expand,
            exact=exact,
            deterministic=self._deterministic,
            aligned_list=not do_expand,
        )
        sent = elastic.Sent(rows.clone(), None if scale is None else scale.clone(), ids, weights)
        got = elastic.dispatch(self.group, self._mode, sent, options, cached)
        out_ids = poisoned((got.x.size(0), ids.size(1)), torch.int64) if got.ids is None else got.ids
        event = self._event(got.tensors(), is_async=async_with_compute_stream)
        return got.x if got.scale is None else (got.x, got.scale), out_ids, got.weights, handle or _wrap(got.handle), event

    def _inferred(self, ids: Tensor) -> int:
        misuse(self._mode, Reason.INFERRED_EXPERTS, "num_experts=None is the largest id of this rank and one: wrong when the last expert is not used")
        return int(ids.max()) + 1 if ids.numel() else 0

    def _event(self, tensors: Sequence[Tensor], *, is_async: bool) -> EventOverlap:
        return EventOverlap(EventHandle(arrive=late(tensors)), tuple(tensors)) if is_async else EventOverlap()

    def combine(
        self,
        x: Tensor,
        handle: MooncakeEPHandle,
        topk_weights: Tensor | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[Tensor, None, EventOverlap]:
        """Sum the rows of each token, plainly. No weights come back, whatever is given."""
        layout = _layout(handle)
        rows = layout.num_expanded_tokens if layout.do_expand else layout.num_recv_tokens
        host_check(x.dtype == torch.bfloat16 and x.is_contiguous() and x.size(0) == rows, f"x is bfloat16 ({rows}, hidden), contiguous")
        combined, _ = elastic.combine(self.group, x, layout, None, ())
        return combined, None, self._event([combined], is_async=async_with_compute_stream)


def _wrap(layout: elastic.EPHandle) -> MooncakeEPHandle:
    return MooncakeEPHandle(
        layout.do_expand,
        layout.num_experts,
        layout.expert_alignment,
        layout.num_max_tokens_per_rank,
        layout.num_sms,
        layout.topk_idx,
        layout.num_recv_tokens_per_expert_list,
        layout.psum_num_recv_tokens_per_scaleup_rank,
        layout.psum_num_recv_tokens_per_expert,
        layout.recv_src_metadata,
        layout.dst_buffer_slot_idx,
        None,
        None,
        layout,
    )

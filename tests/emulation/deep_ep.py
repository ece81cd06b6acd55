"""DeepEP 2.1.0, ``deep_ep.Buffer``: the normal kernels of one node, and the low-latency ones.

The class takes what the real one takes, and ``mode``. The group is one of ``World.group``. Tensors are on the CPU; nodes, SMs and
streams do not exist.
"""

from collections.abc import Sequence
from typing import ClassVar, TypeAlias, final, overload

import torch
from torch import Tensor

from tests.emulation import normal
from tests.emulation.deep_ep_common import KNOWN_RANKS, NODE, Config, check_ids, check_stream, check_torch_deterministic
from tests.emulation.deep_ep_low_latency import LowLatencyMethods, Rows
from tests.emulation.events import EventHandle, EventOverlap, finished
from tests.emulation.hazards import Mode, host_check, late, python_check
from tests.emulation.world import Group

NormalResult: TypeAlias = tuple[Rows, Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None, EventOverlap]


@final
class EmulatedBuffer(LowLatencyMethods):
    """``deep_ep.Buffer``. Internode (more than 8 ranks) is not emulated."""

    num_sms: ClassVar[int] = 20

    def __init__(
        self,
        group: Group | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Group | None = None,
        *,
        mode: Mode = "strict",
    ) -> None:
        group = group or comm
        if group is None:
            raise ValueError("either group or comm is needed")
        host_check(num_nvl_bytes % 128 == 0 and num_rdma_bytes % 128 == 0, "buffer sizes are multiples of 128")
        if group.size() > NODE:
            raise NotImplementedError("the emulation is of one node")
        super().__init__(group, mode, num_rdma_bytes if low_latency_mode else None, num_qps_per_rank, shrink=enable_shrink)
        self.explicitly_destroy = explicitly_destroy
        group.exchange("Buffer", None)

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of SMs: even, else AssertionError."""
        python_check(new_num_sms % 2 == 0, "the number of SMs is even")
        EmulatedBuffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """Return an event of now."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """Return the tuned config; AssertionError for numbers of ranks without one."""
        python_check(num_ranks in KNOWN_RANKS, f"no config for {num_ranks} ranks: pass your own")
        return Config(EmulatedBuffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """Return the tuned config; AssertionError for numbers of ranks without one."""
        return EmulatedBuffer.get_dispatch_config(num_ranks)

    def destroy(self) -> None:
        """Destroy; AssertionError unless the buffer was made to be destroyed explicitly."""
        python_check(self.explicitly_destroy, "explicitly_destroy was not set")

    # ---- normal --------------------------------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Return counts per rank, None, counts per expert, which token goes to which rank, and an event."""
        check_stream(previous_event, async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        check_ids(topk_idx)
        host_check(num_experts > 0 and num_experts % self.group_size == 0, "experts are spread evenly over ranks")
        per_rank, per_expert, in_rank = normal.layout(topk_idx, num_experts, self.group_size)
        tensors = [per_rank, per_expert, in_rank]
        return per_rank, None, per_expert, in_rank, finished(late(tensors) if async_finish else None, tensors)

    @overload
    def dispatch(
        self,
        x: Tensor,
        handle: None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int], tuple[Tensor, ...], EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        handle: None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[tuple[Tensor, Tensor], Tensor | None, Tensor | None, list[int], tuple[Tensor, ...], EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: None = None,
        topk_weights: None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, None, None, None, None, EventOverlap]: ...

    @overload
    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        handle: tuple[Tensor, ...],
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: None = None,
        topk_weights: None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[tuple[Tensor, Tensor], None, None, None, None, EventOverlap]: ...

    def dispatch(
        self,
        x: Rows,
        handle: tuple[Tensor, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> NormalResult:
        """Send each token once to each rank that has one of its experts."""
        check_torch_deterministic()
        check_stream(previous_event, async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        config = config or self.get_dispatch_config(self.group_size)
        rows, scale = x if isinstance(x, tuple) else (x, None)
        host_check(rows.dim() == 2 and rows.is_contiguous() and rows.size(1) * rows.dtype.itemsize % 16 == 0, "rows: contiguous, whole 16 bytes")
        if scale is not None:
            host_check(rows.dtype.itemsize == 1 and scale.dtype in (torch.float32, torch.int32), "scales: float32 or int32, of one-byte rows")
            host_check(scale.dim() == 2 and scale.size(0) == rows.size(0), "one row of scales for each token")
            scale = scale.clone()
        if handle is not None:
            python_check(topk_idx is None and topk_weights is None, "a cached layout moves rows alone")
            in_rank = handle[normal.HANDLE_FIELDS.index("is_token_in_rank")]
            host_check(in_rank.size(0) == rows.size(0), "the cached layout is of another number of tokens")
            got = normal.dispatch(self.group, self._mode, normal.Sent(rows.clone(), scale, in_rank, None, None, None), self.group_size, 1, 0)
            return got.x if got.scale is None else (got.x, got.scale), None, None, None, None, self._event(got, async_finish=async_finish)
        python_check(num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None, "a layout is needed")
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None  # noqa: PT018 - for mypy
        sizes, experts = (rows.size(0), self.group_size), num_tokens_per_expert.size(0)
        normal.check_layout(self._mode, sizes, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights)
        host_check(not num_worst_tokens or topk_idx is not None, "num_worst_tokens needs routes")
        if topk_idx is not None and topk_weights is not None:
            topk_idx, topk_weights = topk_idx.clone(), topk_weights.clone()
        sent = normal.Sent(rows.clone(), scale, is_token_in_rank.clone(), topk_idx, topk_weights, num_tokens_per_expert.clone())
        got = normal.dispatch(self.group, self._mode, sent, experts, expert_alignment, num_worst_tokens)
        event = self._event(got, async_finish=async_finish)
        return got.x if got.scale is None else (got.x, got.scale), got.ids, got.weights, got.per_expert, got.handle, event

    def _event(self, got: normal.Received, *, async_finish: bool) -> EventOverlap:
        return finished(late(got.tensors()) if async_finish else None, got.tensors())

    def combine(
        self,
        x: Tensor,
        handle: tuple[Tensor, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """Sum the rows of each token over ranks, plainly."""
        check_torch_deterministic()
        check_stream(previous_event, async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
        config = config or self.get_combine_config(self.group_size)
        host_check(x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16, "x is bfloat16 (rows, hidden), contiguous")
        if topk_weights is not None:
            host_check(topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and topk_weights.size(0) == x.size(0), "weights: float32")
        python_check(not isinstance(bias, tuple) or len(bias) == 2, "a tuple of biases has two")
        extra: Sequence[Tensor] = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        combined, weights = normal.combine(self.group, x, handle, topk_weights, extra)
        tensors = [combined] if weights is None else [combined, weights]
        return combined, weights, finished(late(tensors) if async_finish else None, tensors)

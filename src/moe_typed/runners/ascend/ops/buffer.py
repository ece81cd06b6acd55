"""The NPU's deep_ep: a ``Buffer`` whose calls look like those of the GPU's, and whose results do not.

Source: the repository sgl-project/sgl-kernel-npu of August 2026.
"""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from .codes import BufferQuantMode

H = TypeVar("H")
L = TypeVar("L")
E = TypeVar("E")


class AscendBuffer(Protocol, Generic[H, L, E]):
    """Dispatch and combine over the ranks of a group; H, L are the handles of both modes, E the events, which only the library looks into.

    Rows come back sorted by local expert and without padding, in both modes: [received, hidden], not [experts, slots, hidden].
    """

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: E | None = None, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, E]:
        """Return tokens per rank int32, per node or None, per expert int32, and whether each token goes to each rank int32 [T, ranks]."""
        ...

    def dispatch(
        self,
        x: Tensor,
        handle: H | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: object = None,
        previous_event: E | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        quant_mode: BufferQuantMode | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor | None, Tensor | None, list[int], H, E]:
        """Send bf16 rows; receive rows [A, H] (with scales where quantised), ids, weights, rows of each local expert, handle.

        ``topk_idx`` int64, -1 for no expert; ``topk_weights`` fp32. ``handle`` cannot be reused. A library without ``quant_mode`` obeys the
        environment variable DEEP_NORMAL_MODE_USE_INT8_QUANT; with None, so does one that has it.
        """
        ...

    def combine(
        self,
        x: Tensor,
        handle: H,
        topk_weights: Tensor | None = None,
        bias: Tensor | None = None,
        config: object = None,
        previous_event: E | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        combine_send_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, E]:
        """Return the tokens bf16 [T, H], rows weighted by what was **dispatched**; ``topk_weights`` and ``bias`` are not looked at."""
        ...

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        topk_weights: Tensor | None = None,
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, L, E, Callable[[], None]]:
        """Send bf16 rows; receive rows [bound, H] of which the first are valid (with scales), rows of each local expert, handle, event, hook.

        ``use_fp8`` is int8 with fp32 [bound]; with ``use_ue8m0`` it is e4m3 with e8m0 [bound * H / 32].
        """
        ...

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: L,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
    ) -> tuple[Tensor, E, Callable[[], None]]:
        """Return the tokens bf16 [T, H] of bf16 rows, weighted by ``topk_weights`` fp32 [T, K]."""
        ...

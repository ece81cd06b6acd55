from typing import Literal, TypeAlias, overload

from torch import Tensor
from torch.distributed import ProcessGroup

from .ep import EventHandle
from .mooncake_ep_buffer import EventOverlap as EventOverlap

_Scaled: TypeAlias = tuple[Tensor, Tensor]  # values and scales

class EPHandle:
    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    num_recv_tokens: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    token_metadata_at_forward: Tensor | None
    channel_linked_list: Tensor | None
    native_handle: object
    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: Tensor,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: Tensor,
        psum_num_recv_tokens_per_expert: Tensor,
        recv_src_metadata: Tensor,
        dst_buffer_slot_idx: Tensor,
        token_metadata_at_forward: Tensor | None,
        channel_linked_list: Tensor | None,
        native_handle: object = None,
    ) -> None: ...

class ElasticBuffer:
    group: ProcessGroup
    rank_idx: int
    num_ranks: int
    num_bytes: int
    num_max_tokens_per_rank: int
    num_scaleout_ranks: int
    num_scaleup_ranks: int
    def __init__(
        self,
        group: ProcessGroup,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: Literal[True] = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None: ...
    def destroy(self) -> None: ...
    def update_ep_member(self) -> None: ...
    @staticmethod
    def get_buffer_size_hint(
        group: ProcessGroup,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int: ...
    @staticmethod
    def capture() -> EventHandle: ...
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False) -> None: ...
    def get_physical_domain_size(self) -> tuple[int, int]: ...
    def get_logical_domain_size(self) -> tuple[int, int]: ...
    def get_theoretical_num_sms(self, num_experts: int, num_topk: int) -> int: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        handle: EPHandle | None = None,
        do_expand: bool = False,
        do_cpu_sync: bool | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, EPHandle, EventOverlap]: ...
    @overload
    def dispatch(
        self,
        x: _Scaled,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        handle: EPHandle | None = None,
        do_expand: bool = False,
        do_cpu_sync: bool | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[_Scaled, Tensor, Tensor | None, EPHandle, EventOverlap]: ...
    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        num_sms: int | None = None,
        async_with_compute_stream: bool = False,
    ) -> tuple[Tensor, None, EventOverlap]: ...

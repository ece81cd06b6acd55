from collections.abc import Callable
from typing import ClassVar, Literal, Protocol, TypeAlias, TypeVar, overload, type_check_only

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .._C import Config
from ..utils.event import EventOverlap

_T = TypeVar("_T")
_Scaled: TypeAlias = tuple[Tensor, Tensor]  # values and scales
_Handle: TypeAlias = tuple[Tensor, ...]  # six within a node, ten between nodes; opaque
_LowLatencyHandle: TypeAlias = tuple[Tensor, Tensor, int, int, int]
_Hook: TypeAlias = Callable[[], None]

# What is used of mpi4py.MPI.Comm.
@type_check_only
class Comm(Protocol):
    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def allgather(self, sendobj: _T) -> list[_T]: ...

class Buffer:
    num_sms: ClassVar[int]
    rank: int
    group_size: int
    group: ProcessGroup | Comm
    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    explicitly_destroy: bool
    enable_shrink: bool
    @overload
    def __init__(
        self,
        group: ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Comm | None = None,
    ) -> None: ...
    @overload
    def __init__(
        self,
        group: None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        *,
        comm: Comm,
    ) -> None: ...
    def destroy(self) -> None: ...
    @staticmethod
    def is_sm90_compiled() -> bool: ...
    @staticmethod
    def set_num_sms(new_num_sms: int) -> None: ...
    @staticmethod
    def capture() -> EventOverlap: ...
    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int: ...
    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config: ...
    @staticmethod
    def get_combine_config(num_ranks: int) -> Config: ...
    def get_comm_stream(self) -> torch.cuda.Stream: ...
    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor: ...

    # ---- normal ------------------------------------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]: ...
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
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int], _Handle, EventOverlap]: ...
    @overload
    def dispatch(
        self,
        x: _Scaled,
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
    ) -> tuple[_Scaled, Tensor | None, Tensor | None, list[int], _Handle, EventOverlap]: ...
    @overload
    def dispatch(
        self,
        x: Tensor,
        handle: _Handle,
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
        x: _Scaled,
        handle: _Handle,
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
    ) -> tuple[_Scaled, None, None, None, None, EventOverlap]: ...
    def combine(
        self,
        x: Tensor,
        handle: _Handle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]: ...

    # ---- low latency -------------------------------------------------------------------------------------------------------------------

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
    ) -> tuple[_Scaled, Tensor, _LowLatencyHandle, EventOverlap, _Hook | None]: ...
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
    ) -> tuple[Tensor, Tensor, _LowLatencyHandle, EventOverlap, _Hook | None]: ...
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
    ) -> tuple[_Scaled | Tensor, Tensor, _LowLatencyHandle, EventOverlap, _Hook | None]: ...
    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: _LowLatencyHandle,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, _Hook | None]: ...
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None: ...
    def get_next_low_latency_combine_buffer(self, handle: _LowLatencyHandle) -> Tensor: ...
    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None: ...
    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None: ...
    def low_latency_clean_mask_buffer(self) -> None: ...

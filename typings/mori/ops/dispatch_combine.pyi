from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias, overload

import torch
from torch import Tensor

from .. import cpp

# The members of both are those of the base, not of the class that they are asked of: what takes a member takes the base.
class EpDispatchCombineKernelType(cpp.EpDispatchCombineKernelType): ...
class EpDispatchCombineQuantType(cpp.EpDispatchCombineQuantType): ...

_QuantType: TypeAlias = Literal["none", "fp8_direct_cast", "fp8_blockwise", "fp4_blockwise"]
_Received: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]  # rows, weights, scales, ids, count
_Packed: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # rows by expert, counts, sources, an empty one

@dataclass
class EpDispatchRoutingHandle:
    disp_dest_tok_id_map: Tensor
    inter_node_disp_dest_tok_id_map: Tensor
    inter_node_disp_send_map: Tensor
    total_recv_token_num: Tensor
    disp_tok_id_to_src_tok_id_local: Tensor
    cur_rank_num_token: int = 0
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], cur_rank_num_token: int = 0) -> Self: ...

@dataclass
class EpDispatchCombineConfig:
    data_type: torch.dtype
    rank: int
    world_size: int
    hidden_dim: int
    scale_dim: int
    scale_type_size: int
    max_token_type_size: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    warp_num_per_block: int = 8
    block_num: int = 80
    max_total_recv_tokens: int = 0
    use_external_inp_buf: bool = True
    kernel_type: cpp.EpDispatchCombineKernelType = cpp.EpDispatchCombineKernelType.IntraNode
    gpu_per_node: int = 8
    rdma_block_num: int = 0
    num_qp_per_pe: int = 1
    quant_type: _QuantType = "none"

class EpDispatchCombineOp:
    config: EpDispatchCombineConfig
    local_expert_count: Tensor
    def __init__(self, config: EpDispatchCombineConfig) -> None: ...
    @overload
    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: Literal[False] = False,
    ) -> _Received: ...
    @overload
    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
        *,
        routing: None = None,
        return_routing: Literal[True],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, EpDispatchRoutingHandle]: ...
    def dispatch_send(
        self,
        input: Tensor,
        weights: Tensor,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        warp_per_block: int = -1,
        call_local_expert_count: bool = False,
    ) -> _Received: ...
    def dispatch_recv(self, block_num: int = -1, warp_per_block: int = -1, call_local_expert_count: bool = False) -> None: ...
    def combine(
        self,
        input: Tensor,
        weights: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        use_external_inp_buf: Literal[-1, 0, 1] = -1,
        call_reset: bool = False,
        *,
        routing: EpDispatchRoutingHandle | None = None,
    ) -> tuple[Tensor, Tensor | None]: ...
    def combine_send(
        self, input: Tensor, weights: Tensor | None, indices: Tensor, block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[Tensor, Tensor | None]: ...
    def combine_recv(self, block_num: int = -1, warp_per_block: int = -1) -> None: ...
    def dispatch_standard_moe(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
    ) -> _Packed: ...
    def combine_standard_moe(
        self,
        input: Tensor,
        weights: Tensor | None,
        indices: Tensor,
        block_num: int = -1,
        rdma_block_num: int = -1,
        warp_per_block: int = -1,
        call_reset: bool = False,
    ) -> tuple[Tensor, None]: ...
    def convert_dispatch_output(
        self, dispatch_out_x: Tensor, dispatch_out_topk_idx: Tensor, block_num: int = -1, warp_per_block: int = -1
    ) -> _Packed: ...
    def convert_combine_input(
        self, packed_recv_x: Tensor, packed_recv_src_info: Tensor, packed_recv_layout_range: Tensor, block_num: int = -1, warp_per_block: int = -1
    ) -> Tensor: ...
    def get_launch_config(
        self, is_dispatch: bool = True, block_num: int = -1, rdma_block_num: int = -1, warp_per_block: int = -1
    ) -> tuple[int, int, int]: ...
    def get_registered_combine_input_buffer(self, dtype: torch.dtype, hidden_dim: int = -1) -> Tensor: ...
    def get_dispatch_src_token_pos(self) -> Tensor: ...
    def decode_send_flat_idx(self, flat_idx: int) -> tuple[int, int]: ...
    def max_num_tokens_to_recv(self) -> int: ...
    def max_num_tokens_to_recv_per_rank(self) -> int: ...
    def max_num_tokens_to_send(self) -> int: ...
    def max_num_tokens_to_send_per_rank(self) -> int: ...
    def reset(self) -> None: ...

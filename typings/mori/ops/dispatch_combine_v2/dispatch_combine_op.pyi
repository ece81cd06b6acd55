from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeAlias, overload

import torch
from torch import Tensor

from ...cco import Communicator

_CombineMode: TypeAlias = Literal["gather", "scatter"]
_QuantType: TypeAlias = Literal["none", "fp8_direct_cast", "fp8_blockwise"]
_Schedule: TypeAlias = tuple[tuple[int | None, int, int, int, int], ...]  # most tokens, then blocks and warps of dispatch and of combine
_Backend: TypeAlias = Literal["flydsl", "hip"]

@dataclass
class EpDispatchCombineConfig:
    rank: int
    world_size: int
    hidden_dim: int
    max_num_inp_token_per_rank: int
    num_experts_per_rank: int
    num_experts_per_token: int
    data_type: torch.dtype = torch.bfloat16
    dispatch_data_type: torch.dtype | None = None
    combine_data_type: torch.dtype | None = None
    scale_dim: int = 0
    scale_type_size: int = 0
    combine_mode: _CombineMode = "gather"
    quant_type: _QuantType = "none"
    dispatch_block_num: int | None = None
    combine_block_num: int | None = None
    warp_num_per_block: int | None = None
    combine_warp_num_per_block: int | None = None
    schedule: _Schedule | None = None
    enable_std_moe: bool = False
    max_total_recv_tokens: int = 0
    kernel_backend: _Backend | None = None
    # Takes any keyword by itself, and hands all of them to the constructor.
    @classmethod
    def tuned(
        cls,
        *,
        rank: int,
        world_size: int,
        hidden_dim: int,
        max_num_inp_token_per_rank: int,
        num_experts_per_rank: int,
        num_experts_per_token: int,
        data_type: torch.dtype = torch.bfloat16,
        dispatch_data_type: torch.dtype | None = None,
        combine_data_type: torch.dtype | None = None,
        scale_dim: int = 0,
        scale_type_size: int = 0,
        combine_mode: _CombineMode = "gather",
        quant_type: _QuantType = "none",
        dispatch_block_num: int | None = ...,
        combine_block_num: int | None = ...,
        warp_num_per_block: int | None = ...,
        combine_warp_num_per_block: int | None = ...,
        schedule: _Schedule | None = ...,
        enable_std_moe: bool = False,
        max_total_recv_tokens: int = 0,
        kernel_backend: _Backend | None = None,
    ) -> Self: ...

class EpDispatchRoutingHandle:
    disp_dest_tok_id_map: Tensor
    inter_node_disp_dest_tok_id_map: Tensor
    inter_node_disp_send_map: Tensor
    total_recv_token_num: Tensor
    cur_rank_num_token: int
    def __init__(
        self,
        disp_dest_tok_id_map: Tensor,
        inter_node_disp_dest_tok_id_map: Tensor,
        inter_node_disp_send_map: Tensor,
        total_recv_token_num: Tensor,
        disp_tok_id_to_src_tok_id_local: Tensor | None = None,
        cur_rank_num_token: int = 0,
        *,
        reverse_src_view: Tensor | None = None,
    ) -> None: ...
    @property
    def disp_tok_id_to_src_tok_id_local(self) -> Tensor: ...  # copied when first asked for, which is after the barrier
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor], cur_rank_num_token: int = 0) -> Self: ...

class EpDispatchCombineOp:
    cfg: EpDispatchCombineConfig
    comm: Communicator
    def __init__(self, cfg: EpDispatchCombineConfig, comm: Communicator) -> None: ...
    @property
    def capabilities(self) -> frozenset[str]: ...
    @classmethod
    def available_backends(cls) -> list[str]: ...
    @overload
    def dispatch(
        self,
        input: Tensor,
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        *,
        routing: EpDispatchRoutingHandle | None = None,
        return_routing: Literal[False] = False,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]: ...
    @overload
    def dispatch(
        self, input: Tensor, weights: Tensor | None, scales: Tensor | None, indices: Tensor, *, routing: None = None, return_routing: Literal[True]
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, EpDispatchRoutingHandle]: ...
    def combine(
        self, input: Tensor, weights: Tensor | None = None, indices: Tensor | None = None, *, routing: EpDispatchRoutingHandle
    ) -> tuple[Tensor, Tensor | None]: ...
    def combine_in_view(self) -> Tensor: ...
    def reset(self) -> None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None: ...

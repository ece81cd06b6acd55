from typing import Final, Literal, overload

import torch
from torch import Tensor

from ._versions import GateModeLike
from .ops.enum import ActivationType, QuantType
from .ops.flydsl.kernels.mega_moe_gfx1250.types import Stage2ScatterContext

BLOCK_SIZE_M: Final = 32

def fused_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    expert_mask: Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
    quant_type: QuantType = QuantType.No,
    doweight_stage1: bool = False,
    w1_scale: Tensor | None = None,
    w2_scale: Tensor | None = None,
    a1_scale: Tensor | None = None,
    a2_scale: Tensor | None = None,
    block_size_M: int | None = None,
    num_local_tokens: Tensor | None = None,
    moe_sorting_dispatch_policy: int = 0,
    dtype: torch.dtype | None = None,
    hidden_pad: int = 0,
    intermediate_pad: int = 0,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    splitk: int = 0,
    swiglu_limit: float | None = None,
    beta: float | None = None,
    linear_beta: float | None = None,
    gate_mode: GateModeLike | None = "separated",
    shared_w1: Tensor | None = None,
    shared_w2: Tensor | None = None,
    shared_w1_scale: Tensor | None = None,
    shared_w2_scale: Tensor | None = None,
    shared_expert_id: int = -1,
    stage2_scatter: Stage2ScatterContext | None = None,
    output: Tensor | None = None,
) -> Tensor: ...
@overload
def moe_sorting(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = BLOCK_SIZE_M,
    expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
    dispatch_policy: int = 0,
    return_local_topk_ids: Literal[False] = False,
    accumulate: bool = True,
    flat: bool = False,
    output_aux: Literal[False] = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...
@overload
def moe_sorting(
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_experts: int,
    model_dim: int,
    moebuf_dtype: torch.dtype,
    block_size: int = BLOCK_SIZE_M,
    expert_mask: Tensor | None = None,
    num_local_tokens: Tensor | None = None,
    dispatch_policy: int = 0,
    return_local_topk_ids: bool = False,
    accumulate: bool = True,
    flat: bool = False,
    output_aux: bool = False,
) -> tuple[Tensor, ...]: ...
def torch_moe(
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weight: Tensor,
    topk_ids: Tensor,
    fc1_scale: Tensor | None = None,
    fc2_scale: Tensor | None = None,
    fc1_smooth_scale: Tensor | None = None,
    fc2_smooth_scale: Tensor | None = None,
    expert_mask: Tensor | None = None,
    activation: ActivationType = ActivationType.Silu,
) -> Tensor: ...

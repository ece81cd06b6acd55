"""``fused_moe`` with the parameters of the wheel and of HEAD, in their order and with their defaults."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from .call import Call
from .enums import ActivationType, QuantType
from .fused_moe import run
from .library import Library

FusedMoe: TypeAlias = Callable[..., Tensor]


def is_shared(w1: Tensor | None, w2: Tensor | None, w1_scale: Tensor | None, w2_scale: Tensor | None, expert_id: int) -> bool:
    """Say whether any argument of the shared experts diverts the call."""
    return expert_id != -1 or any(argument is not None for argument in (w1, w2, w1_scale, w2_scale))


def wheel(library: Library) -> FusedMoe:
    """Return that of the wheel, 0.1.7."""

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
        block_size_M: int | None = None,  # noqa: N803 - upstream's name
        num_local_tokens: Tensor | None = None,
        moe_sorting_dispatch_policy: int = 0,
        dtype: torch.dtype | None = None,
        hidden_pad: int = 0,
        intermediate_pad: int = 0,
        bias1: Tensor | None = None,
        bias2: Tensor | None = None,
    ) -> Tensor:
        call = Call(
            hidden_states=hidden_states,
            w1=w1,
            w2=w2,
            topk_weight=topk_weight,
            topk_ids=topk_ids,
            expert_mask=expert_mask,
            activation=activation,
            quant_type=quant_type,
            doweight_stage1=doweight_stage1,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            num_local_tokens=num_local_tokens,
            dtype=dtype,
            hidden_pad=hidden_pad,
            intermediate_pad=intermediate_pad,
            bias1=bias1,
            bias2=bias2,
        )
        return run(library, call)

    return fused_moe


def head(library: Library) -> FusedMoe:
    """Return that of HEAD. ``splitk`` is accepted, and not used."""

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
        block_size_M: int | None = None,  # noqa: N803 - upstream's name
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
        gate_mode: str = "separated",
        shared_w1: Tensor | None = None,
        shared_w2: Tensor | None = None,
        shared_w1_scale: Tensor | None = None,
        shared_w2_scale: Tensor | None = None,
        shared_expert_id: int = -1,
        stage2_scatter: object | None = None,
    ) -> Tensor:
        call = Call(
            hidden_states=hidden_states,
            w1=w1,
            w2=w2,
            topk_weight=topk_weight,
            topk_ids=topk_ids,
            expert_mask=expert_mask,
            activation=activation,
            quant_type=quant_type,
            doweight_stage1=doweight_stage1,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
            a1_scale=a1_scale,
            a2_scale=a2_scale,
            num_local_tokens=num_local_tokens,
            dtype=dtype,
            hidden_pad=hidden_pad,
            intermediate_pad=intermediate_pad,
            bias1=bias1,
            bias2=bias2,
            swiglu_limit=swiglu_limit,
            beta=beta,
            linear_beta=linear_beta,
            gate_mode=gate_mode,
            stage2_scatter=stage2_scatter,
            is_shared=is_shared(shared_w1, shared_w2, shared_w1_scale, shared_w2_scale, shared_expert_id),
        )
        return run(library, call)

    return fused_moe

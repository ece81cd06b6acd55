"""``fused_moe`` with the parameters that came after HEAD: merged, and proposed."""

import torch
from torch import Tensor

from .call import Call
from .enums import ActivationType, QuantType
from .fused_moe import run
from .library import Library
from .signatures import FusedMoe, is_shared


def later(library: Library) -> FusedMoe:
    """Return the merged one: ``output`` and the dtypes of the activations."""

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
        output: Tensor | None = None,
        quant_type_a: QuantType | None = None,
        quant_dtype_a: torch.dtype | None = None,
        quant_dtype_a2: torch.dtype | None = None,
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
            output=output,
            quant_type_a=quant_type_a,
            quant_dtype_a=quant_dtype_a,
            quant_dtype_a2=quant_dtype_a2,
            is_shared=is_shared(shared_w1, shared_w2, shared_w1_scale, shared_w2_scale, shared_expert_id),
        )
        return run(library, call)

    return fused_moe


def no_combine(library: Library) -> FusedMoe:
    """Return HEAD's with the proposed ``no_combine``."""

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
        no_combine: bool = False,
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
            no_combine=no_combine,
            is_shared=is_shared(shared_w1, shared_w2, shared_w1_scale, shared_w2_scale, shared_expert_id),
        )
        return run(library, call)

    return fused_moe

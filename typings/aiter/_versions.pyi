# What each version of the library has, for whoever must serve more than one: a callable of a newer version is one of the older versions too,
# never the other way round. Nothing here exists when code runs: import it under TYPE_CHECKING. The stubs beside it are those of `FusedMoeOutput`.
#
# Wheel017: the published wheel amd-aiter 0.1.7.post2.dev18. Head: the repository in August 2026. The others were merged later, or are proposed.
from typing import Literal, Protocol, TypeAlias, overload, type_check_only

import torch
from torch import Tensor

from .ops.enum import ActivationType, QuantType
from .ops.flydsl.kernels.mega_moe_gfx1250.types import Stage2ScatterContext
from .ops.flydsl.moe_common import GateMode
from .ops.quant import NoQuant, PerTensorQuantHip, PerTokenQuantHip, UnsupportedQuant
from .ops.shuffle import ShuffledTensor
from .utility import dtypes

GateModeLike: TypeAlias = Literal["separated", "mock_gate_only", "gate_only", "interleave"] | GateMode

# ---- fused_moe -----------------------------------------------------------------------------------------------------------------------------

# Up to the biases.
@type_check_only
class FusedMoeWheel017(Protocol):
    def __call__(
        self,
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
    ) -> Tensor: ...

# With gate modes, shared experts and scattering.
@type_check_only
class FusedMoeHead(Protocol):
    def __call__(
        self,
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
    ) -> Tensor: ...

# Writes into ``output`` and returns it (merged after Head).
@type_check_only
class FusedMoeOutput(Protocol):
    def __call__(
        self,
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

# Is told what its activations are quantised to (merged after Head; the place of these parameters is not known, hence they go by name).
@type_check_only
class FusedMoeQuantTypes(Protocol):
    def __call__(
        self,
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
        *,
        quant_type_a: QuantType | None = None,
        quant_dtype_a: torch.dtype | None = None,
        quant_dtype_a2: torch.dtype | None = None,
    ) -> Tensor: ...

# Returns the unweighted rows of every route, `[T, K, H]` (proposed, not merged; the place is not known).
@type_check_only
class FusedMoeNoCombine(Protocol):
    def __call__(
        self,
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
        *,
        no_combine: bool = False,
    ) -> Tensor: ...

# ---- sorting, shuffling and quantising in the published wheel --------------------------------------------------------------------------------

@type_check_only
class MoeSortingWheel017(Protocol):
    def __call__(
        self,
        topk_ids: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        model_dim: int,
        moebuf_dtype: torch.dtype,
        block_size: int = 32,
        expert_mask: Tensor | None = None,
        num_local_tokens: Tensor | None = None,
        dispatch_policy: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]: ...

@type_check_only
class ShuffleWeightWheel017(Protocol):
    def __call__(self, x: Tensor, layout: tuple[int, int] = (16, 16), use_int4: bool = False) -> ShuffledTensor: ...

# Without the attribute ``is_shuffled``.
@type_check_only
class ShuffleWeightA16w4Wheel017(Protocol):
    def __call__(self, src: Tensor, NLane: int, gate_up: bool) -> Tensor: ...

# fp4 alone, with e8m0 scales; there is no per_1x32_mx_quant_hip.
@type_check_only
class Per1x32QuantHipWheel017(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: None = None,
        quant_dtype: torch.dtype = dtypes.fp4x2,
        shuffle: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class PerGroupQuantHipWheel017(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: None = None,
        quant_dtype: torch.dtype = dtypes.i8,
        group_size: Literal[32, 64, 128] = 128,
        transpose_scale: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class Per1x128QuantHipWheel017(Protocol):
    def __call__(
        self,
        x: Tensor,
        scale: None = None,
        quant_dtype: torch.dtype = dtypes.i8,
        *,
        transpose_scale: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class Per1x32F4QuantWheel017(Protocol):
    def __call__(
        self, x: Tensor, scale: Tensor | None = None, quant_dtype: torch.dtype = dtypes.fp4x2, shuffle: bool = False
    ) -> tuple[Tensor, Tensor]: ...

@type_check_only
class GetHipQuantWheel017(Protocol):
    @overload
    def __call__(self, qType: QuantType[Literal[0]]) -> NoQuant: ...
    @overload
    def __call__(self, qType: QuantType[Literal[1]]) -> PerTensorQuantHip: ...
    @overload
    def __call__(self, qType: QuantType[Literal[2]]) -> PerTokenQuantHip: ...
    @overload
    def __call__(self, qType: QuantType[Literal[3]]) -> Per1x32QuantHipWheel017: ...
    @overload
    def __call__(self, qType: QuantType[Literal[4]]) -> Per1x128QuantHipWheel017: ...
    @overload
    def __call__(self, qType: QuantType[Literal[5]]) -> UnsupportedQuant: ...

# ---- names in the published wheel ------------------------------------------------------------------------------------------------------------

ActivationTypeNamesWheel017: TypeAlias = Literal["No", "Silu", "Gelu", "Swiglu"]
QuantTypeNamesWheel017: TypeAlias = Literal["No", "per_Tensor", "per_Token", "per_1x32", "per_1x128", "per_128x128"]
DtypeNamesWheel017: TypeAlias = Literal["fp8", "fp8_e8m0", "fp16", "bf16", "fp32", "i4x2", "fp4x2", "u32", "i32", "i16", "i8"]
MissingWheel017: TypeAlias = Literal[
    "per_1x32_mx_quant_hip",
    "per_1x32_f8_scale_f8_quant",
    "f32_to_mx_e8m0_scale",
    "shuffle_scale",
    "interleave_gate_up_rows",
    "moe_shuffle_weight",
    "moe_shuffle_scale",
    "shuffle_scale_n32k4",
    "pack_int8_to_packed_int4",
    "shuffle_scale_for_int4",
]

"""Grouped matrix products."""

from typing import Protocol

import torch
from torch import Tensor

from .codes import DtypeArg, FusedDequant, FusedQuant, GroupAxis, GroupListType, MatmulActivation, SplitItem


class GroupedMatmulOps(Protocol):
    """Products of consecutive rows with the matrix of their group.

    M rows, E groups, K input features, N output features; G scales along K. Rows after the group list's total are undefined. A weight counts as
    transposed when its strides say so, not by a flag.
    """

    def npu_grouped_matmul(
        self,
        x: list[Tensor],
        weight: list[Tensor],
        *,
        bias: list[Tensor] | None = None,
        scale: list[Tensor] | None = None,
        offset: list[Tensor] | None = None,
        antiquant_scale: list[Tensor] | None = None,
        antiquant_offset: list[Tensor] | None = None,
        per_token_scale: list[Tensor] | None = None,
        group_list: Tensor | None = None,
        activation_input: list[Tensor] | None = None,
        activation_quant_scale: list[Tensor] | None = None,
        activation_quant_offset: list[Tensor] | None = None,
        split_item: SplitItem | None = SplitItem.SEPARATE,
        group_type: GroupAxis | None = None,
        group_list_type: GroupListType | None = GroupListType.CUMSUM,
        act_type: MatmulActivation | None = MatmulActivation.NONE,
        tuning_config: list[int] | None = None,
        output_dtype: DtypeArg | None = None,
        x_dtype: DtypeArg | None = None,
        weight_dtype: DtypeArg | None = None,
        scale_dtype: DtypeArg | None = None,
        per_token_scale_dtype: DtypeArg | None = None,
    ) -> list[Tensor]:
        """Return one [M, N] in a list, for x of one [M, K] and weight of one [E, K, N], in ``output_dtype`` or else x's.

        ``group_list`` int64. ``group_type`` must be given. Formulae by the dtypes of x and weight: float ``x W + b``, b fp32 where x is bf16; int8
        ``(x W + b) * scale * per_token_scale``, scale bf16 for bf16 results and fp32 for fp16 ones; int8 and int4 the same by way of a bias that must
        be ``8 * sum_k W * scale``, and counts alone; int4 and int4; float and int ``x ((W + antiquant_offset) * antiquant_scale) + b``; MX.
        """
        ...

    def npu_grouped_matmul_swiglu_quant(
        self,
        x: Tensor,
        weight: Tensor,
        group_list: Tensor,
        weight_scale: Tensor,
        x_scale: Tensor,
        *,
        bias: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Multiply int8 [M, K] by int8 [E, K, N], take ``silu(left) * right`` and quantise: int8 [M, N / 2], scale fp32 [M], an empty offset.

        ``group_list`` int64 holds cumulative counts; ``weight_scale`` [E, N]; ``x_scale`` fp32 [M].
        """
        ...

    def npu_grouped_matmul_swiglu_quant_v2(
        self,
        x: Tensor,
        weight: list[Tensor],
        weight_scale: list[Tensor],
        x_scale: Tensor,
        group_list: Tensor,
        *,
        smooth_scale: Tensor | None = None,
        weight_assist_matrix: list[Tensor] | None = None,
        bias: Tensor | None = None,
        dequant_mode: FusedDequant | None = FusedDequant.PER_CHANNEL,
        dequant_dtype: DtypeArg | None = 6,
        quant_mode: FusedQuant | None = FusedQuant.PER_TOKEN,
        quant_dtype: DtypeArg | None = 1,
        group_list_type: GroupListType | None = GroupListType.CUMSUM,
        tuning_config: list[int] | None = None,
        x_dtype: DtypeArg | None = None,
        weight_dtype: DtypeArg | None = None,
        weight_scale_dtype: DtypeArg | None = None,
        x_scale_dtype: DtypeArg | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Multiply, take ``silu(left) * right`` without a clamp and quantise: rows [M, N / 2], scale.

        int8 and int8; int8 and int4 with ``weight_assist_matrix`` fp32 [E, N]; int4 and int4 with ``smooth_scale``; MX, whose scales are
        [E, K / 64, N, 2] and [M, K / 64, 2], and the result's uint8 [M, N / 128, 2]. Versions differ in the defaults: pass all.
        """
        ...

    def npu_grouped_matmul_finalize_routing(
        self,
        x: Tensor,
        w: Tensor,
        group_list: Tensor,
        *,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        offset: Tensor | None = None,
        pertoken_scale: Tensor | None = None,
        shared_input: Tensor | None = None,
        logit: Tensor | None = None,
        row_index: Tensor | None = None,
        dtype: torch.dtype | None = None,
        shared_input_weight: float | None = 1.0,
        shared_input_offset: int | None = 0,
        output_bs: int | None = 0,
        group_list_type: GroupListType | None = GroupListType.COUNT,
        tuning_config: list[int] | None = None,
        x_dtype: DtypeArg | None = None,
        w_dtype: DtypeArg | None = None,
        scale_dtype: DtypeArg | None = None,
        pertoken_scale_dtype: DtypeArg | None = None,
    ) -> Tensor:
        """Add ``logit[r] * (x_r W) * scale * pertoken_scale`` into row ``row_index[r]`` of fp32 [output_bs, N], and the weighted shared input.

        The default of ``group_list_type`` is counts here.
        """
        ...

"""Dispatch and combine over the ranks of a group."""

from typing import Protocol

from torch import Tensor

from .codes import CombineQuantMode, DispatchQuantMode, DtypeArg, ExpertShardType, GroupListType


class DistributeOps(Protocol):
    """Collectives of all ranks of ``group_ep``, which agree in every argument but their rows. B rows of a rank, K routes of each, A rows received."""

    def npu_moe_distribute_dispatch_v2(
        self,
        x: Tensor,
        expert_ids: Tensor,
        group_ep: str,
        ep_world_size: int,
        ep_rank_id: int,
        moe_expert_num: int,
        *,
        scales: Tensor | None = None,
        x_active_mask: Tensor | None = None,
        expert_scales: Tensor | None = None,
        elastic_info: Tensor | None = None,
        performance_info: Tensor | None = None,
        group_tp: str = "",
        tp_world_size: int = 0,
        tp_rank_id: int = 0,
        expert_shard_type: ExpertShardType = ExpertShardType.SHARED_FIRST,
        shared_expert_num: int = 1,
        shared_expert_rank_num: int = 0,
        quant_mode: DispatchQuantMode = DispatchQuantMode.NONE,
        global_bs: int = 0,
        expert_token_nums_type: GroupListType = GroupListType.COUNT,
        comm_alg: str = "",
        zero_expert_num: int = 0,
        copy_expert_num: int = 0,
        const_expert_num: int = 0,
        y_dtype: DtypeArg | None = None,
        x_dtype: DtypeArg | None = None,
        scales_dtype: DtypeArg | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Send rows to the ranks of their experts.

        Returns: rows [A, H] by expert, scales fp32 [A], assist info int32 [A * 128], tokens of local experts int64 [E], ep counts int32, tp counts,
        expanded weights. A is an upper bound: rows after the tokens' sum are undefined. Assist info, counts and expanded weights are for the matching
        combine alone. ``expert_ids`` int32 [B, K], distinct in a row; True values of ``x_active_mask`` come first.
        """
        ...

    def npu_moe_distribute_combine_v2(
        self,
        expand_x: Tensor,
        expert_ids: Tensor,
        assist_info_for_combine: Tensor,
        ep_send_counts: Tensor,
        expert_scales: Tensor,
        group_ep: str,
        ep_world_size: int,
        ep_rank_id: int,
        moe_expert_num: int,
        *,
        tp_send_counts: Tensor | None = None,
        x_active_mask: Tensor | None = None,
        expand_scales: Tensor | None = None,
        shared_expert_x: Tensor | None = None,
        elastic_info: Tensor | None = None,
        ori_x: Tensor | None = None,
        const_expert_alpha_1: Tensor | None = None,
        const_expert_alpha_2: Tensor | None = None,
        const_expert_v: Tensor | None = None,
        performance_info: Tensor | None = None,
        group_tp: str = "",
        tp_world_size: int = 0,
        tp_rank_id: int = 0,
        expert_shard_type: ExpertShardType = ExpertShardType.SHARED_FIRST,
        shared_expert_num: int = 1,
        shared_expert_rank_num: int = 0,
        global_bs: int = 0,
        comm_quant_mode: CombineQuantMode = CombineQuantMode.NONE,
        comm_alg: str = "",
        zero_expert_num: int = 0,
        copy_expert_num: int = 0,
        const_expert_num: int = 0,
    ) -> Tensor:
        """Return ``sum_j expert_scales[t, j] * row`` [B, H], plus ``shared_expert_x``; ``expert_scales`` is fp32 [B, K].

        Ids from ``moe_expert_num`` on are zero, copy and constant experts, in this order.
        """
        ...

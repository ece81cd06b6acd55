"""Gating, routing and finalisation."""

from typing import Protocol

from torch import Tensor

from .codes import DtypeArg, FinalizeMode, GatingNorm, GroupListType, GroupSelect, Renorm, RoutingPadMode, RoutingQuantMode, RowIndexType


class RoutingOps(Protocol):
    """From logits to rows sorted by expert, and back to tokens.

    T tokens, K routes of each, R = T * K, E experts, H hidden. A row index is *K-major* where the route (t, j) is at ``j * T + t``, and *row-major*
    where it is at ``t * K + j``; they agree when T or K is 1.
    """

    def npu_moe_gating_top_k_softmax(self, x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Choose by softmax, without renormalisation: weights as x [T, K], ids int32 [T, K], K-major row index int32 [T, K].

        A row that is ``finished`` has E for its ids. k <= 1024.
        """
        ...

    def npu_moe_gating_top_k_softmax_v2(
        self, x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int | None = 0, output_softmax: bool | None = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose by softmax: weights, ids int32 [T, K], and the softmax fp32 [T, E] where ``output_softmax`` asks for it."""
        ...

    def npu_moe_gating_top_k(
        self,
        x: Tensor,
        k: int,
        *,
        bias: Tensor | None = None,
        input_ids: Tensor | None = None,
        tid2eid: Tensor | None = None,
        k_group: int = 1,
        group_count: int = 1,
        group_select_mode: GroupSelect = GroupSelect.MAX,
        renorm: Renorm = Renorm.AS_NORM,
        norm_type: GatingNorm = GatingNorm.SOFTMAX,
        out_flag: bool = False,
        routed_scaling_factor: float = 1.0,
        eps: float = 1e-20,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose by score plus ``bias`` among the best groups: unbiased scores as x [T, K], ids int32 [T, K], all scores fp32 [T, E] if ``out_flag``.

        Sigmoid scores are normalised over the chosen ones, softmax scores are not; then ``routed_scaling_factor``. E <= 2048.
        """
        ...

    def npu_moe_init_routing(self, x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort rows by expert: rows [min(T, active_num) * K, H], K-major index int32 [R], sorted ids int32 [R].

        ``row_idx`` int32 [T, K] is the caller's, ``j * T + t``. ``active_num`` counts tokens.
        """
        ...

    def npu_moe_compute_expert_tokens(self, sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
        """Return the inclusive cumulative counts **int32** [num_expert] of sorted ids int32 [R]; the grouped matmuls want int64."""
        ...

    def npu_moe_init_routing_v2(
        self,
        x: Tensor,
        expert_idx: Tensor,
        *,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
        active_num: int = -1,
        expert_capacity: int = -1,
        expert_num: int = -1,
        drop_pad_mode: RoutingPadMode = RoutingPadMode.DROPLESS,
        expert_tokens_num_type: GroupListType = GroupListType.CUMSUM,
        expert_tokens_num_flag: bool = False,
        quant_mode: RoutingQuantMode = RoutingQuantMode.NONE,
        active_expert_range: list[int] = ...,
        row_idx_type: RowIndexType = RowIndexType.GATHER,
        x_dtype: DtypeArg | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sort rows by expert, quantised if asked: rows [R, H], row-major index int32 [R], tokens of experts int64, scale.

        ``active_num`` counts rows. Rows after those of ``active_expert_range`` are undefined, as is the scale of rows that are not quantised, and the
        tokens unless ``expert_tokens_num_flag``. Atlas 310P gives cumulative counts whatever is asked.
        """
        ...

    def npu_moe_init_routing_quant(
        self,
        x: Tensor,
        expert_idx: Tensor,
        *,
        scale: Tensor | None = None,
        offset: Tensor | None = None,
        active_num: int = 1024,
        expert_capacity: int = 0,
        expert_num: int = 256,
        drop_pad_mode: RoutingPadMode = RoutingPadMode.DROPLESS,
        expert_tokens_num_mode: GroupListType = GroupListType.CUMSUM,
        expert_tokens_before_capacity_flag: bool = False,
        quant_mode: RoutingQuantMode = RoutingQuantMode.DYNAMIC,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Sort and quantise rows: int8 [R, H], row-major index int32 [R], tokens of experts, tokens before the capacity, scale fp32 [R].

        The defaults of ``active_num`` and ``expert_num`` fit few models.
        """
        ...

    def npu_moe_re_routing(
        self,
        tokens: Tensor,
        expert_token_num_per_rank: Tensor,
        *,
        per_token_scales: Tensor | None = None,
        expert_token_num_type: GroupListType = GroupListType.COUNT,
        idx_type: int = 0,
        tokens_dtype: DtypeArg | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bring rows [A, H] from rank-major to expert-major: rows, scales fp32 [A], source row of each int32 [A], tokens of experts [E].

        ``expert_token_num_per_rank`` [ranks, E] int32 or int64 sums to A. Scales are undefined unless given.
        """
        ...

    def npu_moe_token_permute(
        self, tokens: Tensor, indices: Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Sort rows [T, H] by expert: rows [R, H], row-major index int32 [R]."""
        ...

    def npu_moe_token_unpermute(
        self,
        permuted_tokens: Tensor,
        sorted_indices: Tensor,
        probs: Tensor | None = None,
        padded_mode: bool = False,
        restore_shape: list[int] | None = None,
    ) -> Tensor:
        """Return ``sum_j probs[t, j] * permuted_tokens[sorted_indices[t * K + j]]`` [T, H]: the index is row-major."""
        ...

    def npu_moe_finalize_routing(
        self,
        expanded_permuted_rows: Tensor,
        skip1: Tensor | None,
        skip2: Tensor | None,
        bias: Tensor | None,
        scales: Tensor | None,
        expanded_src_to_dst_row: Tensor,
        export_for_source_row: Tensor | None,
        drop_pad_mode: FinalizeMode | None = FinalizeMode.K_MAJOR,
        k: int | None = 1,
    ) -> Tensor:
        """Return ``skip1 + skip2 + sum_j scales[t, j] * (row + bias[expert])`` [T, H]; an index of -1 is a row of zeros.

        ``scales`` [T, K] and rows have one dtype. ``drop_pad_mode`` says how the index int32 [R] is ordered. Prose documents call the seventh
        parameter ``expert_for_source_row``; the schema does not.
        """
        ...

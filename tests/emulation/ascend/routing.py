"""Routing: rows sorted by expert."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import DtypeArg, FinalizeMode, GroupListType, RoutingPadMode, RoutingQuantMode, RowIndexType
from tests.emulation.hazards import poisoned

from .base import Emulation
from .dtypes import FLOATS
from .misuse import Device, Reason, require
from .routing_quant import MX_MODES, quantize_gathered

_INT_MAX = 2**31 - 1
_MAX_EXPERTS = 10240


def _inverse(order: Tensor) -> Tensor:
    """Return where each element of a permutation went, int32."""
    result = torch.empty_like(order)
    result[order] = torch.arange(len(order))
    return result.int()


class RoutingEmulation(Emulation):
    """The routing operators."""

    def npu_moe_init_routing(self, x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
        """Sort by expert; the index is K-major because the caller's ``row_idx`` is."""
        require(row_idx.dtype == expert_idx.dtype == torch.int32, f"row_idx and expert_idx are int32, not {row_idx.dtype} and {expert_idx.dtype}")
        require(x.dtype in FLOATS, f"x is fp16, bf16 or fp32, not {x.dtype}")
        tokens, k = expert_idx.shape
        expected = torch.arange(tokens * k).view(k, tokens).T
        if not torch.equal(row_idx.long(), expected):
            self.judge.silent(Reason.INDEX_ORDER, "row_idx[t, j] is j * T + t")
        if active_num < tokens:
            self.judge.silent(Reason.ACTIVE_NUM, f"{active_num} of {tokens} tokens; it counts tokens here")
        ids = expert_idx.flatten()
        order = ids.argsort(stable=True)
        source = row_idx.flatten()[order].long()
        rows = x[source % tokens][: min(tokens, active_num) * k]
        index = _inverse(source)
        self.indices.remember(FinalizeMode.K_MAJOR, index)
        return rows, index, ids[order]

    def npu_moe_compute_expert_tokens(self, sorted_expert_for_source_row: Tensor, num_expert: int) -> Tensor:
        """Return the inclusive cumulative counts, int32."""
        ids = sorted_expert_for_source_row
        require(ids.dtype == torch.int32, f"ids are int32, not {ids.dtype}")
        require(bool((ids.diff() >= 0).all()), "ids are sorted")
        tokens = torch.stack([(ids <= expert).sum() for expert in range(num_expert)]).int()
        self.lists.remember(GroupListType.CUMSUM, tokens)
        return tokens

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
        active_expert_range: list[int] | None = None,
        row_idx_type: RowIndexType = RowIndexType.GATHER,
        x_dtype: DtypeArg | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Sort by expert within the active range; the index is row-major."""
        start, stop = active_expert_range or (0, expert_num)
        small = self.judge.device is Device.P310
        require(expert_idx.dtype == torch.int32, f"expert_idx is int32, not {expert_idx.dtype}")
        require(x.shape[0] == expert_idx.shape[0], f"{x.shape[0]} rows for the ids of {expert_idx.shape[0]}")
        require(0 < expert_num <= _MAX_EXPERTS, f"expert_num is 1 to {_MAX_EXPERTS}, not {expert_num}")
        require(0 <= start < stop, f"active_expert_range rises from 0, not {start} to {stop}")
        require(
            not small or (x.dtype != torch.bfloat16 and quant_mode == RoutingQuantMode.NONE), f"310P takes neither bf16 nor a quant mode: {x.dtype}"
        )
        if quant_mode in MX_MODES:
            self.judge.limit_mx()
        ids = expert_idx.flatten().long()
        if bool(((ids < 0) | (ids >= expert_num)).any()):
            self.judge.silent(Reason.EXPERT_ID, f"ids are 0 to {expert_num - 1}")
        keys = torch.where(ids < start, _INT_MAX, ids)
        order = keys.argsort(stable=True)
        counts = torch.bincount(ids[(ids >= start) & (ids < stop)] - start, minlength=stop - start)
        available = int(counts.sum())
        if drop_pad_mode == RoutingPadMode.DROP_PAD and not small:
            return self._drop_pad(x, ids, order, counts, expert_capacity)
        rows = len(ids) if active_num <= 0 else min(active_num, len(ids))
        live = min(rows, available)
        if rows < available:
            self.judge.silent(Reason.ACTIVE_NUM, f"{rows} of {available} rows; it counts rows here")
        source = order[:live]
        gathered, scales = quantize_gathered(x, source // expert_idx.shape[1], keys[source] - start, rows, quant_mode, scale, offset)
        kind = expert_tokens_num_type
        if small and expert_tokens_num_flag and kind != GroupListType.CUMSUM:
            self.judge.silent(Reason.GROUP_LIST_DEVICE, f"{kind!r} was asked of a 310P")
            kind = GroupListType.CUMSUM
        tokens = self._tokens(counts, kind, start, expert_num) if expert_tokens_num_flag else poisoned((stop - start,), torch.int64)
        return gathered, self._index(order, available, row_idx_type), tokens, counts.int() if small else scales

    def _index(self, order: Tensor, available: int, kind: RowIndexType) -> Tensor:
        if kind == RowIndexType.SCATTER:
            index = poisoned((len(order),), torch.int32)
            index[:available] = order[:available].int()
            return index
        index = torch.full((len(order),), -1, dtype=torch.int32)
        index[order[:available]] = torch.arange(available, dtype=torch.int32)
        self.indices.remember(FinalizeMode.ROW_MAJOR, index)
        return index

    def _tokens(self, counts: Tensor, kind: GroupListType, start: int, experts: int) -> Tensor:
        if kind == GroupListType.PAIRS:
            used = counts.nonzero().flatten()
            tokens = poisoned((experts, 2), torch.int64)
            tokens[: len(used)] = torch.stack((used + start, counts[used]), -1)
            tokens[len(used) : len(used) + 1] = 0
            return tokens
        tokens = counts.cumsum(0) if kind == GroupListType.CUMSUM else counts
        self.lists.remember(kind, tokens)
        return tokens

    def _drop_pad(self, x: Tensor, ids: Tensor, order: Tensor, counts: Tensor, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        experts, k = len(counts), len(ids) // x.shape[0]
        require(capacity > 0, f"expert_capacity is above 0, not {capacity}")
        rows = torch.zeros(experts, capacity, x.shape[1], dtype=x.dtype)
        index = torch.full((len(ids),), -1, dtype=torch.int32)
        used = [0] * experts
        for route in (int(route) for route in order):
            expert = int(ids[route])
            if used[expert] < capacity:
                rows[expert, used[expert]] = x[route // k]
                index[route] = expert * capacity + used[expert]
            used[expert] += 1
        self.indices.remember(FinalizeMode.ROW_MAJOR_PADDED, index)
        self.lists.remember(GroupListType.COUNT, counts)
        return rows, index, counts, poisoned((experts * capacity,), torch.float32)

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
        """Sort by expert and quantise; tokens are int32."""
        require(quant_mode in (RoutingQuantMode.STATIC, RoutingQuantMode.DYNAMIC), f"quant_mode is 0 or 1, not {int(quant_mode)}")
        require(drop_pad_mode == RoutingPadMode.DROPLESS, "padding is not emulated")
        rows, index, tokens, scales = self.npu_moe_init_routing_v2(
            x,
            expert_idx,
            scale=scale,
            offset=offset,
            active_num=active_num,
            expert_num=expert_num,
            expert_tokens_num_type=expert_tokens_num_mode,
            expert_tokens_num_flag=True,
            quant_mode=quant_mode,
        )
        counts = torch.bincount(expert_idx.flatten(), minlength=expert_num).int()
        before = counts if expert_tokens_before_capacity_flag else poisoned((expert_num,), torch.int32)
        return rows, index, tokens.int(), before, scales

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
        """Bring rows from rank-major to expert-major."""
        counts = expert_token_num_per_rank
        require(expert_token_num_type == GroupListType.COUNT and idx_type == 0, "only counts and the gather index are supported")
        require(int(counts.sum()) == tokens.shape[0], f"{int(counts.sum())} rows are counted, and {tokens.shape[0]} given")
        starts = (counts.flatten().cumsum(0) - counts.flatten()).view(counts.shape)
        ranks, experts = counts.shape
        spans = [torch.arange(int(starts[rank, e]), int(starts[rank, e] + counts[rank, e])) for e in range(experts) for rank in range(ranks)]
        index = torch.cat(spans)
        scales = poisoned((len(index),), torch.float32) if per_token_scales is None else per_token_scales[index]
        totals = counts.sum(0).to(counts.dtype)
        self.lists.remember(GroupListType.COUNT, totals)
        return tokens[index], scales, index.int(), totals

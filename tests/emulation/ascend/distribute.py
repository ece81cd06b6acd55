"""Dispatch and combine of torch_npu over in-process ranks."""

from typing import Final

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import ASSIST_INFO_PER_ROW, CombineQuantMode, DispatchQuantMode, DtypeArg, ExpertShardType, GroupListType
from tests.emulation.hazards import poison_, poisoned
from tests.emulation.world import Group

from .base import Emulation
from .dtypes import HALVES
from .exchange import Returned, Route, Sent, come_back, fill, quantize_sent, send, weighted_sum
from .misuse import Device, Reason, require

_MAX_EXPERTS: Final = 1024
_H_MULTIPLE: Final = 32
_MAX_H_A2: Final = 7168
_H_A3: Final = (1024, 8192)


class DistributeEmulation(Emulation):
    """The two collectives."""

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
        """Send rows to the ranks of their experts."""
        group = self._group(group_ep, ep_world_size, ep_rank_id, moe_expert_num)
        if elastic_info is not None or shared_expert_rank_num or tp_world_size > 1:
            raise NotImplementedError("elastic ranks, ranks of shared experts and tensor-parallel groups are not emulated")
        require(x.dtype in HALVES, f"x is fp16 or bf16, not {x.dtype}")
        require(expert_ids.dtype == torch.int32, f"expert_ids is int32, not {expert_ids.dtype}")
        require(expert_scales is None or expert_scales.dtype == torch.float32, "expert_scales is fp32")
        require(
            expert_token_nums_type in (GroupListType.CUMSUM, GroupListType.COUNT), f"expert_token_nums_type is 0 or 1, not {expert_token_nums_type}"
        )
        self._check_hidden(x.shape[1])
        special = zero_expert_num + copy_expert_num + const_expert_num
        ids = self._ids(expert_ids, moe_expert_num + special, x_active_mask)
        smooth = scales if quant_mode == DispatchQuantMode.DYNAMIC else None
        arguments = (moe_expert_num, global_bs, ep_world_size, special)
        arrived = send(group, "distribute_dispatch", Sent(x, ids, expert_scales, smooth, arguments), moe_expert_num)
        if any(other.arguments != arguments for other in arrived.sent):
            self.judge.silent(Reason.OTHER_DISPATCH, "ranks disagree in their arguments")
        sizes = [len(other.rows) for other in arrived.sent]
        if global_bs == 0 and len(set(sizes)) > 1:
            self.judge.silent(Reason.OTHER_DISPATCH, f"ranks have {sizes} rows, and global_bs is 0")
        bound = (global_bs or len(x) * ep_world_size) * min(arrived.experts, expert_ids.shape[1])
        require(len(arrived.routes) <= bound, f"{len(arrived.routes)} rows arrive, and {bound} are expected by global_bs")
        rows, dynamic = arrived.rows(arrived.experts * ep_rank_id), poisoned((bound,), torch.float32)
        if quant_mode == DispatchQuantMode.DYNAMIC:
            rows, live = quantize_sent(rows)
            dynamic[: len(live)] = live
        counts = arrived.counts()
        tokens = counts if expert_token_nums_type == GroupListType.COUNT else counts.cumsum(0)
        self.lists.remember(expert_token_nums_type, tokens)
        assist = poisoned((max(expert_ids.numel(), bound * ASSIST_INFO_PER_ROW),), torch.int32)
        for place, route in enumerate(arrived.routes):
            at = place * ASSIST_INFO_PER_ROW
            assist[at : at + 5] = torch.tensor([route.expert, route.rank, route.token, route.slot, moe_expert_num], dtype=torch.int32)
        return fill(rows, bound), dynamic, assist, tokens, arrived.prefix(ep_world_size), poisoned((1,), torch.int32), fill(arrived.weights(), bound)

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
        """Bring the rows back and add them up, weighted."""
        group = self._group(group_ep, ep_world_size, ep_rank_id, moe_expert_num)
        require(expert_scales.dtype == torch.float32, f"expert_scales is fp32, not {expert_scales.dtype}")
        require(expert_ids.dtype == torch.int32, f"expert_ids is int32, not {expert_ids.dtype}")
        require(expand_x.dtype in HALVES, f"expand_x is fp16 or bf16, not {expand_x.dtype}")
        tokens, slots = expert_ids.shape
        routes = self._routes(assist_info_for_combine, int(ep_send_counts[-1]), moe_expert_num)
        if len(routes) > len(expand_x):
            self.judge.silent(Reason.SHORT_ROWS, f"{len(expand_x)} of {len(routes)} rows")
        rows = fill(expand_x[: len(routes)], len(routes))
        if comm_quant_mode == CombineQuantMode.INT8:
            values, scale = quantize_sent(rows)
            rows = (values.float() * scale[:, None]).to(rows.dtype)
        first = ep_rank_id * (moe_expert_num // ep_world_size)
        found, experts = come_back(group, "distribute_combine", Returned(rows, routes, first), tokens, slots)
        expected = self._ids(expert_ids, moe_expert_num + zero_expert_num + copy_expert_num + const_expert_num, x_active_mask)
        if not torch.equal(experts, torch.where(expected < moe_expert_num, expected, -1)):
            self.judge.silent(Reason.OTHER_DISPATCH, "the ids are not those that were dispatched")
        total = weighted_sum(found, experts, expert_scales)
        copies = (moe_expert_num + zero_expert_num, moe_expert_num + zero_expert_num + copy_expert_num)
        total = total + _special(expert_ids, expert_scales, copies, ori_x, const_expert_alpha_1, const_expert_alpha_2, const_expert_v)
        if shared_expert_x is not None:
            total = total + shared_expert_x.float()
        result = total.to(expand_x.dtype)
        if x_active_mask is not None:
            poison_(result[int(x_active_mask.sum()) :])
        return result

    def _group(self, name: str, size: int, rank: int, experts: int) -> Group:
        require(name in self.groups, f"no group has the name {name!r}")
        group = self.groups[name]
        require(
            (group.size(), group.rank()) == (size, rank),
            f"group {name!r} has {group.size()} ranks, and this is {group.rank()}, not {size} and {rank}",
        )
        require(experts <= _MAX_EXPERTS and experts % size == 0, f"{experts} experts on {size} ranks")
        return group

    def _check_hidden(self, hidden: int) -> None:
        require(hidden % _H_MULTIPLE == 0, f"H is a multiple of {_H_MULTIPLE}, not {hidden}")
        if self.judge.device is Device.A2:
            self.judge.limit(hidden <= _MAX_H_A2, f"H is at most {_MAX_H_A2} on A2, not {hidden}")
        if self.judge.device is Device.A3:
            self.judge.limit(_H_A3[0] <= hidden <= _H_A3[1], f"H is {_H_A3[0]} to {_H_A3[1]} on A3, not {hidden}")

    def _ids(self, expert_ids: Tensor, stop: int, mask: Tensor | None) -> Tensor:
        """Return ids int64, -1 for inactive rows."""
        ids = expert_ids.long()
        if mask is not None:
            require(mask.dtype == torch.bool and mask.dim() == 1, f"x_active_mask is bool [B], not {mask.dtype} {list(mask.shape)}")
            if bool((mask[1:] & ~mask[:-1]).any()):
                self.judge.silent(Reason.MASK_ORDER, f"{mask}")
            ids = torch.where((torch.arange(len(ids)) < mask.sum())[:, None], ids, -1)
        active = ids if mask is None else ids[: int(mask.sum())]
        if bool(((active < 0) | (active >= stop)).any()):
            self.judge.silent(Reason.EXPERT_ID, f"ids are 0 to {stop - 1}")
        if bool((active.sort(-1).values.diff(dim=-1) == 0).any()):
            self.judge.silent(Reason.DUPLICATE_EXPERT, "the ids of a row are distinct")
        return ids

    def _routes(self, assist: Tensor, rows: int, experts: int) -> list[Route]:
        """Return the routes of the assist info, which nobody else reads."""
        found: list[Route] = []
        for place in range(rows):
            at = place * ASSIST_INFO_PER_ROW
            expert, rank, token, slot, said = (int(value) for value in assist[at : at + 5])
            if said != experts:
                self.judge.silent(Reason.OTHER_DISPATCH, f"row {place} was not dispatched to {experts} experts")
            found.append(Route(expert, rank, token, slot))
        return found


def _special(
    ids: Tensor, weights: Tensor, copies: tuple[int, int], x: Tensor | None, alpha_1: Tensor | None, alpha_2: Tensor | None, v: Tensor | None
) -> Tensor | float:
    """Return the weighted rows of copy and constant experts [T, H]; zero experts give nothing."""
    start, stop = copies
    if not bool((ids >= start).any()):
        return 0.0
    require(x is not None, "copy and constant experts need ori_x")
    assert x is not None
    rows = x.float()
    copied = (weights * ((ids >= start) & (ids < stop))).sum(1, keepdim=True) * rows
    constant = torch.zeros_like(rows)
    for token, slot in ((int(token), int(slot)) for token, slot in (ids >= stop).nonzero()):
        require(alpha_1 is not None and alpha_2 is not None and v is not None, "constant experts need both alphas and v")
        assert alpha_1 is not None
        assert alpha_2 is not None
        assert v is not None
        which = int(ids[token, slot]) - stop
        constant[token] += weights[token, slot] * (alpha_1[which].float() * rows[token] + alpha_2[which].float() * v[which].float())
    return copied + constant

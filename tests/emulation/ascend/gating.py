"""Gating: from logits to weights and ids."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import GatingNorm, GroupSelect, Renorm

from .base import Emulation
from .misuse import require

_MAX_SOFTMAX_K = 1024
_MAX_EXPERTS = 2048


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row and their places: of equal ones the first."""
    values, places = scores.sort(stable=True, dim=-1, descending=True)
    return values[:, :k], places[:, :k]


class GatingEmulation(Emulation):
    """The gating operators."""

    def npu_moe_gating_top_k_softmax(self, x: Tensor, finished: Tensor | None = None, k: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, ids, and the K-major row index that routing v1 wants."""
        require(0 < k <= min(_MAX_SOFTMAX_K, x.shape[-1]), f"k is 1 to {_MAX_SOFTMAX_K} and at most the number of experts, not {k}")
        weights, ids = _top(x.float().softmax(-1), k)
        tokens, experts = x.shape
        ids = ids.int()
        if finished is not None:
            ids = torch.where(finished[:, None], experts, ids)
        row_idx = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).T.contiguous()
        return weights.to(x.dtype), ids.int(), row_idx

    def npu_moe_gating_top_k_softmax_v2(
        self, x: Tensor, *, k: int = 1, finished: Tensor | None = None, renorm: int | None = 0, output_softmax: bool | None = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, ids and the softmax."""
        if renorm:
            scores = x.float()
            chosen, ids = _top(scores, k)
            weights = chosen.softmax(-1)
        else:
            scores = x.float().softmax(-1)
            weights, ids = _top(scores, k)
        if finished is not None:
            ids = torch.where(finished[:, None], x.shape[-1], ids)
        softmax = x.float().softmax(-1) if output_softmax and not renorm else torch.empty(0)
        return weights.to(x.dtype), ids.int(), softmax

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
        """Return unbiased scores of the chosen, their ids, and all scores."""
        tokens, experts = x.shape
        members = experts // group_count
        require(renorm == Renorm.AS_NORM or self.renorm_always, f"renorm is 0 in these kernels, not {int(renorm)}")
        require(experts <= _MAX_EXPERTS and experts % group_count == 0, f"{experts} experts in {group_count} groups")
        require(group_count == 1 or members > 2, f"a group has more than 2 experts, not {members}")
        require(k <= members * k_group, f"k is at most {members * k_group}, not {k}")
        if input_ids is not None or tid2eid is not None:
            raise NotImplementedError("experts by token id are not emulated")
        scores = x.float().softmax(-1) if norm_type == GatingNorm.SOFTMAX else x.float().sigmoid()
        selection = scores if bias is None else scores + bias.float()
        if group_count > 1:
            grouped = selection.view(tokens, group_count, members)
            best = grouped.amax(-1) if group_select_mode == GroupSelect.MAX else grouped.topk(2, -1).values.sum(-1)
            kept = torch.zeros(tokens, group_count, dtype=torch.bool).scatter_(1, _top(best, k_group)[1], value=True)
            selection = torch.where(kept[..., None], grouped, -torch.inf).view(tokens, experts)
        ids = _top(selection, k)[1]
        weights = scores.gather(1, ids)
        if norm_type == GatingNorm.SIGMOID or renorm == Renorm.ALWAYS:
            weights = weights / (weights.sum(-1, keepdim=True) + eps)
        weights = weights * routed_scaling_factor
        return weights.to(x.dtype), ids.int(), scores if out_flag else torch.empty(0)

"""The top-k gate in torch operations: static shapes, no host sync."""

import torch
from torch import Tensor

from ..scores.reference import renormalize, score
from .spec import GateRule

_OUT = -(2**31)  # ranks below everything, since minus infinity ranks at -0x7f800001


def topk_gate(logits: Tensor, rule: GateRule, bias: Tensor | None = None, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (ids int32, weights float32), both (rows, top_k): the best expert first, the lowest id first among equals.

    ``logits``: floating (rows, experts). ``bias``: float32 (experts,). ``live``: int32 (1,), the leading rows that count, None for all; the rest
    get ids -1 and weights 0. A NaN logit ranks with minus infinity and adds nothing to a softmax; an expert chosen all the same has weight NaN,
    so that the row shows it. Raises: ValueError when the rule does not fit the number of experts.
    """
    rows, experts = logits.shape
    rule.check(experts)
    z = logits.to(torch.float32)
    numbers = _without_nan(z)
    value = numbers
    if rule.score != "selected_softmax" and not rule.ranks_logits(bias is not None):
        value = score(numbers, rule.score)
    if bias is not None:
        value = value + bias
    value = _without_nan(value)
    rank = _rank(value)
    if rule.num_groups > 1:
        grouped = value.view(rows, rule.num_groups, experts // rule.num_groups)
        best = grouped.amax(2) if rule.group_score == "max" else grouped.topk(min(2, grouped.shape[2])).values.sum(2)
        groups = _stable_topk(_rank(_without_nan(best)), rule.topk_group)
        stays = torch.zeros_like(best, dtype=torch.bool).scatter(1, groups, True)
        rank = torch.where(stays.repeat_interleave(grouped.shape[2], 1), rank, _OUT)
    ids = _stable_topk(rank, rule.top_k)

    chosen = z.gather(1, ids)
    if rule.score == "selected_softmax":
        weights = torch.softmax(chosen, 1)
    elif rule.score == "softmax":
        peak = numbers.amax(1, keepdim=True)
        weights = torch.exp(chosen - peak) / torch.exp(numbers - peak).sum(1, keepdim=True)
    else:
        weights = score(chosen, rule.score)
    weights = (renormalize(weights) if rule.renormalize else weights) * rule.factor
    if live is None:
        return ids.to(torch.int32), weights
    is_live = torch.arange(rows, device=logits.device).unsqueeze(1) < live
    return torch.where(is_live, ids, -1).to(torch.int32), torch.where(is_live, weights, 0.0)


def _without_nan(value: Tensor) -> Tensor:
    return torch.where(value.isnan(), -torch.inf, value)


def _rank(value: Tensor) -> Tensor:
    """Return int32 numbers in the order of the float32 values, the two zeros equal."""
    bits = torch.where(value == 0, 0.0, value).view(torch.int32)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)  # the bits of negative numbers fall as the numbers rise


def _stable_topk(rank: Tensor, k: int) -> Tensor:
    return torch.sort(rank, dim=1, descending=True, stable=True).indices[:, :k]

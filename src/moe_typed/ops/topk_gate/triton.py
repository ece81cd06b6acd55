"""The top-k gate in one launch: a warp takes one row, holds all of it in registers, and picks the best k times.

A float32 value is ranked as an int32 in the same order, since a warp finds its largest integer in one instruction (redux.sync) where floats take
five shuffles. A second redux finds the lowest expert of that rank. Where 16-bit logits themselves are ranked, rank and expert share one int32, and
one redux does. Only the chosen are weighed, unless scores are ranked or a softmax needs its sum.
"""

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..scores.triton import exp, renormalize, score
from .spec import GateRule, ranks_logits_of

SCORES: Final = {"selected_softmax": 0, "softmax": 1, "sigmoid": 2, "sqrt_softplus": 3}
_WARP_ROW: Final = 128  # float32 values that a warp reads in 16-byte loads; a longer row would spread over the warps of its program
_MANY_ROWS: Final = 512  # from here on programs of four warps, a row each, cost less than as many programs of one
_SELECTED = tl.constexpr(0)
_SOFTMAX = tl.constexpr(1)
_SIGMOID = tl.constexpr(2)
_OUT = tl.constexpr(-(2**31))  # reference._OUT
_LOW = tl.constexpr(0xFFFF)  # the half of a shared int32 that holds the complement of the slot, larger for lower slots


def topk_gate(logits: Tensor, rule: GateRule, bias: Tensor | None = None, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.topk_gate; rows of ``logits`` may have any stride."""
    rows, experts = logits.shape
    rule.check(experts)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    ids = torch.empty((rows, rule.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, rule.top_k), dtype=torch.float32, device=logits.device)
    if rows:
        _topk_gate(logits, bias, live, ids, weights, *rule)
    return ids, weights


@custom_op("topk_gate", writes=("ids", "weights"))
def _topk_gate(
    logits: Tensor,
    bias: Tensor | None,
    live: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    factor: float,
    num_groups: int,
    topk_group: int,
    group_score: str,
) -> None:
    rows, experts = logits.shape
    tile = 4 if rows >= _MANY_ROWS and experts <= _WARP_ROW else 1
    constants = _constants(logits.stride(0), experts, tile, bias is not None, top_k, score, renormalize, num_groups, topk_group, group_score)
    _gate(triton.cdiv(rows, tile), (logits, bias, live, ids, weights), (rows, factor), constants, num_warps=tile)


@cache
def _constants(
    stride: int,
    experts: int,
    tile: int,
    biased: bool,
    top_k: int,
    score: str,
    renormalize: bool,
    num_groups: int,
    topk_group: int,
    group_score: str,
) -> dict[str, int]:
    ranks_logits = ranks_logits_of(score, biased, num_groups, group_score)
    if score == "softmax" and renormalize and ranks_logits:
        score = "selected_softmax"  # the same, as the sum cancels; the largest logit is among the chosen, beside which the epsilon is nothing
    return {
        "STRIDE": stride,
        "EXPERTS": experts,
        "K": top_k,
        "SCORE": SCORES[score],
        "RANKS_LOGITS": ranks_logits,
        "RENORMALIZE": renormalize,
        "GROUPS": num_groups,
        "TOPK_GROUP": topk_group,
        "TOP2_SUM": group_score == "top2_sum",
        "ROWS": tile,
        "GROUPS_PADDED": triton.next_power_of_2(num_groups),
        "PER_GROUP_PADDED": triton.next_power_of_2(experts // num_groups),
        "K_PADDED": triton.next_power_of_2(top_k),
    }


@Launcher
@triton.jit(do_not_specialize=["rows"])
def _gate(
    logits_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    live_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    rows: tl.tensor,
    factor: tl.tensor,
    STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SCORE: tl.constexpr,
    RANKS_LOGITS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    TOP2_SUM: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS_PADDED: tl.constexpr,
    PER_GROUP_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
) -> None:
    per_group: tl.constexpr = EXPERTS // GROUPS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    is_live = exists
    if live_ptr is not None:
        is_live = exists & (row < tl.load(live_ptr))
    # A slot is an expert's place in a tile whose groups are padded to powers of two; slots are in the order of the experts.
    slot = tl.arange(0, GROUPS_PADDED * PER_GROUP_PADDED)
    is_expert = (slot // PER_GROUP_PADDED < GROUPS) & (slot % PER_GROUP_PADDED < per_group)
    expert = _expert(slot, per_group, PER_GROUP_PADDED)
    row_ptr = (logits_ptr + row.to(tl.int64) * STRIDE)[:, None]
    logits = tl.load(row_ptr + expert[None, :], mask=is_live[:, None] & is_expert[None, :], other=float("-inf")).to(tl.float32)

    logits = _without_nan(logits)
    # Only a softmax needs these; the compiler drops what nobody uses.
    peak = tl.max(logits, 1)[:, None]
    powers = tl.exp(logits - peak)
    total = tl.sum(powers, 1)[:, None]
    value = logits
    if not RANKS_LOGITS:
        value = powers / total if SCORE == _SOFTMAX else score(logits, SCORE == _SIGMOID)
    if bias_ptr is not None:
        value += tl.load(bias_ptr + expert, mask=is_expert, other=0.0)[None, :]
    value = tl.where(is_expert[None, :], _without_nan(value), float("-inf"))
    shared: tl.constexpr = RANKS_LOGITS and bias_ptr is None and logits_ptr.dtype.element_ty.primitive_bitwidth == 16
    rank = _rank(value)
    if shared:
        rank = _rank16(value, logits_ptr) | (slot ^ _LOW)[None, :]
    rank = tl.where(is_expert[None, :], rank, _OUT)
    if GROUPS > 1:
        group = tl.arange(0, GROUPS_PADDED)
        score_of_group = _group_score(tl.reshape(value, (ROWS, GROUPS_PADDED, PER_GROUP_PADDED)), TOP2_SUM and per_group > 1)
        stays = _is_among_best(tl.where((group < GROUPS)[None, :], _rank(score_of_group), _OUT), group, TOPK_GROUP)
        rank = tl.where(stays[:, :, None], tl.reshape(rank, (ROWS, GROUPS_PADDED, PER_GROUP_PADDED)), _OUT)
        rank = tl.reshape(rank, (ROWS, GROUPS_PADDED * PER_GROUP_PADDED))

    column = tl.arange(0, K_PADDED)
    chosen = tl.zeros((ROWS, K_PADDED), tl.int32)
    for index in range(K):
        best = tl.max(rank, 1)
        if shared:
            winner = (best & _LOW) ^ _LOW
            rank = tl.where(rank == best[:, None], _OUT, rank)
        else:
            winner = tl.min(tl.where(rank == best[:, None], slot[None, :], GROUPS_PADDED * PER_GROUP_PADDED), 1)
            rank = tl.where(slot[None, :] == winner[:, None], _OUT, rank)
        chosen = tl.where(column[None, :] == index, winner[:, None], chosen)
    ids = _expert(chosen, per_group, PER_GROUP_PADDED)

    # The chosen logits again, from the cache: which NaN was chosen, and the value without bias, shows here alone.
    is_column = (column < K)[None, :]
    logits = tl.load(row_ptr + ids, mask=is_live[:, None] & is_column, other=float("-inf")).to(tl.float32)
    if SCORE == _SELECTED:
        weights = exp(logits - tl.max(logits, 1)[:, None])
        weights = weights / tl.sum(weights, 1)[:, None]
    elif SCORE == _SOFTMAX:
        weights = exp(logits - peak) / total
    else:
        weights = score(logits, SCORE == _SIGMOID)
    if RENORMALIZE and SCORE != _SELECTED:
        weights = renormalize(tl.where(is_column, weights, 0.0))
    out = row.to(tl.int64)[:, None] * K + column[None, :]
    mask = exists[:, None] & is_column
    tl.store(ids_ptr + out, tl.where(is_live[:, None], ids, -1), mask=mask)
    tl.store(weights_ptr + out, tl.where(is_live[:, None], weights * factor, 0.0), mask=mask)


@triton.jit
def _expert(slot: tl.tensor, PER_GROUP: tl.constexpr, PER_GROUP_PADDED: tl.constexpr) -> tl.tensor:
    return slot // PER_GROUP_PADDED * PER_GROUP + slot % PER_GROUP_PADDED


@triton.jit
def _without_nan(value: tl.tensor) -> tl.tensor:
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _rank(value: tl.tensor) -> tl.tensor:
    """Return reference._rank."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _rank16(value: tl.tensor, pointer: tl.tensor) -> tl.tensor:
    """Return reference._rank of values that the 16-bit dtype of ``pointer`` holds exactly, in the upper half of an int32."""
    bits = (value + 0.0).to(pointer.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFF)) << 16


@triton.jit
def _group_score(value: tl.tensor, TOP2_SUM: tl.constexpr) -> tl.tensor:
    """Return the largest value along the last axis, or the sum of the two largest."""
    best = tl.max(value, 2)
    if TOP2_SUM:
        place = tl.arange(0, value.shape[2])[None, None, :]
        first = tl.min(tl.where(value == best[:, :, None], place, value.shape[2]), 2)
        best += tl.max(tl.where(place == first[:, :, None], float("-inf"), value), 2)
    return _without_nan(best)


@triton.jit
def _is_among_best(rank: tl.tensor, group: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """Return whether fewer than COUNT of the row's ranks come before this one: all pairs at once, as a row has few groups."""
    mine, other = rank[:, :, None], rank[:, None, :]
    comes_before = (other > mine) | ((other == mine) & (group[None, None, :] < group[None, :, None]))
    return tl.sum(comes_before.to(tl.int32), 2) < COUNT

"""The hash gate in one launch: a warp takes a few rows, and reads a whole row of logits only for a softmax's sum."""

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..scores import Score
from ..scores.triton import exp, renormalize, score

# Rows a warp takes: chains of dependent loads (token, table, logit) that are in flight together. On an H200 one row at a time takes twice as long at
# 16384 rows; with a softmax, four rows fill the registers, and a small batch waits for them.
_ROWS: Final = 4
_ROWS_SOFTMAX: Final = 2


def hash_gate(
    logits: Tensor, table: Tensor, token_ids: Tensor, score: Score, renormalize: bool, factor: float, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.hash_gate."""
    rows, k = logits.shape[0], table.shape[1]
    ids = torch.empty((rows, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((rows, k), dtype=torch.float32, device=logits.device)
    if rows:
        _hash_gate(logits, table.contiguous(), token_ids, live, ids, weights, score, renormalize, factor)
    return ids, weights


@custom_op("hash_gate", writes=("ids", "weights"))
def _hash_gate(
    logits: Tensor,
    table: Tensor,
    token_ids: Tensor,
    live: Tensor | None,
    ids: Tensor,
    weights: Tensor,
    score: str,
    renormalize: bool,
    factor: float,
) -> None:
    constants = _constants(*logits.stride(), token_ids.stride(0), *table.shape, logits.shape[1], score, renormalize)
    rows = logits.shape[0]
    _hash(triton.cdiv(rows, constants["ROWS"]), (logits, table, token_ids, live, ids, weights), (rows, factor), constants, num_warps=1)


@cache
def _constants(
    stride: int, column_stride: int, token_stride: int, vocabulary: int, k: int, experts: int, score: str, renormalize: bool
) -> dict[str, int]:
    return {
        "STRIDE": stride,
        "COLUMN_STRIDE": column_stride,
        "TOKEN_STRIDE": token_stride,
        "VOCABULARY": vocabulary,
        "EXPERTS": experts,
        "K": k,
        "SOFTMAX": score == "softmax",
        "SIGMOID": score == "sigmoid",
        "RENORMALIZE": renormalize,
        "ROWS": _ROWS_SOFTMAX if score == "softmax" else _ROWS,
        "EXPERTS_PADDED": triton.next_power_of_2(experts),
        "K_PADDED": triton.next_power_of_2(k),
    }


@Launcher
@triton.jit(do_not_specialize=["rows"])
def _hash(
    logits_ptr: tl.tensor,
    table_ptr: tl.tensor,
    token_ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    rows: tl.tensor,
    factor: tl.tensor,
    STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    VOCABULARY: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    exists = row < rows
    is_live = exists
    if live_ptr is not None:
        is_live = exists & (row < tl.load(live_ptr))
    column = tl.arange(0, K_PADDED)[None, :]
    token = tl.load(token_ids_ptr + row * TOKEN_STRIDE, mask=is_live, other=0).to(tl.int64)
    goes = is_live & (token >= 0) & (token < VOCABULARY)
    chosen = goes[:, None] & (column < K)
    ids = tl.load(table_ptr + token[:, None] * K + column, mask=chosen, other=-1)
    row_ptr = (logits_ptr + row * STRIDE)[:, None]
    logits = tl.load(row_ptr + ids * COLUMN_STRIDE, mask=chosen, other=0.0).to(tl.float32)
    if SOFTMAX:
        expert = tl.arange(0, EXPERTS_PADDED)[None, :]
        all_logits = tl.load(row_ptr + expert * COLUMN_STRIDE, mask=is_live[:, None] & (expert < EXPERTS), other=float("-inf")).to(tl.float32)
        peak = tl.max(all_logits, 1)[:, None]
        weights = exp(logits - peak) / tl.sum(tl.exp(all_logits - peak), 1)[:, None]
    else:
        weights = score(logits, SIGMOID)
    if RENORMALIZE:
        weights = renormalize(tl.where(column < K, weights, 0.0))
    out = row[:, None] * K + column
    mask = exists[:, None] & (column < K)
    tl.store(ids_ptr + out, ids, mask=mask)
    tl.store(weights_ptr + out, tl.where(goes[:, None], weights * factor, 0.0), mask=mask)

"""The second product of few rows: one program for some columns of one row, over all of its routes, which it sums. No matrix instructions."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..activation.spec import GROUP
from ..product_plans.fit import require_weights
from ..product_plans.spec import Tile

_GROUP = tl.constexpr(GROUP)


def down_product_summed(
    rows: Tensor,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor,
    live: Tensor | None,
    out_dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """Return (tokens, N): for each token the sum over its routes of router weight times (row of the route times expert's weights, plus bias).

    ``rows``: (routes, K), not quantised. Dropped routes count nothing, and rows from ``live`` on are zeros, as in sum_routes.
    """
    require_weights(weights, weights_scale, bias)
    out = rows.new_empty((topk_ids.shape[0], weights.shape[1]), dtype=out_dtype)
    _launch(rows, weights, weights_scale, bias, topk_ids, topk_weights, live, list(tile), out)
    return out


@custom_op("down_product_vector", writes=("out",))
def _launch(
    rows: Tensor,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    topk_ids: Tensor,
    topk_weights: Tensor,
    live: Tensor | None,
    tile: list[int],
    out: Tensor,
) -> None:
    _, block_n, block_k, warps, stages, _ = tile
    tokens, columns = out.shape
    if not tokens:
        return
    constants = {
        "TOP_K": topk_ids.shape[1],
        "SLOTS": triton.next_power_of_2(max(1, topk_ids.shape[1])),
        "EXPERTS": weights.shape[0],
        "N": columns,
        "K": weights.shape[2],
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STAGES": stages,
    }
    tensors = (rows, weights, weights_scale, bias, topk_ids, topk_weights, live, out)
    _DOWN(tokens * triton.cdiv(columns, block_n), tensors, (), constants, num_warps=warps, num_stages=stages)


@triton.jit
def _down(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    weights_scale_ptr: tl.tensor | None,
    bias_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    router_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    row = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    slot = tl.arange(0, SLOTS)
    experts = tl.load(ids_ptr + row * TOP_K + slot, mask=slot < TOP_K, other=-1)
    if live_ptr is not None:
        experts = tl.where(row < tl.load(live_ptr), experts, -1)
    kept = (experts >= 0) & (experts < EXPERTS)
    router = tl.load(router_ptr + row * TOP_K + slot, mask=kept, other=0.0)
    order = tl.where(kept, tl.cumsum(kept.to(tl.int32), 0) - 1, -1)  # the kept ones are gone through, as they come
    count = tl.sum(kept.to(tl.int32), 0)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = column < N
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    extra = tl.zeros((BLOCK_N,), tl.float32)
    for step in tl.range(0, count * STEPS, num_stages=STAGES):
        chosen = order == step // STEPS
        start = step % STEPS * BLOCK_K
        at = tl.sum(tl.where(chosen, experts, 0), 0).to(tl.int64)
        by = tl.sum(tl.where(chosen, router, 0.0), 0)
        source = row * TOP_K + tl.sum(tl.where(chosen, slot, 0), 0)
        in_k = depth < K - start
        a = by * tl.load(rows_ptr + source.to(tl.int64) * K + start + depth, mask=in_k, other=0.0).to(tl.float32)
        b = weights_ptr + at * (N * K) + column[:, None] * K + start + depth[None, :]
        w = tl.load(b) if EVEN else tl.load(b, mask=in_n[:, None] & in_k[None, :], other=0.0)
        if weights_scale_ptr is not None:
            GROUPS: tl.constexpr = K // _GROUP
            a *= tl.load(
                weights_scale_ptr + (at * (N // _GROUP) + tile * BLOCK_N // _GROUP) * GROUPS + (start + depth) // _GROUP, mask=in_k, other=0.0
            )
        total += w.to(tl.float32) * a[None, :]
        if bias_ptr is not None:
            first = tl.where(start == 0, N, 0)
            extra += by * tl.load(bias_ptr + at * N + column, mask=column < first, other=0.0).to(tl.float32)
    value = tl.sum(total, 1) + extra
    tl.store(out_ptr + row.to(tl.int64) * N + column, value.to(out_ptr.dtype.element_ty), mask=in_n)


_DOWN: Final = Launcher(_down)

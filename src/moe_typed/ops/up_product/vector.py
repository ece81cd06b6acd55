"""The first product of each route by itself: one program for some columns of one route, without matrix instructions."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..activation.spec import GROUP, Gate, Split
from ..product_plans.fit import require_rows, require_weights
from ..product_plans.spec import Tile
from .triton import gated

_GROUP = tl.constexpr(GROUP)


def up_product(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    topk_ids: Tensor,
    live: Tensor | None,
    split: Split,
    gate: Gate,
    out_dtype: torch.dtype,
    tile: Tile,
) -> Tensor:
    """Return (routes, inter): the activated row of each route; see triton.up_product. For fp8, 2 * ``tile.columns`` divide 128."""
    require_rows(rows, rows_scale, weights)
    require_weights(weights, weights_scale, bias)
    out = rows.new_empty((topk_ids.numel(), weights.shape[1] // 2), dtype=out_dtype)
    _launch(rows, rows_scale, weights, weights_scale, bias, topk_ids, live, *split, *gate, list(tile), out)
    return out


@custom_op("up_product_vector", writes=("out",))
def _launch(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    topk_ids: Tensor,
    live: Tensor | None,
    gate: int,
    up: int,
    step: int,
    alpha: float,
    limit: float,
    shift: float,
    tile: list[int],
    out: Tensor,
) -> None:
    _, block_n, block_k, warps, stages, _ = tile
    routes, inter = out.shape
    if not routes:
        return
    constants = {
        "TOP_K": topk_ids.shape[1],
        "EXPERTS": weights.shape[0],
        "K": weights.shape[2],
        "INTER": inter,
        "ROW_STRIDE": rows.stride(0),
        "COLUMN_STRIDE": rows.stride(1),
        "GATE": gate,
        "UP": up,
        "STEP": step,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "STAGES": stages,
    }
    tensors = (rows, rows_scale, weights, weights_scale, bias, topk_ids, live, out)
    _UP(routes * triton.cdiv(inter, block_n), tensors, (alpha, limit, shift), constants, num_warps=warps, num_stages=stages)


@triton.jit(do_not_specialize=["alpha", "limit", "shift"])
def _up(
    rows_ptr: tl.tensor,
    rows_scale_ptr: tl.tensor,  # None where weights_scale_ptr is
    weights_ptr: tl.tensor,
    weights_scale_ptr: tl.tensor | None,
    bias_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    shift: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    INTER: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    TILES: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    EVEN: tl.constexpr = INTER % BLOCK_N == 0 and K % BLOCK_K == 0
    route = tl.program_id(0) // TILES
    tile = tl.program_id(0) % TILES
    expert = tl.load(ids_ptr + route)
    if live_ptr is not None:
        expert = tl.where(route // TOP_K < tl.load(live_ptr), expert, -1)
    if (expert < 0) | (expert >= EXPERTS):
        return
    expert = expert.to(tl.int64)
    x = rows_ptr + (route // TOP_K).to(tl.int64) * ROW_STRIDE
    matrix = weights_ptr + expert * (2 * INTER * K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = column < INTER
    depth = tl.arange(0, BLOCK_K)
    b_gate = matrix + (GATE + STEP * column)[:, None] * K + depth[None, :]
    b_up = matrix + (UP + STEP * column)[:, None] * K + depth[None, :]
    gate = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        in_k = depth < K - start
        a = tl.load(x + (start + depth) * COLUMN_STRIDE, mask=in_k, other=0.0).to(tl.float32)
        if EVEN:
            wg = tl.load(b_gate + start)
            wu = tl.load(b_up + start)
        else:
            mask = in_n[:, None] & in_k[None, :]
            wg = tl.load(b_gate + start, mask=mask, other=0.0)
            wu = tl.load(b_up + start, mask=mask, other=0.0)
        if weights_scale_ptr is not None:
            GROUPS: tl.constexpr = K // _GROUP
            group = (start + depth) // _GROUP
            a = a * tl.load(rows_scale_ptr + (route // TOP_K).to(tl.int64) * GROUPS + group, mask=in_k, other=0.0)
            scales = weights_scale_ptr + expert * (2 * INTER // _GROUP * GROUPS)
            if STEP == 1:
                ag = a * tl.load(scales + (GATE + tile * BLOCK_N) // _GROUP * GROUPS + group, mask=in_k, other=0.0)
                au = a * tl.load(scales + (UP + tile * BLOCK_N) // _GROUP * GROUPS + group, mask=in_k, other=0.0)
            else:
                ag = a * tl.load(scales + (STEP * tile * BLOCK_N) // _GROUP * GROUPS + group, mask=in_k, other=0.0)
                au = ag
            gate += wg.to(tl.float32) * ag[None, :]
            up += wu.to(tl.float32) * au[None, :]
        else:
            gate += wg.to(tl.float32) * a[None, :]
            up += wu.to(tl.float32) * a[None, :]
    g = tl.sum(gate, 1)
    u = tl.sum(up, 1)
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * INTER)
        g += tl.load(biases + GATE + STEP * column, mask=in_n, other=0.0).to(tl.float32)
        u += tl.load(biases + UP + STEP * column, mask=in_n, other=0.0).to(tl.float32)
    tl.store(out_ptr + route.to(tl.int64) * INTER + column, gated(g, u, alpha, limit, shift).to(out_ptr.dtype.element_ty), mask=in_n)


_UP: Final = Launcher(_up)

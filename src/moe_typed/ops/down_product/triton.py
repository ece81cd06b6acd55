"""The second product by tiles: each row goes to the place of its route."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..activation.spec import GROUP
from ..align.blocks import routes_of, swizzle
from ..product_plans.fit import require_weights
from ..product_plans.spec import Tile

_GROUP = tl.constexpr(GROUP)


def down_product(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor | None,
    live: Tensor | None,
    routes: int,
    top_k: int,
    out_dtype: torch.dtype,
    tile: Tile,
    route_weights: Tensor | None = None,
) -> Tensor:
    """Return (routes, N): route slots[s] holds row s times the weights of its expert, plus the bias. Dropped routes hold anything.

    ``slots``, ``block_expert`` and ``live`` as up_product has them; without ``block_expert`` row s is that of route s. Rows for fp8 weights are
    fp8 with scales (K / 128, slots), or not quantised. ``route_weights``: float32 (routes,), by which each is multiplied before it is rounded.
    """
    require_weights(weights, weights_scale, bias)
    out = rows.new_empty((routes, weights.shape[1]), dtype=out_dtype)
    _launch(rows, rows_scale, weights, weights_scale, bias, slots, block_expert, live, top_k, list(tile), route_weights, out)
    return out


@custom_op("down_product", writes=("out",))
def _launch(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor | None,
    live: Tensor | None,
    top_k: int,
    tile: list[int],
    route_weights: Tensor | None,
    out: Tensor,
) -> None:
    block_m, block_n, block_k, warps, stages, group = tile
    routes, columns = out.shape
    if not routes:
        return
    blocks = routes if block_expert is None else block_expert.shape[0]
    constants = {
        "ROUTES": triton.next_power_of_2(routes) if block_expert is None else 0,
        "TOP_K": top_k,
        "EXPERTS": weights.shape[0],
        "N": columns,
        "K": weights.shape[2],
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": group,
        "STAGES": stages,
    }
    tensors = (rows, rows_scale, weights, weights_scale, bias, slots, block_expert, live, route_weights, out)
    _DOWN(blocks * triton.cdiv(columns, block_n), tensors, (routes, blocks, rows.shape[0]), constants, num_warps=warps, num_stages=stages)


@triton.jit(do_not_specialize=["routes", "blocks", "height"])
def _down(
    rows_ptr: tl.tensor,
    rows_scale_ptr: tl.tensor | None,
    weights_ptr: tl.tensor,
    weights_scale_ptr: tl.tensor | None,
    bias_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor | None,
    live_ptr: tl.tensor | None,
    by_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    routes: tl.tensor,
    blocks: tl.tensor,
    height: tl.tensor,
    ROUTES: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    EVEN: tl.constexpr = N % BLOCK_N == 0 and K % BLOCK_K == 0
    SPARSE: tl.constexpr = BLOCK_M <= 32
    block, tile = swizzle(tl.program_id(0), blocks, TILES, GROUP_M)
    expert, route = routes_of(slots_ptr, block_expert_ptr, live_ptr, block, routes, TOP_K, EXPERTS, BLOCK_M, ROUTES)
    if expert < 0:
        return
    expert = expert.to(tl.int64)
    is_route = route < routes
    source = tl.where(is_route, route, block).to(tl.int64)  # a row that is written: that of the block's first route
    if block_expert_ptr is not None:
        source = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = column < N
    a = rows_ptr + source[:, None] * K + depth[None, :]
    b = weights_ptr + expert * (N * K) + column[None, :] * K + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if weights_scale_ptr is not None:
        GROUPS: tl.constexpr = K // _GROUP
        scales = weights_scale_ptr + expert * (N // _GROUP * GROUPS)
        for start in tl.range(0, GROUPS, num_stages=STAGES):
            a_tile = tl.load(a, mask=is_route[:, None], other=0.0) if SPARSE else tl.load(a)
            if BLOCK_N <= _GROUP:
                b_by = tl.load(scales + tile * BLOCK_N // _GROUP * GROUPS + start)
            else:
                b_by = tl.load(scales + column // _GROUP * GROUPS + start)[None, :]
            if rows_scale_ptr is None:  # rows that are not quantised
                acc += tl.dot(a_tile, tl.load(b).to(rows_ptr.dtype.element_ty)) * b_by
            else:
                a_by = tl.load(rows_scale_ptr + start * height.to(tl.int64) + source)
                if BLOCK_N <= _GROUP:
                    acc += tl.dot(a_tile, tl.load(b)) * (a_by * b_by)[:, None]
                else:
                    acc += tl.dot(a_tile, tl.load(b)) * a_by[:, None] * b_by
            a += BLOCK_K
            b += BLOCK_K
    else:
        for first in range(0, K, BLOCK_K):
            in_k = depth < K - first
            a_tile = tl.load(a, mask=is_route[:, None] & in_k[None, :], other=0.0) if SPARSE or not EVEN else tl.load(a)
            b_tile = tl.load(b) if EVEN else tl.load(b, mask=in_k[:, None] & in_n[None, :], other=0.0)
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
            a += BLOCK_K
            b += BLOCK_K
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + column, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if by_ptr is not None:
        acc *= tl.load(by_ptr + route, mask=is_route, other=0.0)[:, None]
    out = out_ptr + route.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=is_route[:, None] & in_n[None, :])


_DOWN: Final = Launcher(_down)

"""The first product by tiles: gate and up of the same columns are in one program, which activates them and may quantise them."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..activation.spec import E4M3_MAX, GROUP, Gate, Split
from ..align.blocks import routes_of, swizzle
from ..product_plans.fit import require_rows, require_weights
from ..product_plans.spec import Tile

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_GROUP = tl.constexpr(GROUP)


def up_product(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor | None,
    live: Tensor | None,
    top_k: int,
    split: Split,
    gate: Gate,
    out_dtype: torch.dtype,
    tile: Tile,
) -> tuple[Tensor, Tensor | None]:
    """Return activated rows (slots, inter), and for fp8 with whole groups of columns a tile, float8_e4m3fn with float32 scales (inter / 128, slots).

    With ``block_expert``, ``slots`` and it are as align returns them for blocks of ``tile.rows``; without, ``slots`` is topk_ids, at most ``live``
    rows of it count, and there is a row for each route. ``rows`` may have any strides. Rows of dropped routes hold anything.
    """
    require_rows(rows, rows_scale, weights)
    require_weights(weights, weights_scale, bias)
    count, inter = slots.numel(), weights.shape[1] // 2
    quantises = rows_scale is not None and tile.columns == GROUP
    out = rows.new_empty((count, inter), dtype=torch.float8_e4m3fn if quantises else out_dtype)
    scale = rows.new_empty((inter // GROUP, count), dtype=torch.float32) if quantises else None
    _launch(rows, rows_scale, weights, weights_scale, bias, slots, block_expert, live, top_k, *split, *gate, list(tile), out, scale)
    return out, scale


@custom_op("up_product", writes=("out", "out_scale"))
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
    gate: int,
    up: int,
    step: int,
    alpha: float,
    limit: float,
    shift: float,
    tile: list[int],
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    block_m, block_n, block_k, warps, stages, group = tile
    height, inter = out.shape
    if not height:
        return
    routes = rows.shape[0] * top_k
    blocks = routes if block_expert is None else block_expert.shape[0]
    constants = {
        "ROUTES": triton.next_power_of_2(routes) if block_expert is None else 0,
        "TOP_K": top_k,
        "EXPERTS": weights.shape[0],
        "K": weights.shape[2],
        "INTER": inter,
        "ROW_STRIDE": rows.stride(0),
        "COLUMN_STRIDE": rows.stride(1),
        "GATE": gate,
        "UP": up,
        "STEP": step,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": group,
        "TWO_DOTS": rows_scale is not None,
        "STAGES": stages,
    }
    tensors = (rows, rows_scale, weights, weights_scale, bias, slots, block_expert, live, out, out_scale)
    scalars = (routes, blocks, height, alpha, limit, shift)
    _UP(blocks * triton.cdiv(inter, block_n), tensors, scalars, constants, num_warps=warps, num_stages=stages)


@triton.jit
def gated(gate: tl.tensor, up: tl.tensor, alpha: tl.tensor, limit: tl.tensor, shift: tl.tensor) -> tl.tensor:
    """See activation.spec.Gate. Comparisons instead of tl.minimum, so that NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate * tl.sigmoid(alpha * gate) * (up + shift)


@triton.jit
def e4m3_scale(value: tl.tensor) -> tl.tensor:
    """Return the scale of each row of ``value``, which is one group: amax / 448; 1 where that is 0; NaN where the row has an infinity or NaN."""
    amax = tl.max(tl.where(value == value, tl.abs(value), float("inf")), 1)  # tl.max passes over NaN
    scale = amax / _E4M3_MAX
    return tl.where(scale == 0.0, 1.0, tl.where(amax == float("inf"), float("nan"), scale))


@triton.jit(do_not_specialize=["routes", "blocks", "height", "alpha", "limit", "shift"])
def _up(
    rows_ptr: tl.tensor,
    rows_scale_ptr: tl.tensor | None,
    weights_ptr: tl.tensor,
    weights_scale_ptr: tl.tensor,  # None where rows_scale_ptr is
    bias_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor | None,
    live_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    out_scale_ptr: tl.tensor | None,
    routes: tl.tensor,
    blocks: tl.tensor,
    height: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    shift: tl.tensor,
    ROUTES: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    INTER: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    COLUMN_STRIDE: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    TWO_DOTS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    TILES: tl.constexpr = (INTER + BLOCK_N - 1) // BLOCK_N
    IN_N: tl.constexpr = INTER % BLOCK_N == 0
    IN_K: tl.constexpr = K % BLOCK_K == 0
    SPARSE: tl.constexpr = BLOCK_M <= 32  # few of its rows are routes: the others are not worth reading
    block, tile = swizzle(tl.program_id(0), blocks, TILES, GROUP_M)
    expert, route = routes_of(slots_ptr, block_expert_ptr, live_ptr, block, routes, TOP_K, EXPERTS, BLOCK_M, ROUTES)
    if expert < 0:
        return
    expert = expert.to(tl.int64)  # before any product: what is behind it passes 2^31
    is_route = route < routes
    source = tl.where(is_route, route // TOP_K, 0).to(tl.int64)
    target = route.to(tl.int64)
    if block_expert_ptr is not None:
        target = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    a = rows_ptr + source[:, None] * ROW_STRIDE + depth[None, :] * COLUMN_STRIDE
    matrix = weights_ptr + expert * (2 * INTER * K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)

    if TWO_DOTS:
        in_n = column < INTER
        b_gate = matrix + (GATE + STEP * column)[None, :] * K + depth[:, None]
        b_up = matrix + (UP + STEP * column)[None, :] * K + depth[:, None]
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if rows_scale_ptr is not None:
            GROUPS: tl.constexpr = K // _GROUP
            scales = weights_scale_ptr + expert * (2 * INTER // _GROUP * GROUPS)
            a_scale = rows_scale_ptr + source * GROUPS
            for start in tl.range(0, GROUPS, num_stages=STAGES):
                a_tile = tl.load(a, mask=is_route[:, None], other=0.0) if SPARSE else tl.load(a)
                a_by = tl.load(a_scale + start, mask=is_route, other=0.0) if SPARSE else tl.load(a_scale + start)
                if STEP == 1:
                    gate_by = tl.load(scales + (GATE + tile * BLOCK_N) // _GROUP * GROUPS + start)
                    up_by = tl.load(scales + (UP + tile * BLOCK_N) // _GROUP * GROUPS + start)
                    gate += tl.dot(a_tile, tl.load(b_gate)) * (a_by * gate_by)[:, None]
                    up += tl.dot(a_tile, tl.load(b_up)) * (a_by * up_by)[:, None]
                else:
                    gate_by = tl.load(scales + (GATE + STEP * column) // _GROUP * GROUPS + start)
                    up_by = tl.load(scales + (UP + STEP * column) // _GROUP * GROUPS + start)
                    gate += tl.dot(a_tile, tl.load(b_gate)) * a_by[:, None] * gate_by[None, :]
                    up += tl.dot(a_tile, tl.load(b_up)) * a_by[:, None] * up_by[None, :]
                a += BLOCK_K * COLUMN_STRIDE
                b_gate += BLOCK_K
                b_up += BLOCK_K
        else:
            for first in range(0, K, BLOCK_K):
                in_k = depth < K - first
                a_tile = tl.load(a, mask=is_route[:, None] & in_k[None, :], other=0.0) if SPARSE or not IN_K else tl.load(a)
                if IN_N and IN_K:
                    gate = tl.dot(a_tile, tl.load(b_gate), gate, input_precision="ieee")
                    up = tl.dot(a_tile, tl.load(b_up), up, input_precision="ieee")
                else:
                    mask = in_k[:, None] & in_n[None, :]
                    gate = tl.dot(a_tile, tl.load(b_gate, mask=mask, other=0.0), gate, input_precision="ieee")
                    up = tl.dot(a_tile, tl.load(b_up, mask=mask, other=0.0), up, input_precision="ieee")
                a += BLOCK_K * COLUMN_STRIDE
                b_gate += BLOCK_K
                b_up += BLOCK_K
    else:
        # Columns of the tile are gate's, then up's, or both in turns, as the weights have them; either way a thread of a wgmma holds both of a pair.
        both = tl.arange(0, 2 * BLOCK_N)
        if STEP == 1:
            of_both = tile * BLOCK_N + both % BLOCK_N
            row = tl.where(both < BLOCK_N, GATE, UP) + of_both
        else:
            of_both = tile * BLOCK_N + both // 2
            row = tile * (2 * BLOCK_N) + both
        in_both = of_both < INTER
        b = matrix + row[None, :] * K + depth[:, None]
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for first in range(0, K, BLOCK_K):
            in_k = depth < K - first
            a_tile = tl.load(a, mask=is_route[:, None] & in_k[None, :], other=0.0) if SPARSE or not IN_K else tl.load(a)
            b_tile = tl.load(b) if IN_N and IN_K else tl.load(b, mask=in_k[:, None] & in_both[None, :], other=0.0)
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
            a += BLOCK_K * COLUMN_STRIDE
            b += BLOCK_K
        if STEP == 1:
            gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N)), (0, 2, 1)))
        else:
            gate, up = tl.split(tl.reshape(acc, (BLOCK_M, BLOCK_N, 2)))

    in_n = column < INTER
    if bias_ptr is not None:
        biases = bias_ptr + expert * (2 * INTER)
        gate += tl.load(biases + GATE + STEP * column, mask=in_n, other=0.0).to(tl.float32)[None, :]
        up += tl.load(biases + UP + STEP * column, mask=in_n, other=0.0).to(tl.float32)[None, :]
    value = gated(gate, up, alpha, limit, shift)
    if out_scale_ptr is not None:
        by = e4m3_scale(value)  # BLOCK_N is one group; there is a row of scales for each group
        by_at = out_scale_ptr + tile * height.to(tl.int64) + target
        if block_expert_ptr is not None:
            tl.store(by_at, by)
        else:
            tl.store(by_at, by, mask=is_route)
        value = value / by[:, None]
    out = out_ptr + target[:, None] * INTER + column[None, :]
    # Padding slots are written too, so that what follows reads no uninitialised memory.
    written = in_n[None, :] if block_expert_ptr is not None else is_route[:, None] & in_n[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=written)


_UP: Final = Launcher(_up)

"""The kernel: a program multiplies a block of one expert's routes with some columns, or with some pairs of columns, and activates what comes out."""

import triton
import triton.language as tl

from ..align.blocks import routes_of, swizzle
from ..minifloat.triton import decode_e4m3fn
from ..quantize.spec import MX_GROUP
from .activate import activate_one, activate_pair
from .decode import codes_of, load_piece, scale_of, scale_piece

_GROUP = tl.constexpr(MX_GROUP)


@triton.jit
def _add_piece(
    total: tl.tensor,
    a_tile: tl.tensor,
    a_by: tl.tensor | None,
    weights: tl.tensor,
    scales: tl.tensor | None,
    zeros: tl.tensor | None,
    is_route: tl.tensor,
    in_n: tl.tensor,
    start: tl.tensor,
    K: tl.constexpr,
    ROWS_E8M0: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    ROW_SCALE_STEP: tl.constexpr,
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,
    WEIGHT_STEP: tl.constexpr,
    E8M0: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    N_MASKED: tl.constexpr,
    EACH: tl.constexpr,
    IMPRECISE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> tl.tensor:
    """Return the sums with a piece of the depth added. ``weights``, ``scales``, ``zeros`` and ``a_by`` point at where the depth begins."""
    value = codes_of(
        weights, scales, zeros, in_n, start,
        K, CODE, PER_BYTE, WEIGHT_STEP, IN_REGISTERS, GROUP, SCALE_STEP, N_MASKED, a_tile.dtype == tl.bfloat16, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    b_tile = tl.trans(value.to(a_tile.dtype))
    if EACH:
        part = tl.dot(a_tile, b_tile, input_precision="ieee").to(tl.float32)
        if scales is not None and not IN_REGISTERS:
            part *= scale_of(scales + start // GROUP * SCALE_STEP, in_n, E8M0)[None, :]
        if a_by is not None and not ROWS_E8M0:
            part *= tl.load(a_by + start // ROW_GROUP * ROW_SCALE_STEP, mask=is_route, other=0.0)[:, None]
        total += part
    else:
        total = tl.dot(a_tile, b_tile, total, input_precision="ieee", max_num_imprecise_acc=IMPRECISE, out_dtype=total.dtype)
    return total


@triton.jit
def _finish(
    total: tl.tensor,
    a_by: tl.tensor | None,
    scales: tl.tensor | None,
    bias: tl.tensor | None,
    is_route: tl.tensor,
    in_n: tl.tensor,
    ROWS_E8M0: tl.constexpr,
    E8M0: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    EACH: tl.constexpr,
) -> tl.tensor:
    """Return sums times the scales that are for the whole depth, plus the bias."""
    value = total.to(tl.float32)
    if scales is not None and not IN_REGISTERS and not EACH:
        value *= scale_of(scales, in_n, E8M0)[None, :]
    if a_by is not None and not ROWS_E8M0 and not EACH:
        value *= tl.load(a_by, mask=is_route, other=0.0)[:, None]
    if bias is not None:
        value += tl.load(bias, mask=in_n, other=0.0).to(tl.float32)[None, :]
    return value


@triton.jit(do_not_specialize=["routes", "blocks", "alpha", "limit", "shift"])
def multiply(
    rows_ptr: tl.tensor,
    rows_scale_ptr: tl.tensor | None,
    weights_ptr: tl.tensor,
    scale_ptr: tl.tensor | None,
    zero_ptr: tl.tensor | None,
    bias_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor | None,
    live_ptr: tl.tensor | None,
    by_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    routes: tl.tensor,
    blocks: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    shift: tl.tensor,
    TOP_K: tl.constexpr,
    PICKS: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTES: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ROWS_E8M0: tl.constexpr,
    ROW_GROUP: tl.constexpr,
    ROW_SCALE_STRIDE: tl.constexpr,
    ROW_SCALE_STEP: tl.constexpr,
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    WEIGHT_STEP: tl.constexpr,
    E8M0: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_EXPERT: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    PAIRED: tl.constexpr,
    GATE: tl.constexpr,
    UP: tl.constexpr,
    STEP: tl.constexpr,
    FORMULA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
) -> None:
    """Multiply; see triton.product. E8m0 scales are bytes, and so is e4m3 in Triton's interpreter."""
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    N_MASKED: tl.constexpr = N % BLOCK_N != 0
    # Whether sums are scaled after each group, and not once at the end.
    EACH: tl.constexpr = (GROUP < K and not IN_REGISTERS) or (ROW_GROUP < K and not ROWS_E8M0)
    INTEGER: tl.constexpr = rows_ptr.dtype.element_ty == tl.int8
    IMPRECISE: tl.constexpr = BLOCK_K if rows_ptr.dtype.element_ty == tl.float8e4nv else 0  # what wgmma sums of fp8 by itself has few bits
    block, tile = swizzle(tl.program_id(0), blocks, TILES, GROUP_M)
    expert, route = routes_of(slots_ptr, block_expert_ptr, live_ptr, block, routes, PICKS, EXPERTS, BLOCK_M, ROUTES)
    if expert < 0:
        return
    expert = expert.to(tl.int64)  # before any product: what is behind it passes 2^31
    is_route = route < routes
    source = tl.where(is_route, route // TOP_K, 0).to(tl.int64)
    depth = tl.arange(0, BLOCK_K)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = column < N
    of_gate = (GATE + STEP * column).to(tl.int64)
    of_up = (UP + STEP * column).to(tl.int64)

    a = rows_ptr + source[:, None] * ROW_STRIDE + depth[None, :]
    a_by = None if rows_scale_ptr is None else rows_scale_ptr + source * ROW_SCALE_STRIDE
    matrix = weights_ptr + expert * EXPERT_STRIDE
    b_gate = matrix + of_gate[:, None] * WEIGHT_STRIDE
    b_up = matrix + of_up[:, None] * WEIGHT_STRIDE
    gate_at = expert * SCALE_EXPERT + of_gate // SCALE_ROWS * SCALE_STRIDE
    up_at = expert * SCALE_EXPERT + of_up // SCALE_ROWS * SCALE_STRIDE
    gate_by = None if scale_ptr is None else scale_ptr + gate_at
    up_by = None if scale_ptr is None else scale_ptr + up_at
    gate_zero = None if zero_ptr is None else zero_ptr + gate_at
    up_zero = None if zero_ptr is None else zero_ptr + up_at
    biases = expert * (2 * N if PAIRED else N)
    gate_bias = None if bias_ptr is None else bias_ptr + biases + of_gate
    up_bias = None if bias_ptr is None else bias_ptr + biases + of_up

    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGER and not EACH else tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if INTEGER and not EACH else tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        a_tile = load_piece(a + start, is_route, depth < K - start, True, K % BLOCK_K != 0)
        if a_tile.dtype == tl.uint8:
            a_tile = decode_e4m3fn(a_tile)
        if ROWS_E8M0 and a_by is not None:
            group = tl.arange(0, BLOCK_K // _GROUP)
            at = a_by[:, None] + (group + start // _GROUP)[None, :] * ROW_SCALE_STEP
            a_tile = scale_piece(a_tile, at, is_route, group < (K - start) // _GROUP, BLOCK_M, BLOCK_K)
            if rows_ptr.dtype.element_ty != tl.uint8:
                a_tile = a_tile.to(tl.bfloat16)  # e4m3 times a power of two: nothing is lost
        gate = _add_piece(
            gate, a_tile, a_by, b_gate, gate_by, gate_zero, is_route, in_n, start,
            K, ROWS_E8M0, ROW_GROUP, ROW_SCALE_STEP, CODE, PER_BYTE, WEIGHT_STEP, E8M0, IN_REGISTERS, GROUP, SCALE_STEP,
            N_MASKED, EACH, IMPRECISE, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if PAIRED:
            up = _add_piece(
                up, a_tile, a_by, b_up, up_by, up_zero, is_route, in_n, start,
                K, ROWS_E8M0, ROW_GROUP, ROW_SCALE_STEP, CODE, PER_BYTE, WEIGHT_STEP, E8M0, IN_REGISTERS, GROUP, SCALE_STEP,
                N_MASKED, EACH, IMPRECISE, BLOCK_N, BLOCK_K,
            )  # fmt: skip

    gate = _finish(gate, a_by, gate_by, gate_bias, is_route, in_n, ROWS_E8M0, E8M0, IN_REGISTERS, EACH)
    if PAIRED:
        up = _finish(up, a_by, up_by, up_bias, is_route, in_n, ROWS_E8M0, E8M0, IN_REGISTERS, EACH)
        value = activate_pair(gate, up, alpha, limit, shift, FORMULA)
    else:
        value = activate_one(gate, FORMULA)
    if by_ptr is not None:
        value *= tl.load(by_ptr + route, mask=is_route, other=0.0)[:, None]
    out = out_ptr + route.to(tl.int64)[:, None] * N + column[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=is_route[:, None] & in_n[None, :])

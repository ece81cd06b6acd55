"""The warpgroups of the wide kernel that multiply.

Where a tile has 128 rows, each multiplies 64 of them by all columns. Where it has 64, they share them: each takes half of the columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..activation.spec import GROUP
from .finish import activate, place
from .multiply import narrow, narrow_scaled, whole, whole_overlapped, whole_scaled
from .schedule import locate, share

_GROUP = gl.constexpr(GROUP)


@gluon.jit
def _row_scales(
    rows_scale_ptr: gl.tensor,
    slots_ptr: gl.tensor,
    begin: gl.tensor,
    routes: gl.tensor,
    padded: gl.tensor,
    UP: gl.constexpr,
    TOP_K: gl.constexpr,
    GROUPS: gl.constexpr,
    LAYOUT: gl.constexpr,
) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return where the scales of 64 rows are, how far the next step's are, and zeros of which the compiler does not know that they are.

    For a scale that is the same for all threads, it would use a uniform register, and wait right behind the load.
    """
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    route = gl.load(slots_ptr + begin + row)
    if UP:
        at = rows_scale_ptr + gl.where(route < routes, route // TOP_K, 0).to(gl.int64) * GROUPS
        stride = gl.to_tensor(1)
    else:
        at = rows_scale_ptr + begin + row
        stride = padded
    return at, stride, gl.minimum(route, 0)


@gluon.jit
def consume(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    amax_bufs: gl.tensor,
    told: gl.tensor,
    heard: gl.tensor,
    rows_scale_ptr: gl.tensor,  # None but for fp8
    weights_scale_ptr: gl.tensor,  # None but for fp8
    bias_ptr: gl.tensor | None,
    slots_ptr: gl.tensor,
    block_expert_ptr: gl.tensor,
    by_ptr: gl.tensor | None,
    out_ptr: gl.tensor,
    out_scale_ptr: gl.tensor | None,
    routes: gl.tensor,
    used: gl.tensor,
    padded: gl.tensor,
    group: gl.tensor,
    alpha: gl.tensor,
    limit: gl.tensor,
    shift: gl.tensor,
    W: gl.constexpr,
    UP: gl.constexpr,
    FP8: gl.constexpr,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    GATE: gl.constexpr,
    BESIDE: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Multiply the tiles of a program in turn; ``W``: 0 for the first 64 rows of a block, 1 for the others."""
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    HALF: gl.constexpr = 128  # columns: of gate, and of up
    QUARTER: gl.constexpr = HALF // 2
    GROUPS: gl.constexpr = K // _GROUP
    GROUPS_OF_EXPERT: gl.constexpr = (2 * N if UP else N) // _GROUP * GROUPS
    APART: gl.constexpr = ((BESIDE - GATE) // _GROUP if UP else 1) * GROUPS  # from the left half's scales to the right's
    of_all: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF if UP else QUARTER, 32])
    of_half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUARTER, 32])
    count, rounds, halved = share(used, TILES)
    position = gl.program_id(0)
    it = gl.to_tensor(0)
    shared = gl.to_tensor(0)  # tiles so far
    for turn in range(count):
        block, tile, half, position = locate(gl.to_tensor(turn), position, rounds, halved, used, group, TILES)
        expert = gl.load(block_expert_ptr + block).to(gl.int64)
        both = gl.load(slots_ptr + block * 128 + 64) < routes
        row = GATE // _GROUP + tile if UP else tile * 2  # of the scales
        if both & (half < 0):
            begin = block * 128 + W * 64
            if FP8:
                a_scale, a_stride, zero = _row_scales(rows_scale_ptr, slots_ptr, begin, routes, padded, UP, TOP_K, GROUPS, of_all)
                b_scale = weights_scale_ptr + expert * GROUPS_OF_EXPERT + row * GROUPS + zero
                if UP:
                    left, right = whole_scaled(a_bufs, b_bufs, full, empty, it, a_scale, b_scale, APART, W, STEPS, STAGES)
                else:
                    left, right = whole_overlapped(a_bufs, b_bufs, full, empty, it, a_scale, a_stride, b_scale, APART, W, STEPS, STAGES)
            else:
                left, right = whole(a_bufs, b_bufs, full, empty, it, W, UP, STEP, STEPS, STAGES)
            if UP:
                activate(
                    left,
                    right,
                    bias_ptr,
                    out_ptr,
                    out_scale_ptr,
                    None,
                    None,
                    None,
                    shared,
                    begin,
                    tile,
                    tile * BLOCK_N,
                    expert,
                    padded,
                    alpha,
                    limit,
                    shift,
                    W,
                    N,
                    GATE,
                    BESIDE,
                    STEP,
                    BLOCK_N,
                )
            else:
                place(left, right, bias_ptr, slots_ptr, by_ptr, out_ptr, begin, tile * BLOCK_N, expert, routes, N, HALF)
            it += STEPS
        elif both | (half < 1):
            begin = block * 128 + gl.where(half > 0, 64, 0)
            # Gate and up that come in turns lie in neighbouring quarters.
            one: gl.constexpr = 2 * W if STEP == 2 else W
            other: gl.constexpr = one + 1 if STEP == 2 else W + 2
            column = tile * BLOCK_N + W * QUARTER
            if FP8:
                a_scale, a_stride, zero = _row_scales(rows_scale_ptr, slots_ptr, begin, routes, padded, UP, TOP_K, GROUPS, of_half)
                b_scale = weights_scale_ptr + expert * GROUPS_OF_EXPERT + row * GROUPS + zero
                left, right = narrow_scaled(a_bufs, b_bufs, full, empty, it, one, other, a_scale, a_stride, b_scale, APART, UP, STEPS, STAGES)
            else:
                left, right = narrow(a_bufs, b_bufs, full, empty, it, one, other, UP, STEP, STEPS, STAGES)
            if UP:
                activate(
                    left,
                    right,
                    bias_ptr,
                    out_ptr,
                    out_scale_ptr,
                    amax_bufs,
                    told,
                    heard,
                    shared,
                    begin,
                    tile,
                    column,
                    expert,
                    padded,
                    alpha,
                    limit,
                    shift,
                    W,
                    N,
                    GATE,
                    BESIDE,
                    STEP,
                    BLOCK_N,
                )
                shared += 1
            else:
                place(left, right, bias_ptr, slots_ptr, by_ptr, out_ptr, begin, column, expert, routes, N, HALF)
            it += STEPS

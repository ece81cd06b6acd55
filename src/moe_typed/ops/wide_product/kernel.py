"""Both products by one persistent kernel, in which warps have different work.

A block has 128 rows, and a tile of weights 256 columns (gate and up: 128 of each). Two warpgroups multiply (consume.py) what a third brings to
shared memory, up to four steps ahead (produce.py). Which tiles a program makes, and in which order, says schedule.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .consume import consume
from .produce import produce


@gluon.jit(do_not_specialize=["routes", "blocks", "group", "alpha", "limit", "shift"])
def wide(
    a_desc: gl.tensor,  # None for the first product
    rows_ptr: gl.tensor,  # None for the second
    rows_scale_ptr: gl.tensor,  # None but for fp8
    b_desc: gl.tensor,
    weights_scale_ptr: gl.tensor,  # None but for fp8
    bias_ptr: gl.tensor | None,
    slots_ptr: gl.tensor,
    block_expert_ptr: gl.tensor,
    by_ptr: gl.tensor | None,  # router weights, where the second product multiplies by them
    out_ptr: gl.tensor,
    out_scale_ptr: gl.tensor | None,
    routes: gl.tensor,
    blocks: gl.tensor,
    group: gl.tensor,
    alpha: gl.tensor,
    limit: gl.tensor,
    shift: gl.tensor,
    UP: gl.constexpr,
    FP8: gl.constexpr,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    ROW_STRIDE: gl.constexpr,
    GATE: gl.constexpr,
    BESIDE: gl.constexpr,
    STEP: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    MULTIPLYING: gl.constexpr,
    COPYING: gl.constexpr,
) -> None:
    """See this file's head. The descriptors are of pieces that the copy engine brings; see .._hopper.pieces."""
    WIDE: gl.constexpr = 2 * BLOCK_N if UP else BLOCK_N
    a_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8 if FP8 else 16, 2)
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, BLOCK_K], a_layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, WIDE, BLOCK_K], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(0, STAGES):
        mbarrier.init(full.index(i), count=129 if UP else 1)
        mbarrier.init(empty.index(i), count=2)
    # What the multiplying warpgroups tell each other where they share 64 rows of the first product.
    amax_bufs = gl.allocate_shared_memory(gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(0, 2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=1)
    counted: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    used = gl.to_tensor(0)
    for start in range(0, blocks, 2048):
        at = start + gl.arange(0, 2048, counted)
        used += gl.sum((gl.load(block_expert_ptr + at, mask=at < blocks, other=-1) >= 0).to(gl.int32), 0)
    padded = blocks * 128
    gl.warp_specialize(
        [
            (
                consume,
                (
                    a_bufs,
                    b_bufs,
                    full,
                    empty,
                    amax_bufs,
                    told,
                    heard,
                    rows_scale_ptr,
                    weights_scale_ptr,
                    bias_ptr,
                    slots_ptr,
                    block_expert_ptr,
                    by_ptr,
                    out_ptr,
                    out_scale_ptr,
                    routes,
                    used,
                    padded,
                    group,
                    alpha,
                    limit,
                    shift,
                    0,
                    UP,
                    FP8,
                    TOP_K,
                    N,
                    K,
                    GATE,
                    BESIDE,
                    STEP,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (
                consume,
                (
                    a_bufs,
                    b_bufs,
                    full,
                    empty,
                    amax_bufs,
                    told,
                    heard,
                    rows_scale_ptr,
                    weights_scale_ptr,
                    bias_ptr,
                    slots_ptr,
                    block_expert_ptr,
                    by_ptr,
                    out_ptr,
                    out_scale_ptr,
                    routes,
                    used,
                    padded,
                    group,
                    alpha,
                    limit,
                    shift,
                    1,
                    UP,
                    FP8,
                    TOP_K,
                    N,
                    K,
                    GATE,
                    BESIDE,
                    STEP,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
            (
                produce,
                (
                    a_bufs,
                    b_bufs,
                    full,
                    empty,
                    a_desc,
                    rows_ptr,
                    b_desc,
                    slots_ptr,
                    block_expert_ptr,
                    routes,
                    used,
                    group,
                    UP,
                    FP8,
                    TOP_K,
                    N,
                    K,
                    ROW_STRIDE,
                    GATE,
                    BESIDE,
                    STEP,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                ),
            ),
        ],
        [4, 4],
        [MULTIPLYING, COPYING],
    )

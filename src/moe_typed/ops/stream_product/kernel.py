"""Both products in one launch for few rows an expert: the time is that of reading the weights, which this kernel never stops to do.

A program takes pieces of the first product (64 pairs of gate and up of a block of rows), then of the second (128 columns), each as long as the depth.
One warp brings their weights to shared memory, as many steps of 128 bytes ahead as there is room for, across pieces and from the first product into
the second. A warpgroup brings rows, and for fp8 scales; before rows of the second product it waits until all pieces of the block's first product are
there, which is counted in memory. All programs run at once, so that none waits for one that has not begun. A warpgroup multiplies: weights are on the
side of 64 rows of the matrix instruction, and rows of the payload on that of 8 or more.

For fp8, each step along the depth is one group of scales: its product is added, scaled, to what is in registers. Rows between the products are
quantised for each 64 channels, which are what a program has. The second product has two columns for each row: half of the channels of a step are
zeros in the one, the other half in the other, and so each has its own scale.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .bring import HALF, bring_rows, bring_weights
from .multiply import multiply


@gluon.jit(do_not_specialize=["routes", "blocks", "experts", "alpha", "limit", "shift"])
def stream(
    rows_ptr: gl.tensor,
    rows_scale_ptr: gl.tensor,  # None but for fp8
    up_desc: gl.tensor,
    up_scale_ptr: gl.tensor,  # None but for fp8
    up_bias_ptr: gl.tensor | None,
    down_desc: gl.tensor,
    down_scale_ptr: gl.tensor,  # None but for fp8
    down_bias_ptr: gl.tensor | None,
    slots_ptr: gl.tensor,
    block_expert_ptr: gl.tensor,
    done_ptr: gl.tensor,
    inner_ptr: gl.tensor,
    inner_scale_ptr: gl.tensor,  # None but for fp8
    results_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    router_ptr: gl.tensor,
    live_ptr: gl.tensor | None,
    out_ptr: gl.tensor,
    routes: gl.tensor,
    blocks: gl.tensor,
    experts: gl.tensor,
    alpha: gl.tensor,
    limit: gl.tensor,
    shift: gl.tensor,
    FP8: gl.constexpr,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    INTER: gl.constexpr,
    ROW_STRIDE: gl.constexpr,
    GATE: gl.constexpr,
    BESIDE: gl.constexpr,
    ROWS: gl.constexpr,
    SPAN: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    DIRECT: gl.constexpr,
    SUMS: gl.constexpr,
    BRINGING: gl.constexpr,
) -> None:
    """See this file's head. The descriptors are of pieces of 64 rows and 128 bytes."""
    DEPTH: gl.constexpr = 128 if FP8 else 64
    COLUMNS: gl.constexpr = 2 * ROWS if FP8 else ROWS
    tiled: gl.constexpr = gl.NVMMASharedLayout(128, 8 if FP8 else 16, 2)
    w_bufs = gl.allocate_shared_memory(up_desc.dtype, [STAGES, 2 * HALF, DEPTH], tiled)
    x_bufs = gl.allocate_shared_memory(up_desc.dtype, [STAGES, COLUMNS, DEPTH], tiled)
    s_bufs = x_bufs  # without scales nobody looks at it
    if FP8:
        s_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(0, STAGES):
        mbarrier.init(full.index(i), count=129)  # the warpgroup that brings rows, and one for the weights
        mbarrier.init(empty.index(i), count=1)
    counted: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    used = gl.to_tensor(0)
    for start in range(0, blocks, 512):
        at = start + gl.arange(0, 512, counted)
        used += gl.sum((gl.load(block_expert_ptr + at, mask=at < blocks, other=-1) >= 0).to(gl.int32), 0)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    w_bufs,
                    x_bufs,
                    s_bufs,
                    full,
                    empty,
                    up_bias_ptr,
                    down_bias_ptr,
                    inner_ptr,
                    inner_scale_ptr,
                    results_ptr,
                    out_ptr,
                    slots_ptr,
                    block_expert_ptr,
                    done_ptr,
                    ids_ptr,
                    router_ptr,
                    live_ptr,
                    routes,
                    experts,
                    used,
                    alpha,
                    limit,
                    shift,
                    FP8,
                    TOP_K,
                    N,
                    INTER,
                    GATE,
                    BESIDE,
                    ROWS,
                    SPAN,
                    DEPTH,
                    STAGES,
                    SLOTS,
                    DIRECT,
                    SUMS,
                ),
            ),
            (
                bring_rows,
                (
                    x_bufs,
                    s_bufs,
                    full,
                    empty,
                    rows_ptr,
                    rows_scale_ptr,
                    inner_ptr,
                    inner_scale_ptr,
                    up_scale_ptr,
                    down_scale_ptr,
                    slots_ptr,
                    block_expert_ptr,
                    done_ptr,
                    routes,
                    used,
                    FP8,
                    TOP_K,
                    N,
                    INTER,
                    ROW_STRIDE,
                    GATE,
                    BESIDE,
                    ROWS,
                    SPAN,
                    DEPTH,
                    STAGES,
                ),
            ),
            (
                bring_weights,
                (w_bufs, full, empty, up_desc, down_desc, block_expert_ptr, used, N, INTER, GATE, BESIDE, SPAN, DEPTH, STAGES),
            ),
        ],
        [4, 1],
        [BRINGING, 40],
    )

"""Both products by one persistent kernel, in which warps have different work.

A block has 128 rows. Two warpgroups multiply 64 of them each, by one tile of weights of 256 columns (gate and up: 128 of each); the second has
nothing to do where its rows are padding. A third warpgroup brings tiles to shared memory, up to four steps ahead: weights, and rows that lie in the
order of the slots, by the copy engine; rows of the payload, which it gathers by route, by asynchronous copies.

For fp8, each step along the depth is one group of scales: its product is added, scaled, to what is in registers. Scales are loaded two steps ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..activation.spec import E4M3_MAX, GROUP

_E4M3_MAX = gl.constexpr(E4M3_MAX)
_GROUP = gl.constexpr(GROUP)


@gluon.jit
def _swizzle(program: gl.tensor, blocks: gl.tensor, group: gl.tensor, TILES: gl.constexpr) -> tuple[gl.tensor, gl.tensor]:
    first = program // (group * TILES) * group
    size = gl.minimum(blocks - first, group)
    place = program % (group * TILES)
    return first + place % size, place // size


@gluon.jit
def _produce(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    a_desc: gl.tensor,  # None for the first product
    rows_ptr: gl.tensor,  # None for the second
    b_desc: gl.tensor,
    slots_ptr: gl.tensor,
    block_expert_ptr: gl.tensor,
    routes: gl.tensor,
    used: gl.tensor,
    group: gl.tensor,
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
) -> None:
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    B_BYTES: gl.constexpr = (2 * BLOCK_N if UP else BLOCK_N) * BLOCK_K * (1 if FP8 else 2)
    A_BYTES: gl.constexpr = 0 if UP else 64 * BLOCK_K * (1 if FP8 else 2)
    VEC: gl.constexpr = 16 if FP8 else 8
    copied: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // BLOCK_K, BLOCK_K // VEC], [4, 1], [1, 0])
    it = 0
    for t in range(gl.program_id(0), used * TILES, gl.num_programs(0)):
        block, tile = _swizzle(gl.to_tensor(t), used, group, TILES)
        expert = gl.load(block_expert_ptr + block)
        both = gl.load(slots_ptr + block * 128 + 64) < routes
        p0 = rows_ptr
        p1 = rows_ptr
        if UP:
            row = gl.arange(0, 64, gl.SliceLayout(1, copied))
            depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))
            r0 = gl.load(slots_ptr + block * 128 + row)
            r1 = gl.load(slots_ptr + block * 128 + 64 + row)
            s0 = gl.where(r0 < routes, r0 // TOP_K, 0).to(gl.int64)
            s1 = gl.where(r1 < routes, r1 // TOP_K, 0).to(gl.int64)
            p0 = rows_ptr + s0[:, None] * ROW_STRIDE + depth[None, :]
            p1 = rows_ptr + s1[:, None] * ROW_STRIDE + depth[None, :]
        for k in range(STEPS):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            ready = full.index(s)
            if both:
                mbarrier.expect(ready, B_BYTES + 2 * A_BYTES)
            else:
                mbarrier.expect(ready, B_BYTES + A_BYTES)
            b = b_bufs.index(s)
            if UP and STEP == 1:
                tma.async_copy_global_to_shared(b_desc, [expert * (2 * N) + GATE + tile * BLOCK_N, k * BLOCK_K], ready, b.slice(0, BLOCK_N))
                tma.async_copy_global_to_shared(b_desc, [expert * (2 * N) + BESIDE + tile * BLOCK_N, k * BLOCK_K], ready, b.slice(BLOCK_N, BLOCK_N))
            elif UP:
                tma.async_copy_global_to_shared(b_desc, [expert * (2 * N) + tile * (2 * BLOCK_N), k * BLOCK_K], ready, b)
            else:
                tma.async_copy_global_to_shared(b_desc, [expert * N + tile * BLOCK_N, k * BLOCK_K], ready, b)
            if UP:
                async_copy.async_copy_global_to_shared(a_bufs.index(2 * s), p0)
                if both:
                    async_copy.async_copy_global_to_shared(a_bufs.index(2 * s + 1), p1)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                p0 += BLOCK_K
                p1 += BLOCK_K
            else:
                tma.async_copy_global_to_shared(a_desc, [block * 128, k * BLOCK_K], ready, a_bufs.index(2 * s))
                tma.async_copy_global_to_shared(a_desc, [block * 128 + 64, k * BLOCK_K], ready, a_bufs.index(2 * s + 1), pred=both)
            it += 1


@gluon.jit
def _consume(
    a_bufs: gl.tensor,
    b_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
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
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    WIDE: gl.constexpr = 2 * BLOCK_N if UP else BLOCK_N  # columns of the product
    HALF: gl.constexpr = WIDE // 2
    GROUPS: gl.constexpr = K // _GROUP
    APART: gl.constexpr = ((BESIDE - GATE) // _GROUP if UP else 1) * GROUPS  # from the left half's scales to the right's
    whole: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    half: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 32])
    stored: gl.constexpr = gl.BlockedLayout(
        [1, 16 if (FP8 and UP) else 8], [32 * (16 if (FP8 and UP) else 8) // HALF, HALF // (16 if (FP8 and UP) else 8)], [4, 1], [1, 0]
    )
    it = 0
    for t in range(gl.program_id(0), used * TILES, gl.num_programs(0)):
        block, tile = _swizzle(gl.to_tensor(t), used, group, TILES)
        expert = gl.load(block_expert_ptr + block).to(gl.int64)
        first = block * 128 + W * 64
        both = gl.load(slots_ptr + block * 128 + 64) < routes
        if both | (W == 0):
            if FP8:
                row = gl.arange(0, 64, gl.SliceLayout(1, half))
                r = gl.load(slots_ptr + first + row)
                # Offsets that are zero, which the compiler cannot know: for a uniform scale it would wait right behind the load.
                zero = gl.minimum(r, 0)
                a_scale = rows_scale_ptr + gl.where(r < routes, r // TOP_K, 0).to(gl.int64) * GROUPS if UP else rows_scale_ptr + first + row
                if UP:
                    scales = weights_scale_ptr + expert * (2 * N // _GROUP * GROUPS)
                    l_scale = scales + (GATE // _GROUP + tile) * GROUPS + zero
                else:
                    l_scale = weights_scale_ptr + (expert * (N // _GROUP) + tile * BLOCK_N // _GROUP) * GROUPS + zero
                left = gl.zeros([64, HALF], gl.float32, half)
                right = gl.zeros([64, HALF], gl.float32, half)
                part = gl.zeros([64, HALF], gl.float32, half)
                by = gl.load(a_scale)
                left_by = by * gl.load(l_scale)
                right_by = by * gl.load(l_scale + APART)
                a_scale += 1 if UP else padded
                by = gl.load(a_scale, mask=STEPS > 1, other=0.0)
                by_l = gl.load(l_scale + 1, mask=STEPS > 1, other=0.0)
                by_r = gl.load(l_scale + (APART + 1), mask=STEPS > 1, other=0.0)
                l_scale += 2
                for k in range(STEPS):
                    s = it % STAGES
                    mbarrier.wait(full.index(s), (it // STAGES) & 1)
                    if UP:
                        fence_async_shared()
                    ahead = k + 2 < STEPS  # two steps ahead: what is loaded in this one is multiplied at the end of the next
                    a_scale += 1 if UP else padded
                    next_by = gl.load(a_scale, mask=ahead, other=0.0)
                    next_l = gl.load(l_scale, mask=ahead, other=0.0)
                    next_r = gl.load(l_scale + APART, mask=ahead, other=0.0)
                    l_scale += 1
                    a = a_bufs.index(2 * s + W)
                    b = b_bufs.index(s)
                    part = warpgroup_mma(a, b.slice(0, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, deps=(part,))
                    left += part * left_by[:, None]
                    part = warpgroup_mma(a, b.slice(HALF, HALF).permute((1, 0)), part, use_acc=False, is_async=True)
                    part = warpgroup_mma_wait(0, deps=(part,))
                    mbarrier.arrive(empty.index(s), count=1)
                    right += part * right_by[:, None]
                    left_by = by * by_l
                    right_by = by * by_r
                    by = next_by
                    by_l = next_l
                    by_r = next_r
                    it += 1
            else:
                acc = gl.zeros([64, WIDE], gl.float32, whole)
                for k in range(STEPS):
                    s = it % STAGES
                    mbarrier.wait(full.index(s), (it // STAGES) & 1)
                    if UP:
                        fence_async_shared()
                    acc = warpgroup_mma(a_bufs.index(2 * s + W), b_bufs.index(s).permute((1, 0)), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=(acc,))
                    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
                    it += 1
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
                if STEP == 1:
                    left, right = gl.split(acc.reshape([64, 2, HALF]).permute([0, 2, 1]))
                else:
                    left, right = gl.split(acc.reshape([64, HALF, 2]))
            out_row = gl.arange(0, 64, gl.SliceLayout(1, stored))
            out_column = gl.arange(0, HALF, gl.SliceLayout(0, stored))
            if UP:
                column = tile * BLOCK_N + gl.arange(0, HALF, gl.SliceLayout(0, left.type.layout))
                if bias_ptr is not None:
                    left += gl.load(bias_ptr + expert * (2 * N) + GATE + STEP * column, mask=column < N, other=0.0).to(gl.float32)[None, :]
                    right += gl.load(bias_ptr + expert * (2 * N) + BESIDE + STEP * column, mask=column < N, other=0.0).to(gl.float32)[None, :]
                gate = gl.where(left > limit, limit, left)  # comparisons, so that NaN stays NaN
                up = gl.where(right > limit, limit, gl.where(right < -limit, -limit, right))
                value = gate / (1.0 + gl.exp(-alpha * gate)) * (up + shift)
                if out_scale_ptr is not None:
                    amax = gl.max(gl.where(value == value, gl.abs(value), float("inf")), 1)
                    scale = amax / _E4M3_MAX
                    scale = gl.where(scale == 0.0, 1.0, gl.where(amax == float("inf"), float("nan"), scale))
                    place = gl.arange(0, 64, gl.SliceLayout(1, left.type.layout))
                    gl.store(out_scale_ptr + tile.to(gl.int64) * padded + first + place, scale)
                    value = value / scale[:, None]
                out = out_ptr + (first + out_row).to(gl.int64)[:, None] * N + (tile * BLOCK_N + out_column)[None, :]
                if N % BLOCK_N == 0:
                    gl.store(out, gl.convert_layout(value.to(out_ptr.dtype.element_ty), stored))
                else:
                    gl.store(out, gl.convert_layout(value.to(out_ptr.dtype.element_ty), stored), mask=(tile * BLOCK_N + out_column < N)[None, :])
            else:
                route = gl.load(slots_ptr + first + out_row)
                to = out_ptr + route.to(gl.int64)[:, None] * N + (tile * BLOCK_N + out_column)[None, :]
                if bias_ptr is not None:
                    column = tile * BLOCK_N + gl.arange(0, HALF, gl.SliceLayout(0, left.type.layout))
                    left += gl.load(bias_ptr + expert * N + column, mask=column < N, other=0.0).to(gl.float32)[None, :]
                    right += gl.load(bias_ptr + expert * N + HALF + column, mask=column + HALF < N, other=0.0).to(gl.float32)[None, :]
                if by_ptr is not None:
                    of_row = gl.load(slots_ptr + first + gl.arange(0, 64, gl.SliceLayout(1, left.type.layout)))
                    route_by = gl.load(by_ptr + of_row, mask=of_row < routes, other=0.0)
                    left *= route_by[:, None]
                    right *= route_by[:, None]
                is_route = (route < routes)[:, None]
                gl.store(to, gl.convert_layout(left.to(out_ptr.dtype.element_ty), stored), mask=is_route & (tile * BLOCK_N + out_column < N)[None, :])
                gl.store(
                    to + HALF,
                    gl.convert_layout(right.to(out_ptr.dtype.element_ty), stored),
                    mask=is_route & (tile * BLOCK_N + HALF + out_column < N)[None, :],
                )
        else:
            for _step in range(STEPS):
                mbarrier.wait(full.index(it % STAGES), (it // STAGES) & 1)
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1


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
    by_ptr: gl.tensor | None,
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
    """See this file's head. The descriptors are of pieces that the copy engine brings; see triton._descriptor."""
    WIDE: gl.constexpr = 2 * BLOCK_N if UP else BLOCK_N
    a_layout: gl.constexpr = gl.NVMMASharedLayout(128, 8 if FP8 else 16, 2)
    a_bufs = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 64, BLOCK_K], a_layout)
    b_bufs = gl.allocate_shared_memory(b_desc.dtype, [STAGES, WIDE, BLOCK_K], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(0, STAGES):
        mbarrier.init(full.index(i), count=129 if UP else 1)
        mbarrier.init(empty.index(i), count=2)
    counted: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    used = gl.to_tensor(0)
    for start in range(0, blocks, 2048):
        at = start + gl.arange(0, 2048, counted)
        used += gl.sum((gl.load(block_expert_ptr + at, mask=at < blocks, other=-1) >= 0).to(gl.int32), 0)
    padded = blocks * 128
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    a_bufs,
                    b_bufs,
                    full,
                    empty,
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
                _consume,
                (
                    a_bufs,
                    b_bufs,
                    full,
                    empty,
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
                _produce,
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

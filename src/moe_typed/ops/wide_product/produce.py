"""The warpgroup of the wide kernel that brings tiles to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .._hopper import bring_piece, gather
from .schedule import locate, share


@gluon.jit
def produce(
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
    """Fill the stages in turn: weights by the copy engine; rows too where they lie in the order of the slots, or gathered by asynchronous copies."""
    TILES: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    SIZE: gl.constexpr = 1 if FP8 else 2
    B_BYTES: gl.constexpr = (2 * BLOCK_N if UP else BLOCK_N) * BLOCK_K * SIZE
    A_BYTES: gl.constexpr = 0 if UP else 64 * BLOCK_K * SIZE
    VEC: gl.constexpr = 16 // SIZE
    copied: gl.constexpr = gl.BlockedLayout([1, VEC], [32 * VEC // BLOCK_K, BLOCK_K // VEC], [4, 1], [1, 0])
    count, rounds, halved = share(used, TILES)
    position = gl.program_id(0)
    it = 0
    for turn in range(count):
        block, tile, half, position = locate(gl.to_tensor(turn), position, rounds, halved, used, group, TILES)
        expert = gl.load(block_expert_ptr + block)
        both = gl.load(slots_ptr + block * 128 + 64) < routes
        is_whole = both & (half < 0)
        begin = block * 128 + gl.where(half > 0, 64, 0)
        p0 = rows_ptr
        p1 = rows_ptr
        if UP:
            row = gl.arange(0, 64, gl.SliceLayout(1, copied))
            depth = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))
            r0 = gl.load(slots_ptr + begin + row)
            r1 = gl.load(slots_ptr + block * 128 + 64 + row)
            s0 = gl.where(r0 < routes, r0 // TOP_K, 0).to(gl.int64)
            s1 = gl.where(r1 < routes, r1 // TOP_K, 0).to(gl.int64)
            p0 = rows_ptr + s0[:, None] * ROW_STRIDE + depth[None, :]
            p1 = rows_ptr + s1[:, None] * ROW_STRIDE + depth[None, :]
        steps = gl.where(both | (half < 1), STEPS, 0)  # nothing where the second half is asked for, and has no rows
        for k in range(steps):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            ready = full.index(s)
            if is_whole:
                mbarrier.expect(ready, B_BYTES + 2 * A_BYTES)
            else:
                mbarrier.expect(ready, B_BYTES + A_BYTES)
            b = b_bufs.index(s)
            if UP and STEP == 1:
                bring_piece(b_desc, [expert * (2 * N) + GATE + tile * BLOCK_N, k * BLOCK_K], ready, b.slice(0, BLOCK_N))
                bring_piece(b_desc, [expert * (2 * N) + BESIDE + tile * BLOCK_N, k * BLOCK_K], ready, b.slice(BLOCK_N, BLOCK_N))
            elif UP:
                bring_piece(b_desc, [expert * (2 * N) + tile * (2 * BLOCK_N), k * BLOCK_K], ready, b)
            else:
                bring_piece(b_desc, [expert * N + tile * BLOCK_N, k * BLOCK_K], ready, b)
            if UP:
                gather(a_bufs.index(2 * s), p0)
                if is_whole:
                    gather(a_bufs.index(2 * s + 1), p1)
                async_copy.mbarrier_arrive(ready, increment_count=False)
                p0 += BLOCK_K
                p1 += BLOCK_K
            else:
                bring_piece(a_desc, [begin, k * BLOCK_K], ready, a_bufs.index(2 * s))
                bring_piece(a_desc, [block * 128 + 64, k * BLOCK_K], ready, a_bufs.index(2 * s + 1), pred=is_whole)
            it += 1

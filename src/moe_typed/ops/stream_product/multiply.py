"""What multiplies, activates, quantises and sums in the streaming kernel; see kernel."""

from triton import language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..activation.spec import E4M3_MAX
from .bring import HALF, piece, share

_E4M3_MAX = gl.constexpr(E4M3_MAX)


@gluon.jit
def multiply(
    w_bufs: gl.tensor,
    x_bufs: gl.tensor,
    s_bufs: gl.tensor,  # for fp8 alone
    full: gl.tensor,
    empty: gl.tensor,
    up_bias_ptr: gl.tensor | None,
    down_bias_ptr: gl.tensor | None,
    inner_ptr: gl.tensor,
    inner_scale_ptr: gl.tensor,  # None but for fp8
    results_ptr: gl.tensor,
    out_ptr: gl.tensor,
    slots_ptr: gl.tensor,
    block_expert_ptr: gl.tensor,
    done_ptr: gl.tensor,
    ids_ptr: gl.tensor,
    router_ptr: gl.tensor,
    live_ptr: gl.tensor | None,
    routes: gl.tensor,
    experts: gl.tensor,
    used: gl.tensor,
    alpha: gl.tensor,
    limit: gl.tensor,
    shift: gl.tensor,
    FP8: gl.constexpr,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    INTER: gl.constexpr,
    GATE: gl.constexpr,
    BESIDE: gl.constexpr,
    ROWS: gl.constexpr,
    SPAN: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    DIRECT: gl.constexpr,
    SUMS: gl.constexpr,
) -> None:
    """Multiply what was brought, activate or store it, say so, and when all have done so, sum."""
    UP_TILES: gl.constexpr = INTER // HALF
    DOWN_TILES: gl.constexpr = (N + 128 * SPAN - 1) // (128 * SPAN)
    STEPS: gl.constexpr = INTER // DEPTH
    EXTRA: gl.constexpr = (N + INTER * SPAN // 2) // (INTER * SPAN)  # as many have the bytes of a piece of the first product
    COLUMNS: gl.constexpr = 2 * ROWS if FP8 else ROWS
    DEEP: gl.constexpr = 32 if FP8 else 16  # of an instruction
    first: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, DEEP])
    second: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, DEEP])
    VEC: gl.constexpr = 16 if FP8 else 8
    stored: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    kept: gl.constexpr = gl.BlockedLayout([VEC, 1], [64 // VEC, VEC // 2], [1, 4], [0, 1])
    pieces = used * UP_TILES
    programs = gl.num_programs(0)
    it = 0
    for t in range(gl.program_id(0), pieces, programs):
        block = t // UP_TILES
        tile = t % UP_TILES
        gate = gl.zeros([HALF, ROWS], gl.float32, first)
        up = gl.zeros([HALF, ROWS], gl.float32, first)
        part_gate = gl.zeros([HALF, ROWS], gl.float32, first)
        part_up = gl.zeros([HALF, ROWS], gl.float32, first)
        for _k in range(N // DEPTH):
            s = it % STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            fence_async_shared()
            w = w_bufs.index(s)
            x = x_bufs.index(s).slice(0, ROWS).permute((1, 0))
            if FP8:
                part_gate = warpgroup_mma(w.slice(0, HALF), x, part_gate, use_acc=False, is_async=True)
                part_up = warpgroup_mma(w.slice(HALF, HALF), x, part_up, use_acc=False, is_async=True)
                by = s_bufs.index(s).slice(0, ROWS).load(gl.SliceLayout(0, first))
                gate_by = by * s_bufs.index(s).slice(ROWS, ROWS).load(gl.SliceLayout(0, first))
                up_by = by * s_bufs.index(s).slice(2 * ROWS, ROWS).load(gl.SliceLayout(0, first))
                part_gate, part_up = warpgroup_mma_wait(0, deps=(part_gate, part_up))
                mbarrier.arrive(empty.index(s), count=1)
                gate += part_gate * gate_by[None, :]
                up += part_up * up_by[None, :]
            else:
                gate = warpgroup_mma(w.slice(0, HALF), x, gate, is_async=True)
                up = warpgroup_mma(w.slice(HALF, HALF), x, up, is_async=True)
                gate, up = warpgroup_mma_wait(0, deps=(gate, up))
                mbarrier.arrive(empty.index(s), count=1)
            it += 1
        if up_bias_ptr is not None:
            biases = up_bias_ptr + gl.load(block_expert_ptr + block).to(gl.int64) * (2 * INTER) + tile * HALF
            channel = gl.arange(0, HALF, gl.SliceLayout(1, first))
            gate += gl.load(biases + GATE + channel).to(gl.float32)[:, None]
            up += gl.load(biases + BESIDE + channel).to(gl.float32)[:, None]
        gate = gl.where(gate > limit, limit, gate)  # comparisons, so that NaN stays NaN
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        value = gate / (1.0 + gl.exp(-alpha * gate)) * (up + shift)
        if FP8:
            amax = gl.max(gl.where(value == value, gl.abs(value), float("inf")), 0)
            scale = amax / _E4M3_MAX
            scale = gl.where(scale == 0.0, 1.0, gl.where(amax == float("inf"), float("nan"), scale))
            slot = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, first))
            gl.store(inner_scale_ptr + slot.to(gl.int64) * UP_TILES + tile, scale)
            value = value / scale[None, :]
        slot = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, kept))
        channel = tile * HALF + gl.arange(0, HALF, gl.SliceLayout(1, kept))
        gl.store(inner_ptr + slot.to(gl.int64)[None, :] * INTER + channel[:, None], gl.convert_layout(value.to(inner_ptr.dtype.element_ty), kept))
        tl.debug_barrier()
        gl.atomic_add(done_ptr + 2 + block, 1, sem="release", scope="gpu")
        gl.atomic_add(done_ptr, 1, sem="release", scope="gpu")
    count, count_early, early, rank, behind = share(pieces, used * DOWN_TILES, EXTRA)
    for j in range(count):
        own = piece(gl.to_tensor(j), count_early, early, rank, behind)
        block_of = own // DOWN_TILES
        first_of = own % DOWN_TILES * SPAN
        results: gl.constexpr = _result(gl.zeros([HALF, COLUMNS], gl.float32, second), ROWS, FP8).type.layout
        route = gl.load(slots_ptr + block_of * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, results if DIRECT else stored)))
        for c in range(SPAN):
            left = gl.zeros([HALF, COLUMNS], gl.float32, second)
            right = gl.zeros([HALF, COLUMNS], gl.float32, second)
            part_left = gl.zeros([HALF, COLUMNS], gl.float32, second)
            part_right = gl.zeros([HALF, COLUMNS], gl.float32, second)
            for _k in range(STEPS):
                s = it % STAGES
                mbarrier.wait(full.index(s), (it // STAGES) & 1)
                fence_async_shared()
                w = w_bufs.index(s)
                x = x_bufs.index(s).permute((1, 0))
                if FP8:
                    part_left = warpgroup_mma(w.slice(0, HALF), x, part_left, use_acc=False, is_async=True)
                    part_right = warpgroup_mma(w.slice(HALF, HALF), x, part_right, use_acc=False, is_async=True)
                    by = s_bufs.index(s).slice(0, COLUMNS).load(gl.SliceLayout(0, second))
                    by = by * s_bufs.index(s).slice(COLUMNS, COLUMNS).load(gl.SliceLayout(0, second))
                    part_left, part_right = warpgroup_mma_wait(0, deps=(part_left, part_right))
                    mbarrier.arrive(empty.index(s), count=1)
                    left += part_left * by[None, :]
                    right += part_right * by[None, :]
                else:
                    left = warpgroup_mma(w.slice(0, HALF), x, left, is_async=True)
                    right = warpgroup_mma(w.slice(HALF, HALF), x, right, is_async=True)
                    left, right = warpgroup_mma_wait(0, deps=(left, right))
                    mbarrier.arrive(empty.index(s), count=1)
                it += 1
            start = (first_of + c) * (2 * HALF)
            left = _result(left, ROWS, FP8)
            right = _result(right, ROWS, FP8)
            if down_bias_ptr is not None:
                expert = gl.load(block_expert_ptr + block_of).to(gl.int64)
                channel = start + gl.arange(0, HALF, gl.SliceLayout(1, results))
                left += gl.load(down_bias_ptr + expert * N + channel, mask=channel < N, other=0.0).to(gl.float32)[:, None]
                right += gl.load(down_bias_ptr + expert * N + HALF + channel, mask=channel + HALF < N, other=0.0).to(gl.float32)[:, None]
            _store(left, results_ptr, route, routes, start, N, results if DIRECT else stored)
            _store(right, results_ptr, route, routes, start + HALF, N, results if DIRECT else stored)
    if SUMS:
        summed: gl.constexpr = gl.BlockedLayout([SLOTS, 4], [1, 32], [1, 4], [1, 0])
        CHUNKS: gl.constexpr = (N + 511) // 512
        end = routes // TOP_K * CHUNKS
        live = routes // TOP_K
        if live_ptr is not None:
            live = gl.load(live_ptr)
        place = gl.arange(0, SLOTS, gl.SliceLayout(1, summed))
        own = gl.program_id(0)
        at = own // CHUNKS * TOP_K + place
        expert = gl.load(ids_ptr + at, mask=(place < TOP_K) & (own < end), other=-1)
        router = gl.load(router_ptr + at, mask=(place < TOP_K) & (own < end), other=0.0)
        tl.debug_barrier()
        gl.atomic_add(done_ptr + 1, 1, sem="release", scope="gpu")
        while gl.atomic_add(done_ptr + 1, 0, sem="acquire", scope="gpu") < programs:
            pass
        for t in range(gl.program_id(0), end, programs):
            token = gl.to_tensor(t // CHUNKS)
            is_kept = (expert >= 0) & (expert < experts) & (token < live)
            column = t % CHUNKS * 512 + gl.arange(0, 512, gl.SliceLayout(0, summed))
            from_ = results_ptr + at.to(gl.int64)[:, None] * N + column[None, :]
            # Masked, not multiplied by zero: what stands at a dropped route, and its weight, may be NaN.
            value = gl.load(from_, mask=is_kept[:, None] & (column < N)[None, :], other=0.0).to(gl.float32)
            by = gl.where(is_kept, router, 0.0)
            at = (t + programs) // CHUNKS * TOP_K + place  # the next one's
            expert = gl.load(ids_ptr + at, mask=(place < TOP_K) & (t + programs < end), other=-1)
            router = gl.load(router_ptr + at, mask=(place < TOP_K) & (t + programs < end), other=0.0)
            total = gl.sum(value * by[:, None], 0)
            gl.store(out_ptr + token.to(gl.int64) * N + column, total.to(out_ptr.dtype.element_ty), mask=column < N)


@gluon.jit
def _result(value: gl.tensor, ROWS: gl.constexpr, FP8: gl.constexpr) -> gl.tensor:
    """Return (64, ROWS): for fp8 the sum of the two columns of each row."""
    if FP8:
        even, odd = gl.split(value.reshape([HALF, ROWS, 2]))
        value = even + odd
    return value


@gluon.jit
def _store(
    value: gl.tensor,
    results_ptr: gl.tensor,
    route: gl.tensor,
    routes: gl.tensor,
    start: gl.tensor,
    N: gl.constexpr,
    stored: gl.constexpr,
) -> None:
    channel = start + gl.arange(0, HALF, gl.SliceLayout(1, stored))
    to = results_ptr + route.to(gl.int64)[None, :] * N + channel[:, None]
    value = gl.convert_layout(value.to(results_ptr.dtype.element_ty), stored)
    if N % (2 * HALF) == 0:
        gl.store(to, value, mask=(route < routes)[None, :])
    else:
        gl.store(to, value, mask=(route < routes)[None, :] & (channel < N)[:, None])

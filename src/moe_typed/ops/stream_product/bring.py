"""What brings weights and rows to shared memory for the streaming kernel, and which pieces are a program's; see kernel."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .._hopper import bring_piece, gather
from ..activation.spec import GROUP

_GROUP = gl.constexpr(GROUP)
HALF = gl.constexpr(64)  # rows of weights of a matrix instruction; a step brings twice as many


@gluon.jit
def share(pieces: gl.tensor, later: gl.tensor, EXTRA: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Share out ``later`` pieces of the second product: how many are this program's, and what piece wants to know.

    Programs that have a piece less of the first product take EXTRA more each, before all share the rest.
    """
    programs = gl.num_programs(0)
    ahead = pieces % programs  # programs that have one more of the first product
    rank = (gl.program_id(0) + programs - ahead) % programs
    behind = programs - ahead
    early = gl.where(ahead > 0, gl.minimum(EXTRA * behind, later), 0)
    count_early = gl.where(rank < behind, gl.maximum(early - rank + behind - 1, 0) // behind, 0)
    return count_early + gl.maximum(later - early - rank + programs - 1, 0) // programs, count_early, early, rank, behind


@gluon.jit
def piece(j: gl.tensor, count_early: gl.tensor, early: gl.tensor, rank: gl.tensor, behind: gl.tensor) -> gl.tensor:
    """Return the j-th piece of this program."""
    return rank + gl.where(j < count_early, j * behind, early + (j - count_early) * gl.num_programs(0))


@gluon.jit
def bring_weights(
    w_bufs: gl.tensor,
    full: gl.tensor,
    empty: gl.tensor,
    up_desc: gl.tensor,
    down_desc: gl.tensor,
    block_expert_ptr: gl.tensor,
    used: gl.tensor,
    N: gl.constexpr,
    INTER: gl.constexpr,
    GATE: gl.constexpr,
    BESIDE: gl.constexpr,
    SPAN: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Bring the weights of all pieces of this program, as far ahead as there is room."""
    UP_TILES: gl.constexpr = INTER // HALF
    DOWN_TILES: gl.constexpr = (N + 128 * SPAN - 1) // (128 * SPAN)
    STEPS: gl.constexpr = INTER // DEPTH
    EXTRA: gl.constexpr = (N + INTER * SPAN // 2) // (INTER * SPAN)  # as many have the bytes of a piece of the first product
    pieces = used * UP_TILES
    programs = gl.num_programs(0)
    it = 0
    for t in range(gl.program_id(0), pieces, programs):
        row = gl.load(block_expert_ptr + t // UP_TILES) * (2 * INTER) + t % UP_TILES * HALF
        for k in range(N // DEPTH):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            ready = full.index(s)
            mbarrier.expect(ready, 2 * HALF * 128)
            w = w_bufs.index(s)
            bring_piece(up_desc, [row + GATE, k * DEPTH], ready, w.slice(0, HALF))
            bring_piece(up_desc, [row + BESIDE, k * DEPTH], ready, w.slice(HALF, HALF))
            it += 1
    count, count_early, early, rank, behind = share(pieces, used * DOWN_TILES, EXTRA)
    for j in range(count):
        own = piece(gl.to_tensor(j), count_early, early, rank, behind)
        row = gl.load(block_expert_ptr + own // DOWN_TILES) * N + own % DOWN_TILES * (128 * SPAN)
        for i in range(SPAN * STEPS):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            ready = full.index(s)
            mbarrier.expect(ready, 2 * HALF * 128)
            w = w_bufs.index(s)
            first = row + i // STEPS * 128
            bring_piece(down_desc, [first, i % STEPS * DEPTH], ready, w.slice(0, HALF))
            bring_piece(down_desc, [first + HALF, i % STEPS * DEPTH], ready, w.slice(HALF, HALF))
            it += 1


@gluon.jit
def bring_rows(
    x_bufs: gl.tensor,
    s_bufs: gl.tensor,  # for fp8 alone
    full: gl.tensor,
    empty: gl.tensor,
    rows_ptr: gl.tensor,
    rows_scale_ptr: gl.tensor,  # None but for fp8, as all scales
    inner_ptr: gl.tensor,
    inner_scale_ptr: gl.tensor,
    up_scale_ptr: gl.tensor,
    down_scale_ptr: gl.tensor,
    slots_ptr: gl.tensor,
    block_expert_ptr: gl.tensor,
    done_ptr: gl.tensor,
    routes: gl.tensor,
    used: gl.tensor,
    FP8: gl.constexpr,
    TOP_K: gl.constexpr,
    N: gl.constexpr,
    INTER: gl.constexpr,
    ROW_STRIDE: gl.constexpr,
    GATE: gl.constexpr,
    BESIDE: gl.constexpr,
    ROWS: gl.constexpr,
    SPAN: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
) -> None:
    """Bring the rows, and for fp8 all scales."""
    UP_TILES: gl.constexpr = INTER // HALF
    DOWN_TILES: gl.constexpr = (N + 128 * SPAN - 1) // (128 * SPAN)
    STEPS: gl.constexpr = INTER // DEPTH
    EXTRA: gl.constexpr = (N + INTER * SPAN // 2) // (INTER * SPAN)  # as many have the bytes of a piece of the first product
    COLUMNS: gl.constexpr = 2 * ROWS if FP8 else ROWS  # of the second product
    VEC: gl.constexpr = 16 if FP8 else 8
    copied: gl.constexpr = gl.BlockedLayout([1, VEC], [4, 8], [4, 1], [1, 0])
    scaled: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    depth = gl.arange(0, DEPTH, gl.SliceLayout(0, copied))
    row = gl.arange(0, ROWS, gl.SliceLayout(1, copied))
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, copied))
    place = gl.arange(0, 4 * ROWS, scaled)
    pieces = used * UP_TILES
    programs = gl.num_programs(0)
    it = 0
    for t in range(gl.program_id(0), pieces, programs):
        block = t // UP_TILES
        route = gl.load(slots_ptr + block * ROWS + row)
        is_route = (route < routes)[:, None]
        x = rows_ptr + gl.where(route < routes, route // TOP_K, 0).to(gl.int64)[:, None] * ROW_STRIDE + depth[None, :]
        if FP8:
            # ROWS scales of rows, then gate's and up's, each as many times
            at = gl.load(slots_ptr + block * ROWS + place % ROWS)
            of_rows = rows_scale_ptr + gl.where(at < routes, at // TOP_K, 0).to(gl.int64) * (N // _GROUP)
            first = gl.load(block_expert_ptr + block).to(gl.int64) * (2 * INTER) + t % UP_TILES * HALF
            of_weights = up_scale_ptr + (first + gl.where(place < 2 * ROWS, GATE, BESIDE)) // _GROUP * (N // _GROUP)
            scale = gl.where(place < ROWS, of_rows, of_weights)
        else:
            scale = x  # nobody looks at it
        for _k in range(N // DEPTH):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            gather(x_bufs.index(s).slice(0, ROWS), x, mask=is_route)
            x += DEPTH
            if FP8:
                gather(s_bufs.index(s), scale)
                scale += 1
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            it += 1
    waits = pieces > 0  # until all of the first product is there
    count, count_early, early, rank, behind = share(pieces, used * DOWN_TILES, EXTRA)
    for j in range(count):
        own = piece(gl.to_tensor(j), count_early, early, rank, behind)
        block_of = own // DOWN_TILES
        if waits:
            waits = gl.atomic_add(done_ptr, 0, sem="acquire", scope="gpu") < pieces
        if waits:
            while gl.atomic_add(done_ptr + 2 + block_of, 0, sem="acquire", scope="gpu") < UP_TILES:
                pass
        slot = block_of * ROWS + (column // 2 if FP8 else column)
        is_read = (gl.load(slots_ptr + slot) < routes)[:, None]
        x = inner_ptr + slot.to(gl.int64)[:, None] * INTER + depth[None, :]
        if FP8:
            is_read = is_read & ((depth // 64)[None, :] == (column % 2)[:, None])
            of_rows = inner_scale_ptr + (block_of * ROWS + place % COLUMNS // 2).to(gl.int64) * (INTER // 64) + place % 2
            expert = gl.load(block_expert_ptr + block_of).to(gl.int64)
            of_weights = down_scale_ptr + (expert * (N // _GROUP) + own % DOWN_TILES * SPAN) * (INTER // _GROUP) + place * 0
            scale = gl.where(place < COLUMNS, of_rows, of_weights)
        else:
            scale = x
        for i in range(SPAN * STEPS):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            gather(x_bufs.index(s), x + i % STEPS * DEPTH, mask=is_read)
            if FP8:
                gather(s_bufs.index(s), scale + gl.where(place < COLUMNS, i % STEPS * 2, i))
            async_copy.mbarrier_arrive(full.index(s), increment_count=False)
            it += 1

"""Sort many routes in two launches: count (of many chunks: rank), then place."""

import triton
import triton.language as tl

from .slots import clear, experts_of, pad


@triton.jit(do_not_specialize=["routes"])
def count_routes(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    rank_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    routes: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Write how many of a program's routes are of each expert, and how many of these come before each route; a program has one chunk."""
    counts = counts_ptr + tl.program_id(0) * BINS
    tl.store(counts + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    first = tl.program_id(0) * CHUNK
    route = first + tl.arange(0, CHUNK)
    expert = experts_of(ids_ptr, live_ptr, route, routes, TOP_K, EXPERTS)
    rank = tl.zeros((CHUNK,), tl.int32)
    count = tl.zeros((CHUNK,), tl.int32)
    for start in tl.static_range(0, CHUNK, 32):
        # Compared along axis 0, which lies within a thread: nothing is summed across threads.
        other = first + start + tl.arange(0, 32)
        same = experts_of(ids_ptr, live_ptr, other, routes, TOP_K, EXPERTS)[:, None] == expert[None, :]
        rank += tl.sum((same & (other[:, None] < route[None, :])).to(tl.int32), 0)
        count += tl.sum(same.to(tl.int32), 0)
    tl.store(rank_ptr + route, rank, mask=route < routes)
    tl.debug_barrier()  # the zeros are there before the counts
    tl.store(counts + expert, count, mask=(expert >= 0) & (rank == count - 1))  # the last of its expert says how many there are


@triton.jit(do_not_specialize=["routes", "pieces"])
def rank_routes(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    rank_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    table_ptr: tl.tensor,
    routes: tl.tensor,
    pieces: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """Do as count_routes does, for ``pieces`` pieces of a program in turn, each of some chunks."""
    CHUNKS: tl.constexpr = PIECE // CHUNK
    program = tl.program_id(0)
    bin_ = tl.arange(0, BINS)
    chunk = tl.arange(0, CHUNKS)
    place = tl.arange(0, CHUNK)
    table = table_ptr + (program * CHUNKS + chunk[:, None]) * BINS  # what the program's threads tell each other
    counted = tl.zeros((BINS,), tl.int32)
    for number in range(pieces):
        first = (program * pieces + number) * PIECE
        tl.store(table + bin_[None, :], tl.zeros((CHUNKS, BINS), tl.int32))
        route = first + chunk[:, None] * CHUNK + place[None, :]
        expert = experts_of(ids_ptr, live_ptr, route, routes, TOP_K, EXPERTS)
        rank = tl.zeros((CHUNKS, CHUNK), tl.int32)
        count = tl.zeros((CHUNKS, CHUNK), tl.int32)
        for start in tl.static_range(0, CHUNK, 32):
            # Compared along axis 0, which lies within a thread: nothing is summed across threads.
            other = start + tl.arange(0, 32)
            others = experts_of(ids_ptr, live_ptr, first + chunk[None, :] * CHUNK + other[:, None], routes, TOP_K, EXPERTS)
            same = others[:, :, None] == expert[None, :, :]
            rank += tl.sum((same & (other[:, None, None] < place[None, None, :])).to(tl.int32), 0)
            count += tl.sum(same.to(tl.int32), 0)
        tl.debug_barrier()  # the zeros are there before the counts
        tl.store(table + expert, count, mask=(expert >= 0) & (rank == count - 1))  # the last of its expert says how many there are
        tl.debug_barrier()
        counts = tl.load(table + bin_[None, :])
        tl.debug_barrier()
        tl.store(table + bin_[None, :], counted[None, :] + tl.cumsum(counts, 0) - counts)
        tl.debug_barrier()
        rank += tl.load(table + expert, mask=expert >= 0, other=0)
        tl.store(rank_ptr + route, rank, mask=route < routes)
        counted += tl.sum(counts, 0)
        tl.debug_barrier()  # all is read before the next piece's zeros
    tl.store(counts_ptr + program * BINS + bin_, counted)


@triton.jit(do_not_specialize=["routes", "pieces", "programs", "blocks", "cleared"])
def place_routes(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    rank_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    zeros_ptr: tl.tensor | None,
    routes: tl.tensor,
    pieces: tl.tensor,
    programs: tl.tensor,
    blocks: tl.tensor,
    cleared: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    PIECE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Write each route to its slot, and whose the blocks are."""
    program = tl.program_id(0)
    bin_ = tl.arange(0, BINS)
    ROWS: tl.constexpr = 16 if PROGRAMS > 16 else PROGRAMS
    all_ = tl.zeros((ROWS, BINS), tl.int32)
    earlier = tl.zeros((ROWS, BINS), tl.int32)
    for first in tl.static_range(0, PROGRAMS, ROWS):
        other = first + tl.arange(0, ROWS)
        counts = tl.load(counts_ptr + other[:, None] * BINS + bin_[None, :], mask=(other < programs)[:, None], other=0)
        all_ += counts
        earlier += tl.where((other < program)[:, None], counts, 0)
    total = tl.sum(all_, 0)
    padded = (total + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    end = tl.cumsum(padded, 0)
    slot = end - padded + tl.sum(earlier, 0)
    for number in range(pieces):
        route = (program * pieces + number) * PIECE + tl.arange(0, PIECE)
        expert = experts_of(ids_ptr, live_ptr, route, routes, TOP_K, EXPERTS)
        rank = tl.load(rank_ptr + route, mask=route < routes, other=0)
        tl.store(slots_ptr + tl.gather(slot, tl.maximum(expert, 0), 0) + rank, route, mask=expert >= 0)
    pad(total, end - padded, end, slots_ptr, block_expert_ptr, routes, program, programs, blocks, BINS, BLOCK_M, BLOCKS)
    if zeros_ptr is not None:
        clear(zeros_ptr, cleared, program, programs)

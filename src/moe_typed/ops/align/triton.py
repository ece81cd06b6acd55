"""Sort routes by expert: a route's slot is where its expert's slots begin, plus the routes of that expert before it.

Up to 128 routes, one program compares all pairs of them. Up to some hundred, every program counts all of them by itself, and one launch is enough.
Beyond, a first launch ranks each chunk's routes
among those of their expert and counts them, a second adds up the counts of the chunks before (where chunks are few, every program of the last does),
and the last places the routes. The result is that of the reference: routes of one expert keep their order.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from .reference import capacity

_ONE_PROGRAM: Final = (128, 4096)  # routes of which all pairs are compared, and slots
_ONE_LAUNCH: Final = 1024  # routes that every program counts faster than a second launch takes
_CHUNK: Final = 128  # routes of a program; one for each thread, which compares it with all of them
_FEW_CHUNKS: Final = 64  # whose counts every program of the last launch adds up by itself
_WIDTH: Final = 16  # experts of a program that adds up the counts of many chunks


def align(topk_ids: Tensor, live: Tensor | None, num_experts: int, block_m: int, zeros: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.align. ``block_m`` is a power of two. ``zeros``: int32, contiguous; zeros are written there."""
    routes = topk_ids.numel()
    slots = topk_ids.new_empty(capacity(routes, num_experts, block_m))
    block_expert = topk_ids.new_empty(slots.shape[0] // block_m)
    rank = counts = totals = None
    if routes > _ONE_LAUNCH:
        chunks, bins = triton.cdiv(routes, _CHUNK), _bins(num_experts)
        rank, counts = topk_ids.new_empty(routes), topk_ids.new_empty((chunks, bins))
        totals = topk_ids.new_empty(bins) if chunks > _FEW_CHUNKS else None
    _launch(topk_ids.contiguous(), live, num_experts, block_m, rank, counts, totals, slots, block_expert, zeros)
    return slots, block_expert


def _bins(num_experts: int) -> int:
    return max(_WIDTH, triton.next_power_of_2(num_experts))


@custom_op("align", writes=("rank", "counts", "totals", "slots", "block_expert", "zeros"))
def _launch(
    topk_ids: Tensor,
    live: Tensor | None,
    num_experts: int,
    block_m: int,
    rank: Tensor | None,
    counts: Tensor | None,
    totals: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    zeros: Tensor | None,
) -> None:
    blocks = block_expert.shape[0]
    if not blocks:
        return
    cleared = 0 if zeros is None else zeros.numel()
    routes, bins = topk_ids.numel(), _bins(num_experts)
    constants = {"TOP_K": topk_ids.shape[1], "EXPERTS": num_experts, "BINS": bins}
    padding = {"BLOCK_M": block_m, "BLOCKS": max(1, min(1024 // block_m, 16))}
    if routes <= _ONE_PROGRAM[0] and slots.shape[0] <= _ONE_PROGRAM[1]:
        comparing = {
            "TOP_K": topk_ids.shape[1],
            "EXPERTS": num_experts,
            "ROUTES": max(16, triton.next_power_of_2(routes)),
            "BLOCK_M": block_m,
            "SLOTS": triton.next_power_of_2(slots.shape[0]),
        }
        _COMPARE(1, (topk_ids, live, slots, block_expert, zeros), (routes, blocks, cleared), comparing, num_warps=8)
        return
    if rank is None or counts is None:
        chunk = 64
        chunks = triton.cdiv(routes, chunk)
        sorting = {**constants, "CHUNK": chunk, "ROUTES": max(chunk, triton.next_power_of_2(routes)), **padding}
        _SORT(chunks, (topk_ids, live, slots, block_expert, zeros), (routes, chunks, blocks, cleared), sorting, num_warps=4)
        return
    chunks = counts.shape[0]
    _COUNT(chunks, (topk_ids, live, rank, counts), (routes,), {**constants, "CHUNK": _CHUNK}, num_warps=4)
    if totals is not None:
        _ADD(bins // _WIDTH, (counts, totals), (chunks,), {"BINS": bins, "WIDTH": _WIDTH, "PIECE": 256}, num_warps=4)
    placing = {**constants, "CHUNK": _CHUNK, "CHUNKS": 0 if totals is not None else triton.next_power_of_2(chunks), **padding}
    places = (topk_ids, live, rank, counts, totals, slots, block_expert, zeros)
    _PLACE(chunks, places, (routes, chunks, blocks, cleared), placing, num_warps=4)


@triton.jit
def _experts_of(
    ids_ptr: tl.tensor, live_ptr: tl.tensor | None, route: tl.tensor, routes: tl.tensor, TOP_K: tl.constexpr, EXPERTS: tl.constexpr
) -> tl.tensor:
    """Return the experts of routes, -1 where a route is none."""
    expert = tl.load(ids_ptr + route, mask=route < routes, other=-1)
    if live_ptr is not None:
        expert = tl.where(route // TOP_K < tl.load(live_ptr), expert, -1)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, -1)


@triton.jit
def _pad(
    total: tl.tensor,
    first_slot: tl.tensor,
    end: tl.tensor,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    routes: tl.tensor,
    program: tl.tensor,
    programs: tl.tensor,
    blocks: tl.tensor,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Write whose the blocks are, and the padding in them; the programs share them out."""
    for first in range(program * BLOCKS, blocks, programs * BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        start = block * BLOCK_M
        owner = tl.sum((end[None, :] <= start[:, None]).to(tl.int32), 1)  # BINS where every expert ends before
        owned = owner < BINS
        at = tl.where(owned, owner, 0)
        kept = tl.where(owned, tl.gather(first_slot + total, at, 0) - start, 0)  # of the slots from here on, how many hold a route of this expert
        tl.store(block_expert_ptr + block, tl.where(owned, owner, -1), mask=block < blocks)
        place = tl.arange(0, BLOCK_M)
        slot = start[:, None] + place[None, :]
        padding = (place[None, :] >= kept[:, None]) & (slot < blocks * BLOCK_M)
        tl.store(slots_ptr + slot, tl.zeros((BLOCKS, BLOCK_M), tl.int32) + routes, mask=padding)


@triton.jit
def _clear(zeros_ptr: tl.tensor, cleared: tl.tensor, program: tl.tensor, programs: tl.tensor) -> None:
    for first in range(program * 256, cleared, programs * 256):
        at = first + tl.arange(0, 256)
        tl.store(zeros_ptr + at, tl.zeros((256,), tl.int32), mask=at < cleared)


@triton.jit(do_not_specialize=["routes", "blocks", "cleared"])
def _compare(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    zeros_ptr: tl.tensor | None,
    routes: tl.tensor,
    blocks: tl.tensor,
    cleared: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SLOTS: tl.constexpr,
) -> None:
    """One program. Of each expert every BLOCK_M-th route heads a block; a route's block is the number of heads not behind it, less one."""
    place = tl.arange(0, ROUTES)
    expert = _experts_of(ids_ptr, live_ptr, place, routes, TOP_K, EXPERTS)
    slot = tl.arange(0, SLOTS)
    tl.store(slots_ptr + slot, tl.zeros((SLOTS,), tl.int32) + routes, mask=slot < blocks * BLOCK_M)
    tl.store(block_expert_ptr + place, tl.zeros((ROUTES,), tl.int32) - 1, mask=place < blocks)  # there are no more blocks than routes
    if zeros_ptr is not None:
        _clear(zeros_ptr, cleared, tl.program_id(0), tl.num_programs(0))
    same = expert[:, None] == expert[None, :]
    rank = tl.sum((same & (place[:, None] < place[None, :])).to(tl.int32), 0)  # along axis 0, which lies within a thread for the most part
    heads = (expert >= 0) & (rank % BLOCK_M == 0)
    sorts = (expert[:, None] < expert[None, :]) | (same & (place[:, None] <= place[None, :]))
    block = tl.sum((heads[:, None] & sorts).to(tl.int32), 0) - 1
    tl.debug_barrier()  # padding is there before the routes
    tl.store(slots_ptr + block * BLOCK_M + rank % BLOCK_M, place, mask=expert >= 0)
    tl.store(block_expert_ptr + block, expert, mask=heads)


@triton.jit(do_not_specialize=["routes", "chunks", "blocks", "cleared"])
def _sort(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    zeros_ptr: tl.tensor | None,
    routes: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    cleared: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROUTES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    everyone = tl.arange(0, ROUTES)
    expert = _experts_of(ids_ptr, live_ptr, everyone, routes, TOP_K, EXPERTS)
    bin_ = tl.maximum(expert, 0)
    total = tl.histogram(bin_, BINS, mask=expert >= 0)
    before = tl.histogram(bin_, BINS, mask=(expert >= 0) & (everyone < chunk * CHUNK))
    padded = (total + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    end = tl.cumsum(padded, 0)
    place = tl.arange(0, CHUNK)
    mine = _experts_of(ids_ptr, live_ptr, chunk * CHUNK + place, routes, TOP_K, EXPERTS)
    rank = tl.sum(((mine[:, None] == mine[None, :]) & (place[None, :] < place[:, None])).to(tl.int32), 1)
    tl.store(slots_ptr + tl.gather(end - padded + before, tl.maximum(mine, 0), 0) + rank, chunk * CHUNK + place, mask=mine >= 0)
    _pad(total, end - padded, end, slots_ptr, block_expert_ptr, routes, chunk, chunks, blocks, BINS, BLOCK_M, BLOCKS)
    if zeros_ptr is not None:
        _clear(zeros_ptr, cleared, chunk, chunks)


@triton.jit(do_not_specialize=["routes"])
def _count(
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
    counts = counts_ptr + tl.program_id(0) * BINS
    tl.store(counts + tl.arange(0, BINS), tl.zeros((BINS,), tl.int32))
    first = tl.program_id(0) * CHUNK
    route = first + tl.arange(0, CHUNK)
    expert = _experts_of(ids_ptr, live_ptr, route, routes, TOP_K, EXPERTS)
    rank = tl.zeros((CHUNK,), tl.int32)
    count = tl.zeros((CHUNK,), tl.int32)
    for start in tl.static_range(0, CHUNK, 32):
        # Compared along axis 0, which lies within a thread: nothing is summed across threads.
        other = first + start + tl.arange(0, 32)
        same = _experts_of(ids_ptr, live_ptr, other, routes, TOP_K, EXPERTS)[:, None] == expert[None, :]
        rank += tl.sum((same & (other[:, None] < route[None, :])).to(tl.int32), 0)
        count += tl.sum(same.to(tl.int32), 0)
    tl.store(rank_ptr + route, rank, mask=route < routes)
    tl.debug_barrier()  # the zeros are there before the counts
    tl.store(counts + expert, count, mask=(expert >= 0) & (rank == count - 1))  # the last of its expert says how many there are


@triton.jit(do_not_specialize=["chunks"])
def _add(counts_ptr: tl.tensor, totals_ptr: tl.tensor, chunks: tl.tensor, BINS: tl.constexpr, WIDTH: tl.constexpr, PIECE: tl.constexpr) -> None:
    """Replace each count by the sum of those of the chunks before it."""
    bin_ = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.int32)
    for first in range(0, chunks, PIECE):
        chunk = first + tl.arange(0, PIECE)
        at = counts_ptr + chunk[:, None] * BINS + bin_[None, :]
        counts = tl.load(at, mask=(chunk < chunks)[:, None], other=0)
        tl.store(at, total[None, :] + tl.cumsum(counts, 0) - counts, mask=(chunk < chunks)[:, None])
        total += tl.sum(counts, 0)
    tl.store(totals_ptr + bin_, total)


@triton.jit(do_not_specialize=["routes", "chunks", "blocks", "cleared"])
def _place(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    rank_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    totals_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    zeros_ptr: tl.tensor | None,
    routes: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
    cleared: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    bin_ = tl.arange(0, BINS)
    route = chunk * CHUNK + tl.arange(0, CHUNK)
    expert = _experts_of(ids_ptr, live_ptr, route, routes, TOP_K, EXPERTS)
    rank = tl.load(rank_ptr + route, mask=route < routes, other=0)
    if totals_ptr is not None:
        total = tl.load(totals_ptr + bin_)
        before = tl.load(counts_ptr + chunk * BINS + bin_)
    else:
        ROWS: tl.constexpr = 32 if CHUNKS > 32 else CHUNKS
        total = tl.zeros((BINS,), tl.int32)
        before = tl.zeros((BINS,), tl.int32)
        for first in tl.static_range(0, CHUNKS, ROWS):
            other = first + tl.arange(0, ROWS)
            counts = tl.load(counts_ptr + other[:, None] * BINS + bin_[None, :], mask=(other < chunks)[:, None], other=0)
            total += tl.sum(counts, 0)
            before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), 0)
    padded = (total + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    end = tl.cumsum(padded, 0)
    tl.store(slots_ptr + tl.gather(end - padded + before, tl.maximum(expert, 0), 0) + rank, route, mask=expert >= 0)
    _pad(total, end - padded, end, slots_ptr, block_expert_ptr, routes, chunk, chunks, blocks, BINS, BLOCK_M, BLOCKS)
    if zeros_ptr is not None:
        _clear(zeros_ptr, cleared, chunk, chunks)


_COMPARE: Final = Launcher(_compare)
_SORT: Final = Launcher(_sort)
_COUNT: Final = Launcher(_count)
_ADD: Final = Launcher(_add)
_PLACE: Final = Launcher(_place)

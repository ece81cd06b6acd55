"""Sort routes by expert: a route's slot is where its expert's slots begin, plus the routes of that expert before it.

Up to some hundred routes, every program counts all of them by itself, and one launch is enough. Beyond, a first launch counts each chunk's routes,
and a second adds up the counts and places them; a program has one chunk and 16 experts. The result is that of the reference: routes of an expert keep
their order.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from .reference import capacity

_ONE_LAUNCH: Final = 1024  # routes that every program counts faster than a second launch takes
_WIDTH: Final = 16  # experts of a program
_PIECE: Final = 512  # routes that a program looks at together


def align(topk_ids: Tensor, live: Tensor | None, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """See reference.align. ``block_m`` is a power of two."""
    routes = topk_ids.numel()
    slots = topk_ids.new_empty(capacity(routes, num_experts, block_m))
    block_expert = topk_ids.new_empty(slots.shape[0] // block_m)
    counts = None if routes <= _ONE_LAUNCH else topk_ids.new_empty((triton.cdiv(routes, _chunk(routes)), _bins(num_experts)))
    _launch(topk_ids.contiguous(), live, num_experts, block_m, counts, slots, block_expert)
    return slots, block_expert


def _chunk(routes: int) -> int:
    return _PIECE if routes <= 16 * _PIECE else 4 * _PIECE if routes <= 128 * _PIECE else 8 * _PIECE


def _bins(num_experts: int) -> int:
    return max(_WIDTH, triton.next_power_of_2(num_experts))


@custom_op("align", writes=("counts", "slots", "block_expert"))
def _launch(
    topk_ids: Tensor, live: Tensor | None, num_experts: int, block_m: int, counts: Tensor | None, slots: Tensor, block_expert: Tensor
) -> None:
    blocks = block_expert.shape[0]
    if not blocks:
        return
    routes = topk_ids.numel()
    constants = {"TOP_K": topk_ids.shape[1], "EXPERTS": num_experts, "BINS": _bins(num_experts)}
    padding = {"BLOCK_M": block_m, "BLOCKS": max(1, min(1024 // block_m, 16))}
    if counts is None:
        chunk = 64
        programs = triton.cdiv(routes, chunk)
        sorting = {**constants, "CHUNK": chunk, "ROUTES": max(chunk, triton.next_power_of_2(routes)), **padding}
        _SORT(programs, (topk_ids, live, slots, block_expert), (routes, programs, blocks), sorting, num_warps=4)
        return
    chunks, bins = counts.shape
    programs = chunks * (bins // _WIDTH)
    pieces = {**constants, "CHUNK": _chunk(routes), "PIECE": _PIECE, "WIDTH": _WIDTH}
    _COUNT(programs, (topk_ids, live, counts), (routes,), pieces, num_warps=4)
    placing = {**pieces, "CHUNKS": triton.next_power_of_2(chunks), **padding}
    _PLACE(programs, (topk_ids, live, counts, slots, block_expert), (routes, chunks, programs, blocks), placing, num_warps=4)


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


@triton.jit(do_not_specialize=["routes", "chunks", "blocks"])
def _sort(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    routes: tl.tensor,
    chunks: tl.tensor,
    blocks: tl.tensor,
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


@triton.jit(do_not_specialize=["routes"])
def _count(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    counts_ptr: tl.tensor,
    routes: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    GROUPS: tl.constexpr = BINS // WIDTH
    chunk = tl.program_id(0) // GROUPS
    mine = tl.program_id(0) % GROUPS * WIDTH + tl.arange(0, WIDTH)
    count = tl.zeros((WIDTH,), tl.int32)
    for start in tl.static_range(0, CHUNK, PIECE):
        expert = _experts_of(ids_ptr, live_ptr, chunk * CHUNK + start + tl.arange(0, PIECE), routes, TOP_K, EXPERTS)
        count += tl.sum((mine[:, None] == expert[None, :]).to(tl.int32), 1)
    tl.store(counts_ptr + chunk * BINS + mine, count)


@triton.jit(do_not_specialize=["routes", "chunks", "programs", "blocks"])
def _place(
    ids_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    counts_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    routes: tl.tensor,
    chunks: tl.tensor,
    programs: tl.tensor,
    blocks: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    PIECE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    GROUPS: tl.constexpr = BINS // WIDTH
    ROWS: tl.constexpr = 32 if CHUNKS > 32 else CHUNKS
    chunk = tl.program_id(0) // GROUPS
    bin_ = tl.arange(0, BINS)
    total = tl.zeros((BINS,), tl.int32)
    before = tl.zeros((BINS,), tl.int32)
    for first in range(0, CHUNKS, ROWS):
        other = first + tl.arange(0, ROWS)
        counts = tl.load(counts_ptr + other[:, None] * BINS + bin_[None, :], mask=(other < chunks)[:, None], other=0)
        total += tl.sum(counts, 0)
        before += tl.sum(tl.where((other < chunk)[:, None], counts, 0), 0)
    padded = (total + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    end = tl.cumsum(padded, 0)
    mine = tl.program_id(0) % GROUPS * WIDTH + tl.arange(0, WIDTH)
    slot = tl.gather(end - padded + before, mine, 0)
    for start in tl.static_range(0, CHUNK, PIECE):
        route = chunk * CHUNK + start + tl.arange(0, PIECE)
        expert = _experts_of(ids_ptr, live_ptr, route, routes, TOP_K, EXPERTS)
        is_mine = mine[:, None] == expert[None, :]
        ones = is_mine.to(tl.int32)
        # A route has one expert, so that all but one of the rows add nothing to its slot.
        at = tl.sum(tl.where(is_mine, slot[:, None] + tl.cumsum(ones, 1), 0), 0) - 1
        tl.store(slots_ptr + at, route, mask=at >= 0)
        slot += tl.sum(ones, 1)
    _pad(total, end - padded, end, slots_ptr, block_expert_ptr, routes, tl.program_id(0), programs, blocks, BINS, BLOCK_M, BLOCKS)


_SORT: Final = Launcher(_sort)
_COUNT: Final = Launcher(_count)
_PLACE: Final = Launcher(_place)

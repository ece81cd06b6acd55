"""Sort routes by expert: a route's slot is where its expert's slots begin, plus the routes of that expert before it.

Up to 128 routes, one program compares all pairs of them. Up to some hundred, every program counts all of them by itself, and one launch is enough.
Beyond there are two: the first ranks each program's routes among those of their expert and counts them; in the second every program adds up the
counts of all, and places its routes. For that, programs must be few: where routes are many, a program ranks chunks of them, and what is before them
in its other chunks. The result is that of the reference: routes of one expert keep their order.
"""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from .many import count_routes, place_routes, rank_routes
from .reference import capacity
from .slots import clear, experts_of, pad

_ONE_PROGRAM: Final = (128, 4096)  # routes of which all pairs are compared, and slots
_ONE_LAUNCH: Final = 1024  # routes that every program counts faster than a second launch takes
_FEW: Final = 8192  # routes of which a program ranks one piece of 128, one for each thread, which compares it with all of them
_FEW_PIECE: Final = 128
_CHUNK: Final = 64  # of more routes, so many are compared with each other
_PIECES: Final = (256, 1024)  # of these, a program ranks so many at a time
_PROGRAMS: Final = 128  # at most, for any number of routes
_WIDTH: Final = 16  # the fewest bins


def align(topk_ids: Tensor, live: Tensor | None, num_experts: int, block_m: int, zeros: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.align. ``block_m`` is a power of two. ``zeros``: int32, contiguous; zeros are written there."""
    routes = topk_ids.numel()
    slots = topk_ids.new_empty(capacity(routes, num_experts, block_m))
    block_expert = topk_ids.new_empty(slots.shape[0] // block_m)
    rank = counts = table = None
    if routes > _ONE_LAUNCH:
        piece, bins = _piece(routes), _bins(num_experts)
        programs = min(triton.cdiv(routes, piece), _PROGRAMS)
        rank, counts = topk_ids.new_empty(routes), topk_ids.new_empty((programs, bins))
        table = topk_ids.new_empty((programs, piece // _CHUNK, bins)) if routes > _FEW else None
    _launch(topk_ids.contiguous(), live, num_experts, block_m, rank, counts, table, slots, block_expert, zeros)
    return slots, block_expert


def _piece(routes: int) -> int:
    """Return how many routes a program ranks at a time: not more than each of the most programs gets."""
    if routes <= _FEW:
        return _FEW_PIECE
    fewest, most = _PIECES
    return min(max(fewest, triton.next_power_of_2(triton.cdiv(routes, _PROGRAMS))), most)


def _bins(num_experts: int) -> int:
    return max(_WIDTH, triton.next_power_of_2(num_experts))


@custom_op("align", writes=("rank", "counts", "table", "slots", "block_expert", "zeros"))
def _launch(
    topk_ids: Tensor,
    live: Tensor | None,
    num_experts: int,
    block_m: int,
    rank: Tensor | None,
    counts: Tensor | None,
    table: Tensor | None,
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
        chunks = triton.cdiv(routes, _CHUNK)
        sorting = {**constants, "CHUNK": _CHUNK, "ROUTES": max(_CHUNK, triton.next_power_of_2(routes)), **padding}
        _SORT(chunks, (topk_ids, live, slots, block_expert, zeros), (routes, chunks, blocks, cleared), sorting, num_warps=4)
        return
    piece, programs = _piece(routes), counts.shape[0]
    pieces = triton.cdiv(routes, programs * piece)
    if table is None:
        warps = 4
        _COUNT(programs, (topk_ids, live, rank, counts), (routes,), {**constants, "CHUNK": piece}, num_warps=4)
    else:
        warps = max(8, piece // 64)  # 16 at most: as many threads as a program can have where a warp has 64
        ranking = {**constants, "PIECE": piece, "CHUNK": _CHUNK}
        _RANK(programs, (topk_ids, live, rank, counts, table), (routes, pieces), ranking, num_warps=piece // 64)
    placing = {**constants, "PIECE": piece, "PROGRAMS": triton.next_power_of_2(programs), **padding}
    places = (topk_ids, live, rank, counts, slots, block_expert, zeros)
    _PLACE(programs, places, (routes, pieces, programs, blocks, cleared), placing, num_warps=warps)


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
    expert = experts_of(ids_ptr, live_ptr, place, routes, TOP_K, EXPERTS)
    slot = tl.arange(0, SLOTS)
    tl.store(slots_ptr + slot, tl.zeros((SLOTS,), tl.int32) + routes, mask=slot < blocks * BLOCK_M)
    tl.store(block_expert_ptr + place, tl.zeros((ROUTES,), tl.int32) - 1, mask=place < blocks)  # there are no more blocks than routes
    if zeros_ptr is not None:
        clear(zeros_ptr, cleared, tl.program_id(0), tl.num_programs(0))
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
    expert = experts_of(ids_ptr, live_ptr, everyone, routes, TOP_K, EXPERTS)
    bin_ = tl.maximum(expert, 0)
    total = tl.histogram(bin_, BINS, mask=expert >= 0)
    before = tl.histogram(bin_, BINS, mask=(expert >= 0) & (everyone < chunk * CHUNK))
    padded = (total + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    end = tl.cumsum(padded, 0)
    place = tl.arange(0, CHUNK)
    mine = experts_of(ids_ptr, live_ptr, chunk * CHUNK + place, routes, TOP_K, EXPERTS)
    rank = tl.sum(((mine[:, None] == mine[None, :]) & (place[None, :] < place[:, None])).to(tl.int32), 1)
    tl.store(slots_ptr + tl.gather(end - padded + before, tl.maximum(mine, 0), 0) + rank, chunk * CHUNK + place, mask=mine >= 0)
    pad(total, end - padded, end, slots_ptr, block_expert_ptr, routes, chunk, chunks, blocks, BINS, BLOCK_M, BLOCKS)
    if zeros_ptr is not None:
        clear(zeros_ptr, cleared, chunk, chunks)


_COMPARE: Final = Launcher(_compare)
_SORT: Final = Launcher(_sort)
_COUNT: Final = Launcher(count_routes)
_RANK: Final = Launcher(rank_routes)
_PLACE: Final = Launcher(place_routes)

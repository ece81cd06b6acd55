"""What a program of a grouped product asks first: whose block it has, and which routes."""

import triton
import triton.language as tl


@triton.jit
def swizzle(program: tl.tensor, blocks: tl.tensor, TILES: tl.constexpr, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return (block, tile) of a program: GROUP blocks go through the tiles side by side, so that they share weights in L2."""
    group = program // (GROUP * TILES)
    size = tl.minimum(blocks - group * GROUP, GROUP)
    place = program % (GROUP * TILES)
    return group * GROUP + place % size, place // size


@triton.jit
def routes_of(
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor | None,
    live_ptr: tl.tensor | None,
    block: tl.tensor,
    routes: tl.tensor,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    ROUTES: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the expert of a block (-1: nothing to do), and its BLOCK_M routes (``routes`` where there is none).

    With ``block_expert_ptr``, as align sorted them. Without, ``slots_ptr`` is what stands in topk_ids, at most ROUTES, unsorted: block b is
    headed by route b, and has something to do if a multiple of BLOCK_M routes of its expert come before; then come the next routes of that expert.
    """
    if block_expert_ptr is not None:
        expert = tl.load(block_expert_ptr + block)
        route = tl.load(slots_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    else:
        place = tl.arange(0, ROUTES)
        ids = tl.load(slots_ptr + place, mask=place < routes, other=-1)
        expert = tl.load(slots_ptr + block)
        if live_ptr is not None:
            live = tl.load(live_ptr) * TOP_K
            ids = tl.where(place < live, ids, -1)
            expert = tl.where(block < live, expert, -1)
        same = (ids == expert).to(tl.int32)
        before = tl.sum(tl.where(place < block, same, 0), 0)
        heads = (expert >= 0) & (expert < EXPERTS) & (before % BLOCK_M == 0)
        wanted = tl.where(same == 1, tl.cumsum(same, 0) - 1 - before, -1)  # the row of the block that each route would be
        row = tl.arange(0, BLOCK_M)
        route = tl.min(tl.where(wanted[None, :] == row[:, None], place[None, :], routes), 1)
        expert = tl.where(heads, expert, -1)
    return expert, route

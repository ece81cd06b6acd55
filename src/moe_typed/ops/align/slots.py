"""What the kernels that sort routes have in common."""

import triton
import triton.language as tl


@triton.jit
def experts_of(
    ids_ptr: tl.tensor, live_ptr: tl.tensor | None, route: tl.tensor, routes: tl.tensor, TOP_K: tl.constexpr, EXPERTS: tl.constexpr
) -> tl.tensor:
    """Return the experts of routes, -1 where a route is none."""
    expert = tl.load(ids_ptr + route, mask=route < routes, other=-1)
    if live_ptr is not None:
        expert = tl.where(route // TOP_K < tl.load(live_ptr), expert, -1)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, -1)


@triton.jit
def pad(
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
def clear(zeros_ptr: tl.tensor, cleared: tl.tensor, program: tl.tensor, programs: tl.tensor) -> None:
    """Write zeros; the programs share them out."""
    for first in range(program * 256, cleared, programs * 256):
        at = first + tl.arange(0, 256)
        tl.store(zeros_ptr + at, tl.zeros((256,), tl.int32), mask=at < cleared)

"""Blocks of rows that lie by expert: one launch, in which each program looks at all experts and writes some blocks."""

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from .reference import segment_block_count, slab_block_count

_SLOTS: Final = 1024  # of a program
_BLOCKS: Final = 16  # at most: each is compared with all experts


def slab_blocks(counts: Tensor, capacity: int, most: int, block_m: int) -> tuple[Tensor, Tensor]:
    """See reference.slab_blocks. ``block_m`` is a power of two."""
    blocks = slab_block_count(counts.shape[0], capacity, most, block_m)
    return _make(counts, capacity, counts.shape[0] * capacity, blocks, block_m, is_slab=True)


def segment_blocks(ends: Tensor, alignment: int, rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """See reference.segment_blocks. ``block_m`` is a power of two."""
    blocks = segment_block_count(ends.shape[0], alignment, rows, block_m)
    return _make(ends, min(alignment, max(rows, 1)), rows, blocks, block_m, is_slab=False)  # beyond all rows, nothing begins: no sum overflows


def _make(held: Tensor, step: int, rows: int, blocks: int, block_m: int, *, is_slab: bool) -> tuple[Tensor, Tensor]:
    slots, block_expert = held.new_empty(blocks * block_m), held.new_empty(blocks)
    _launch(held, step, rows, block_m, is_slab, slots, block_expert)
    return slots, block_expert


@custom_op("expert_blocks", writes=("slots", "block_expert"))
def _launch(held: Tensor, step: int, rows: int, block_m: int, is_slab: bool, slots: Tensor, block_expert: Tensor) -> None:
    blocks = block_expert.shape[0]
    if not blocks:
        return
    each = max(1, min(_SLOTS // block_m, _BLOCKS))
    bins = max(16, triton.next_power_of_2(held.shape[0]))
    constants = {"IS_SLAB": is_slab, "EXPERTS": held.shape[0], "BINS": bins, "BLOCK_M": block_m, "BLOCKS": each}
    _BLOCKS_OF(triton.cdiv(blocks, each), (held, slots, block_expert), (step, rows, blocks), constants, num_warps=4)


@triton.jit(do_not_specialize=["step", "rows", "blocks"])
def _blocks(
    held_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    step: tl.tensor,
    rows: tl.tensor,
    blocks: tl.tensor,
    IS_SLAB: tl.constexpr,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Whatever the device says of rows, no row outside of an expert's own, or of all, is named."""
    expert = tl.arange(0, BINS)
    held = tl.load(held_ptr + expert, mask=expert < EXPERTS, other=0)
    if IS_SLAB:
        first = expert * step
        count = tl.minimum(held, step)
    else:
        before = tl.load(held_ptr + expert - 1, mask=(expert > 0) & (expert < EXPERTS), other=0)
        first = (tl.maximum(tl.minimum(before, rows), 0) + step - 1) // step * step
        count = tl.maximum(tl.minimum(held, rows), 0) - first  # what is subtracted from is no negative number: nothing wraps around
    count = tl.where(expert < EXPERTS, tl.maximum(count, 0), 0)
    padded = (count + BLOCK_M - 1) // BLOCK_M * BLOCK_M
    end = tl.cumsum(padded, 0)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    start = block * BLOCK_M
    owner = tl.sum((end[None, :] <= start[:, None]).to(tl.int32), 1)  # BINS where every expert ends before
    owned = owner < BINS
    at = tl.where(owned, owner, 0)
    row = start + tl.gather(first - (end - padded), at, 0)
    stop = tl.where(owned, tl.gather(first + count, at, 0), 0)
    tl.store(block_expert_ptr + block, tl.where(owned, owner, -1), mask=block < blocks)
    place = tl.arange(0, BLOCK_M)
    rows_of_slots = row[:, None] + place[None, :]
    slot = start[:, None] + place[None, :]
    tl.store(slots_ptr + slot, tl.where(rows_of_slots < stop[:, None], rows_of_slots, rows), mask=slot < blocks * BLOCK_M)


_BLOCKS_OF: Final = Launcher(_blocks)

"""Blocks of rows that lie by expert, in torch operations: static shapes, no host sync. The number of blocks is bounded by what the host knows."""

import torch
from torch import Tensor

from ..align.reference import capacity as most_slots


def slab_block_count(experts: int, capacity: int, most: int, block_m: int) -> int:
    """Return how many blocks the live rows of a slab can need, where no more than ``most`` are live in all."""
    each = -(-capacity // block_m)
    return min(experts * each, most_slots(min(most, experts * capacity), experts, block_m) // block_m)


def segment_block_count(experts: int, alignment: int, rows: int, block_m: int) -> int:
    """Return how many blocks the segments of ``rows`` rows can need: no two share one where a segment begins at whole blocks."""
    return -(-rows // block_m) if alignment % block_m == 0 else most_slots(rows, experts, block_m) // block_m


def slab_blocks(counts: Tensor, capacity: int, most: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return (slots, block_expert) as align does, where route r is row r: expert e has the rows from e * capacity on, as many as it counts.

    ``counts``: int32 (experts,); what is outside 0..capacity counts as the nearest that is not. ``most``: the sum of the counts is at most that.
    """
    first = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device) * capacity
    blocks = slab_block_count(counts.shape[0], capacity, most, block_m)
    return _blocks(first, counts.clamp(0, capacity), counts.shape[0] * capacity, blocks, block_m)


def segment_blocks(ends: Tensor, alignment: int, rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return the same for segments: each begins at the first multiple of ``alignment`` that is not before the end of the one before it.

    ``ends``: int32 (experts,); beyond ``rows`` there is nothing.
    """
    ends = ends.clamp(0, rows)
    first = -(-torch.nn.functional.pad(ends[:-1], (1, 0)) // alignment) * alignment
    return _blocks(first, (ends - first).clamp(min=0), rows, segment_block_count(ends.shape[0], alignment, rows, block_m), block_m)


def _blocks(first: Tensor, count: Tensor, rows: int, blocks: int, block_m: int) -> tuple[Tensor, Tensor]:
    padded = (count + block_m - 1) // block_m * block_m
    end = padded.cumsum(0)
    slot = torch.arange(blocks * block_m, device=count.device)
    owner = torch.searchsorted(end, slot, right=True)
    expert = owner.clamp(max=count.shape[0] - 1)
    offset = slot - (end - padded)[expert]
    is_live = (owner < count.shape[0]) & (offset < count[expert])
    slots = torch.where(is_live, first[expert] + offset, rows).to(torch.int32)
    return slots, torch.where(owner < count.shape[0], owner, -1)[::block_m].to(torch.int32)

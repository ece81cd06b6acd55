"""Blocks of rows that lie by expert: a loop over experts, and align over one route a row, say what they are."""

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_typed.ops.align.reference import align
from moe_typed.ops.expert_blocks import reference
from moe_typed.ops.expert_blocks.triton import segment_blocks, slab_blocks
from tests.ops.support import devices, in_one_graph, ints

Blocks: TypeAlias = Callable[[torch.Tensor, int, int, int], tuple[torch.Tensor, torch.Tensor]]

slabs = pytest.mark.parametrize("make", [reference.slab_blocks, slab_blocks], ids=["reference", "kernel"])
segments = pytest.mark.parametrize("make", [reference.segment_blocks, segment_blocks], ids=["reference", "kernel"])


def vector(values: list[int], device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def ends_of(counts: list[int], alignment: int) -> list[int]:
    ends: list[int] = []
    end = 0
    for count in counts:
        end = -(-end // alignment) * alignment + count
        ends.append(end)
    return ends


def looped(rows_of: list[range], rows: int, blocks: int, block_m: int) -> tuple[list[int], list[int]]:
    """Return slots and the experts of blocks: each expert's rows, padded to whole blocks, and nothing behind the last one's."""
    slots: list[int] = []
    experts: list[int] = []
    for expert, own in enumerate(rows_of):
        needed = -(-len(own) // block_m)
        slots += [*own, *[rows] * (needed * block_m - len(own))]
        experts += [expert] * needed
    assert len(experts) <= blocks
    return slots + [rows] * (blocks * block_m - len(slots)), experts + [-1] * (blocks - len(experts))


COUNTS = ([0, 0, 0], [3, 0, 7], [16, 16, 16], [0, 0, 32], [1], [0], [17, 31, 0, 1, 2], [5] * 33)


@devices
@slabs
@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_blocks_of_a_slab(device: str, make: Blocks, counts: list[int], block_m: int) -> None:
    capacity = 32
    slots, experts = make(vector(counts, device), capacity, sum(counts), block_m)
    own = [range(expert * capacity, expert * capacity + count) for expert, count in enumerate(counts)]
    assert (ints(slots), ints(experts)) == looped(own, len(counts) * capacity, experts.shape[0], block_m)


@devices
@segments
@pytest.mark.parametrize("block_m", [16, 128])
@pytest.mark.parametrize("alignment", [1, 4, 128])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_blocks_of_segments(device: str, make: Blocks, counts: list[int], alignment: int, block_m: int) -> None:
    ends = ends_of(counts, alignment)
    rows = ends[-1]
    slots, experts = make(vector(ends, device), alignment, rows, block_m)
    own = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
    assert (ints(slots), ints(experts)) == looped(own, rows, experts.shape[0], block_m)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=9), st.integers(0, 50), st.sampled_from([1, 4, 16, 128]), st.sampled_from([16, 32, 128]))
def test_there_are_blocks_enough_and_they_are_those_of_align(counts: list[int], spare: int, alignment: int, block_m: int) -> None:
    """Whatever lies behind the last segment, and whatever the most is that the host was told."""
    ends = ends_of(counts, alignment)
    rows = ends[-1] + spare
    ids = torch.full((rows, 1), -1, dtype=torch.int32)
    for expert, (end, count) in enumerate(zip(ends, counts, strict=True)):
        ids[end - count : end] = expert
    slots, experts = reference.segment_blocks(vector(ends, "cpu"), alignment, rows, block_m)
    same_as_align(slots, experts, ids, len(counts), block_m)

    capacity = max(counts) + spare
    ids = torch.full((len(counts), capacity), -1, dtype=torch.int32)
    for expert, count in enumerate(counts):
        ids[expert, :count] = expert
    slots, experts = reference.slab_blocks(vector(counts, "cpu"), capacity, sum(counts) + spare, block_m)
    same_as_align(slots, experts, ids.view(-1, 1), len(counts), block_m)


def same_as_align(slots: torch.Tensor, experts: torch.Tensor, ids: torch.Tensor, num_experts: int, block_m: int) -> None:
    all_slots, all_experts = align(ids, None, num_experts, block_m)
    used = int((all_experts >= 0).sum())
    assert int((experts >= 0).sum()) == used
    assert torch.equal(experts[:used], all_experts[:used])
    assert torch.equal(slots[: used * block_m], all_slots[: used * block_m])


def test_a_bound_makes_fewer_blocks() -> None:
    assert reference.slab_block_count(32, 1024, 8 * 1024, 16) == (8 * 1024 + 32 * 15) // 16
    assert reference.slab_block_count(32, 128, 8 * 128, 128) == 32  # a block for each expert
    assert reference.segment_block_count(32, 128, 4096, 16) == 4096 // 16
    assert reference.segment_block_count(32, 1, 4096, 16) == (4096 + 32 * 15) // 16


@devices
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_counts_that_nobody_wrote_name_no_row_beyond_the_ends(device: str, kernel: bool) -> None:
    """Before the receive hook ran, or where a library failed, counts hold anything: the kernels still read and write what is theirs alone."""
    slab, segment = (slab_blocks, segment_blocks) if kernel else (reference.slab_blocks, reference.segment_blocks)
    slots, experts = slab(vector([2**31 - 1, -5, 3], device), 8, 24, 16)
    assert (ints(slots), ints(experts)) == looped([range(8), range(0), range(16, 19)], 24, experts.shape[0], 16)
    slots, experts = segment(vector([4, -(2**31), 2**31 - 1], device), 4, 12, 16)
    assert (ints(slots), ints(experts)) == looped([range(4), range(0), range(12)], 12, experts.shape[0], 16)


@devices
@segments
def test_behind_an_alignment_beyond_all_rows_nothing_begins(device: str, make: Blocks) -> None:
    slots, experts = make(vector([5, 9, 12], device), 2**31 - 1, 12, 16)
    assert (ints(slots), ints(experts)) == looped([range(5), range(0), range(0)], 12, experts.shape[0], 16)


@devices
def test_nothing_is_launched_for_no_rows(device: str) -> None:
    slots, experts = segment_blocks(vector([0, 0], device), 4, 0, 16)
    assert (slots.shape, experts.shape) == ((0,), (0,))


@devices
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_it_compiles_as_one_graph(device: str) -> None:
    counts = vector([3, 0, 5], device)
    compiled = in_one_graph(slab_blocks)(counts, 8, 24, 16)
    assert all(torch.equal(found, wanted) for found, wanted in zip(compiled, slab_blocks(counts, 8, 24, 16), strict=True))

from collections.abc import Callable
from typing import TypeAlias

import pytest
import torch

from moe_typed.ops.align import reference
from moe_typed.ops.align.reference import capacity
from moe_typed.ops.align.triton import align as align_fast
from tests.ops.support import devices, ints

Align: TypeAlias = Callable[[torch.Tensor, torch.Tensor | None, int, int], tuple[torch.Tensor, torch.Tensor]]

both = pytest.mark.parametrize("align", [reference.align, align_fast], ids=["reference", "triton"])


@devices
@both
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("num_experts", [1, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 300])
def test_every_kept_route_has_one_slot_in_a_block_of_its_expert(device: str, align: Align, rows: int, num_experts: int, block_m: int) -> None:
    generator = torch.Generator().manual_seed(rows * 10 + num_experts)
    ids = torch.randint(-1, num_experts + 2, (rows, 3), generator=generator, dtype=torch.int32)
    slots, block_expert = (tensor.cpu() for tensor in align(ids.to(device), None, num_experts, block_m))

    assert slots.dtype == block_expert.dtype == torch.int32
    assert slots.shape[0] == capacity(ids.numel(), num_experts, block_m) == block_expert.shape[0] * block_m
    flat = ids.flatten()
    kept = [route for route in range(flat.numel()) if 0 <= int(flat[route]) < num_experts]
    real = slots < ids.numel()
    assert sorted(ints(slots[real])) == kept
    assert bool((slots[~real] == ids.numel()).all())
    assert ints(flat[slots[real].long()]) == ints(block_expert.repeat_interleave(block_m)[real])
    used = block_expert[block_expert >= 0]
    assert ints(used) == sorted(ints(used)) == ints(block_expert[: len(used)])
    assert len(used) == sum(-(-int((flat == expert).sum()) // block_m) for expert in range(num_experts))


@devices
@pytest.mark.parametrize(
    ("rows", "k", "num_experts", "block_m"),
    [(64, 8, 128, 16), (16, 8, 128, 8), (128, 1, 3, 8), (1, 1, 512, 128), (1100, 1, 40, 32), (400, 8, 256, 64), (2100, 4, 1, 128)],
)
@pytest.mark.parametrize("live", [None, 0, 0.6])
def test_the_kernels_sort_as_the_reference_does(device: str, rows: int, k: int, num_experts: int, block_m: int, live: float | None) -> None:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(-1, num_experts + 1, (rows, k), generator=generator, dtype=torch.int32).to(device)
    count = None if live is None else torch.tensor([int(live * rows)], dtype=torch.int32, device=device)
    for found, wanted in zip(align_fast(ids, count, num_experts, block_m), reference.align(ids, count, num_experts, block_m), strict=True):
        assert torch.equal(found, wanted)


@devices
@pytest.mark.parametrize(("rows", "k"), [(8, 8), (64, 8), (200, 8), (1100, 8)])
def test_the_kernels_clear_what_they_are_given(device: str, rows: int, k: int) -> None:
    ids = torch.randint(-1, 5, (rows, k), generator=torch.Generator().manual_seed(rows), dtype=torch.int32).to(device)
    around = torch.full((rows * k + 4,), 7, dtype=torch.int32, device=device)
    for found, wanted in zip(align_fast(ids, None, 4, 16, around[1:-1]), reference.align(ids, None, 4, 16), strict=True):
        assert torch.equal(found, wanted)
    assert ints(around) == [7, *[0] * (rows * k + 2), 7]


@devices
def test_programs_sort_more_routes_than_they_rank_at_a_time(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_typed.ops.align.triton._PROGRAMS", 4)
    ids = torch.randint(-1, 71, (9000, 1), generator=torch.Generator().manual_seed(1), dtype=torch.int32).to(device)
    count = torch.tensor([8990], dtype=torch.int32, device=device)
    for found, wanted in zip(align_fast(ids, count, 70, 64), reference.align(ids, count, 70, 64), strict=True):
        assert torch.equal(found, wanted)


@devices
@both
def test_routes_of_one_expert_keep_their_order(device: str, align: Align) -> None:
    slots, block_expert = align(torch.zeros(20, 1, dtype=torch.int32, device=device), None, 4, 16)
    assert ints(slots) == [*range(20), *[20] * (len(slots) - 20)]
    assert ints(block_expert) == [0, 0, *[-1] * (len(block_expert) - 2)]


@devices
@both
def test_ids_out_of_range_are_dropped(device: str, align: Align) -> None:
    ids = torch.tensor([[-1], [2**31 - 1], [-(2**31)], [1]], dtype=torch.int32, device=device)
    slots, block_expert = align(ids, None, 2, 16)
    assert ints(slots[slots < 4]) == [3]
    assert ints(block_expert) == [1, *[-1] * (len(block_expert) - 1)]


@devices
@both
def test_rows_beyond_the_live_count_are_dropped(device: str, align: Align) -> None:
    ids = torch.tensor([[0], [1], [0], [1]], dtype=torch.int32, device=device)
    slots, block_expert = align(ids, torch.tensor([3], dtype=torch.int32, device=device), 2, 16)
    assert sorted(ints(slots[slots < 4])) == [0, 1, 2]
    assert ints(block_expert) == [0, 1, *[-1] * (len(block_expert) - 2)]


@both
def test_the_capacity_is_reached_when_every_expert_hit_has_one_slot_of_its_last_block(align: Align) -> None:
    ids = torch.tensor([[0], [1], [2]], dtype=torch.int32, device="cuda" if torch.cuda.is_available() else "cpu")
    _, block_expert = align(ids, None, 8, 16)
    assert ints(block_expert) == [0, 1, 2]

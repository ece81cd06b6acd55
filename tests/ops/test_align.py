import pytest
import torch

from moe_typed.ops.align.reference import align, capacity
from tests.ops.support import devices, ints


@devices
@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("num_experts", [1, 3, 8])
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 300])
def test_every_kept_route_has_one_slot_in_a_block_of_its_expert(device: str, rows: int, num_experts: int, block_m: int) -> None:
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
def test_routes_of_one_expert_keep_their_order(device: str) -> None:
    slots, block_expert = align(torch.zeros(20, 1, dtype=torch.int32, device=device), None, 4, 16)
    assert ints(slots) == [*range(20), *[20] * (len(slots) - 20)]
    assert ints(block_expert) == [0, 0, *[-1] * (len(block_expert) - 2)]


@devices
def test_rows_beyond_the_live_count_are_dropped(device: str) -> None:
    ids = torch.tensor([[0], [1], [0], [1]], dtype=torch.int32, device=device)
    slots, block_expert = align(ids, torch.tensor([3], dtype=torch.int32, device=device), 2, 16)
    assert sorted(ints(slots[slots < 4])) == [0, 1, 2]
    assert ints(block_expert) == [0, 1, *[-1] * (len(block_expert) - 2)]


def test_the_capacity_is_reached_when_every_expert_hit_has_one_slot_of_its_last_block() -> None:
    ids = torch.tensor([[0], [1], [2]], dtype=torch.int32)
    _, block_expert = align(ids, None, 8, 16)
    assert ints(block_expert) == [0, 1, 2]

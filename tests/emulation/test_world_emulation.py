"""Tests of the ranks, and of poison and raw memory."""

import threading
import time

import pytest
import torch

from tests.emulation.hazards import Ring, late, poison_mask, poisoned, read_memory
from tests.emulation.world import EmulatedHang, PeerFailedError, World
from tests.ops.support import int_rows

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
    torch.uint8,
    torch.int32,
    torch.int64,
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_sees_what_all_brought_in_every_round(ranks: int) -> None:
    world = World(ranks)

    def body(rank: int) -> list[list[int]]:
        return [world.exchange(rank, "numbers", rank + 10 * round_) for round_ in range(20)]

    assert world.run(body) == [[[peer + 10 * round_ for peer in range(ranks)] for round_ in range(20)]] * ranks


def test_the_first_error_is_raised_and_no_rank_hangs() -> None:
    world = World(4)
    others: list[type[BaseException]] = []

    def body(rank: int) -> None:
        world.exchange(rank, "first", rank)
        if rank == 2:
            raise KeyError("rank two")
        try:
            world.exchange(rank, "second", rank)
        except PeerFailedError as error:
            others.append(type(error))
            raise

    start = time.monotonic()
    with pytest.raises(KeyError, match="rank two"):
        world.run(body)
    assert time.monotonic() - start < 5
    assert others == [PeerFailedError] * 3
    assert world.run(lambda rank: world.exchange(rank, "again", rank)) == [[0, 1, 2, 3]] * 4  # the world can be used again


def test_a_rank_that_leaves_early_is_a_hang() -> None:
    world = World(2)
    with pytest.raises(EmulatedHang, match=r"rank 0 waits in only one for ranks \[1\], which left"):
        world.run(lambda rank: world.exchange(rank, "only one", 0) if rank == 0 else [])


def test_ranks_in_different_collectives_are_a_hang() -> None:
    world = World(2)
    with pytest.raises(EmulatedHang, match=r"different collectives: \{0: 'zero', 1: 'one'\}"):
        world.run(lambda rank: world.exchange(rank, ("zero", "one")[rank], 0))


def test_a_wait_times_out() -> None:
    world = World(2, timeout=0.2)
    release = threading.Event()
    with pytest.raises(EmulatedHang, match="rank 0 waits in slow"):
        world.run(lambda rank: world.exchange(rank, "slow", 0) if rank == 0 else [int(release.wait(0.6))])


def test_dead_ranks_run_nothing_and_break_collectives_of_all() -> None:
    world = World(3, dead=frozenset({1}))
    assert world.run(lambda rank: world.meet(rank, "living", rank)) == [{0: 0, 2: 2}] * 2
    with pytest.raises(EmulatedHang, match=r"for ranks \[1\], which are dead"):
        world.run(lambda rank: world.exchange(rank, "all", rank))


def test_orders_follow_the_seed_and_change_from_call_to_call() -> None:
    def orders(seed: int) -> list[list[int]]:
        group = World(1, seed=seed).group(0)
        return [group.permutation(20), group.permutation(20)]

    assert orders(3) == orders(3)
    assert orders(3)[0] != orders(3)[1]
    assert orders(3) != orders(4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_seen_in_every_dtype(dtype: torch.dtype) -> None:
    tensor = poisoned((2, 3), dtype)
    assert poison_mask(tensor).all()
    if dtype.is_floating_point and dtype != torch.float4_e2m1fn_x2:
        assert torch.isnan(tensor.float()).all()


def test_raw_memory_is_read_past_dtype_strides_and_end() -> None:
    ids = torch.tensor([[5, -1], [7, 8]])
    assert int_rows(read_memory(ids, (2, 2), torch.int32)) == [[5, 0], [-1, -1]]
    square = torch.arange(6, dtype=torch.int32).view(2, 3)
    assert int_rows(read_memory(square.t(), (3, 2), torch.int32)) == [[0, 1], [2, 3], [4, 5]]
    assert int_rows(read_memory(square[1:], (2, 3), torch.int32)) == [[3, 4, 5], [0x7F7F7F7F] * 3]


def test_late_results_arrive_once() -> None:
    tensor = torch.arange(3.0)
    arrive = late([tensor])
    assert torch.isnan(tensor).all()
    arrive()
    assert torch.equal(tensor, torch.arange(3.0))
    tensor.zero_()
    arrive()
    assert not tensor.any()


def test_a_ring_of_two_overwrites_the_result_before_the_last() -> None:
    ring = Ring(2)
    results: list[torch.Tensor] = []
    for value in range(3):
        ring.advance()
        results.append(ring.take("rows", (2, 2), torch.float32).fill_(value))
    assert [result[0, 0].item() for result in results] == [2.0, 1.0, 2.0]
    assert [ring.is_alive(call) for call in (1, 2, 3)] == [False, True, True]

"""Simulated loads: their shape, and that a seed says all."""

import pytest
import torch

from moe_typed import LogicalIds, Settled, debug
from moe_typed.routing import Load, OneHotLoad, RecordedLoad, RoundRobinLoad, UniformLoad, ZipfLoad
from tests.routing.support import ids

CPU = torch.device("cpu")
RECORD = RecordedLoad(ids([0, 5, 6], [4, 1, 2]))
LOADS = pytest.mark.parametrize(
    "load",
    [UniformLoad(), ZipfLoad(2.0), OneHotLoad(first=6), RoundRobinLoad(), RECORD],
    ids=["uniform", "zipf", "one-hot", "round-robin", "recorded"],
)


def times(load: Load, rows: int, top_k: int, experts: int) -> torch.Tensor:
    return torch.bincount(load.route(rows, top_k, experts, device=CPU).topk_ids.flatten(), minlength=experts)


@LOADS
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_each_row_goes_to_distinct_experts_with_weights_that_sum_to_one(load: Load, rows: int) -> None:
    with debug("strict"):
        routing = load.route(rows, 3, 7, device=CPU)
    assert routing.topk_ids.shape == (rows, 3)
    assert routing.topk_ids.is_contiguous()
    chosen = routing.topk_ids.long().sort(1).values
    assert bool((chosen[:, 1:] != chosen[:, :-1]).all())
    torch.testing.assert_close(routing.topk_weights.sum(1), torch.ones(rows))
    assert (routing.space, routing.num_experts, routing.live, routing.renormalized) == (LogicalIds, 7, rows, True)
    assert isinstance(routing.scaling, Settled)


@LOADS
def test_a_seed_says_all(load: Load) -> None:
    state = torch.get_rng_state()
    first, again, other = (load.route(40, 3, 7, device=CPU, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first.topk_ids, again.topk_ids)
    assert torch.equal(first.topk_weights, again.topk_weights)
    assert not torch.equal(first.topk_weights, other.topk_weights)
    assert torch.equal(first.topk_ids, other.topk_ids) != isinstance(load, UniformLoad | ZipfLoad)


@LOADS
@pytest.mark.parametrize("top_k", [0, 8, -1])
def test_more_experts_than_there_are_are_refused(load: Load, top_k: int) -> None:
    with pytest.raises(ValueError, match=f"a row cannot go to {top_k} distinct experts of 7"):
        load.route(2, top_k, 7, device=CPU)


def test_all_experts_of_a_uniform_load_are_as_likely() -> None:
    assert bool(((times(UniformLoad(), 4000, 2, 8) - 1000).abs() < 100).all())


def test_an_exponent_says_how_hot_the_first_experts_are() -> None:
    odds = times(ZipfLoad(2.0), 20000, 1, 4) / 20000
    torch.testing.assert_close(odds, torch.tensor([1, 1 / 4, 1 / 9, 1 / 16]) / (1 + 1 / 4 + 1 / 9 + 1 / 16), rtol=0, atol=0.01)
    assert bool(((times(ZipfLoad(0.0), 4000, 2, 8) - 1000).abs() < 100).all())


def test_one_hot_goes_on_at_the_first_expert() -> None:
    assert torch.equal(OneHotLoad(first=6).route(2, 3, 7, device=CPU).topk_ids, ids([6, 0, 1], [6, 0, 1]))


@pytest.mark.parametrize(("rows", "top_k", "experts"), [(5, 3, 7), (1, 7, 7), (100, 2, 9)])
def test_round_robin_loads_differ_by_one_at_most(rows: int, top_k: int, experts: int) -> None:
    load = times(RoundRobinLoad(), rows, top_k, experts)
    assert int(load.max() - load.min()) <= 1


def test_a_record_is_repeated_or_cut() -> None:
    assert torch.equal(RECORD.route(3, 3, 7, device=CPU).topk_ids, ids([0, 5, 6], [4, 1, 2], [0, 5, 6]))
    assert torch.equal(RECORD.route(1, 3, 7, device=CPU).topk_ids, ids([0, 5, 6]))


def test_a_record_of_other_shape_or_with_an_expert_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be \(recorded rows, k\); got \[2\]"):
        RecordedLoad(torch.tensor([0, 1])).route(2, 2, 4, device=CPU)
    with pytest.raises(ValueError, match="goes to one expert twice"):
        RecordedLoad(ids([0, 1], [2, 2])).route(2, 2, 4, device=CPU)


@pytest.mark.parametrize(
    ("record", "top_k", "experts"),
    [(ids([0, 1]), 1, 4), (ids([0, 4]), 2, 4), (ids([0, -1]), 2, 4), (torch.zeros(0, 2, dtype=torch.int32), 2, 4)],
    ids=["other-k", "beyond", "nowhere", "empty"],
)
def test_a_record_that_does_not_fit_is_refused(record: torch.Tensor, top_k: int, experts: int) -> None:
    with pytest.raises(ValueError, match=f"{top_k} ids below {experts} are needed in each"):
        RecordedLoad(record).route(2, top_k, experts, device=CPU)

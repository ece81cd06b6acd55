"""From experts to slots: which copy, and that nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_typed import BoundaryError, DeviceCount, LogicalIds, PhysicalIds, Settled, SoftmaxTopK, debug
from moe_typed.routing import (
    BalancedPlacement,
    HashedPlacement,
    PaddedPhysicalIds,
    Placement,
    SharedSlots,
    StaticPlacement,
    append_shared,
    fill_nowhere,
    in_order,
)
from tests.ops.support import int_rows
from tests.routing.support import NAN, count, floats, ids, logical, physical, random, same, vector

LOG2PHY = StaticPlacement(vector(5, 1, 2, 3), 6)

# Expert 0 has three copies, 1 has one, 2 has two; what stands behind the copies that count is no slot.
SLOTS, COPIES = ids([0, 3, 5], [1, -7, -7], [2, 4, 99]), vector(3, 1, 2)
HASHED = HashedPlacement(SLOTS, COPIES, 6, seed=3)
BALANCED = BalancedPlacement(SLOTS, COPIES, 6)
COPIED = pytest.mark.parametrize("placement", [HASHED, BALANCED], ids=["hashed", "balanced"])
STATIC = StaticPlacement(vector(4, 1, 2), 6)
ALL = pytest.mark.parametrize("placement", [STATIC, HASHED, BALANCED], ids=["static", "hashed", "balanced"])


def uses(slots: Tensor, num_slots: int) -> Tensor:
    return torch.bincount(slots[slots >= 0].long(), minlength=num_slots)


def test_static_slots() -> None:
    """vllm-project/vllm-ascend#8501: logical ids 0 and 3 under the map [5, 1, 2, 3]."""
    routing = logical(ids([0, 3], [2, -1]), 4)
    with debug("strict"):
        placed = LOG2PHY.place(routing)
    same(placed, ids([5, 3], [2, -1]), floats([1, 2], [3, 0]))
    assert (placed.space, placed.num_experts, placed.live, placed.scaling) == (PaddedPhysicalIds, 6, 2, routing.scaling)
    assert LOG2PHY.num_experts == 4


def test_an_id_beyond_the_logical_experts_raises() -> None:
    """vllm-project/vllm-ascend#8501: physical ids under the logical name."""
    with debug("values"), pytest.raises(BoundaryError, match=r"holds the id 5, but logical ids over 4 experts lie in -1\.\.3"):
        logical(ids([5, 3]), 4)
    with debug("off"):
        wrong = logical(ids([5, 3]), 4)
    with debug("off"), pytest.raises(IndexError):
        LOG2PHY.place(wrong)


@ALL
@pytest.mark.parametrize("experts", [2, 4, 6])
def test_a_routing_over_other_experts_is_refused(placement: Placement, experts: int) -> None:
    """Router logits have a column for each logical expert: those with one for each slot do not fit either."""
    routing = SoftmaxTopK(2, renormalize=True).route(torch.zeros(1, experts))
    with pytest.raises(ValueError, match=f"the placement holds 3 experts, but the routing is over {experts}"):
        placement.place(routing)


@pytest.mark.parametrize(
    ("placement", "owner"),
    [(STATIC, [-1, 1, 2, -1, 0, -1, -1]), (HASHED, [0, 1, 2, 0, 2, 0, -1]), (BALANCED, [0, 1, 2, 0, 2, 0, -1])],
    ids=["static", "hashed", "balanced"],
)
def test_every_route_takes_a_copy_of_its_expert(placement: Placement, owner: list[int]) -> None:
    routing = logical(random(50, 4, 3), 3)
    with debug("strict"):
        placed = placement.place(routing)
    assert torch.equal(vector(*owner)[placed.topk_ids], routing.topk_ids)  # -1 takes the last, and stays -1
    assert torch.equal(placed.topk_weights, torch.where(routing.topk_ids < 0, 0.0, routing.topk_weights))
    assert placed.topk_ids.dtype == torch.int32


@ALL
@pytest.mark.parametrize("live", [1, DeviceCount(count(1))], ids=["host", "device"])
def test_padding_rows_go_nowhere_whatever_is_in_them(placement: Placement, live: int | DeviceCount) -> None:
    routing = logical(ids([0, 2], [77, -9], [1, 0]), 3, live)
    routing.topk_weights[1:] = NAN
    with debug("strict"):
        placed = placement.place(routing)
    alone = placement.place(logical(ids([0, 2]), 3))
    same(placed, torch.cat((alone.topk_ids, ids([-1, -1], [-1, -1]))), floats([1, 2], [0, 0], [0, 0]))
    assert placed.live is live


@COPIED
def test_the_choice_is_the_same_on_every_rank_and_every_time(placement: Placement) -> None:
    topk_ids = random(64, 4, 3)
    first = placement.place(logical(topk_ids, 3)).topk_ids
    state = torch.get_rng_state()
    assert torch.equal(placement.place(logical(topk_ids.clone(), 3)).topk_ids, first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**40])
def test_hashed_copies_are_all_used_and_depend_on_the_seed(seed: int) -> None:
    routing = logical(torch.zeros(3000, 2, dtype=torch.int32), 3)
    placed = HashedPlacement(SLOTS, COPIES, 6, seed).place(routing).topk_ids
    assert bool(((uses(placed, 6)[[0, 3, 5]] - 2000).abs() < 200).all())
    assert not torch.equal(placed, HashedPlacement(SLOTS, COPIES, 6, seed + 1).place(routing).topk_ids)


def test_balanced_copies_are_taken_in_turn() -> None:
    placed = BALANCED.place(logical(ids([0, 2], [0, 1], [2, 0], [0, 2]), 3))
    assert torch.equal(placed.topk_ids, ids([0, 2], [3, 1], [4, 5], [0, 2]))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_balanced_copies_differ_by_one_route_at_most(data: st.DataObject) -> None:
    copies = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    slots = torch.full((len(copies), 4), -1, dtype=torch.int32)
    for expert, number in enumerate(copies):
        slots[expert, :number] = torch.arange(number) + sum(copies[:expert])
    rows, k = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5))
    routing = logical(random(rows, k, len(copies), seed=data.draw(st.integers(0, 99))), len(copies), live=data.draw(st.integers(0, rows)))
    with debug("strict"):
        placed = BalancedPlacement(slots, torch.tensor(copies, dtype=torch.int32), sum(copies)).place(routing)
    used = uses(placed.topk_ids, sum(copies))
    for expert, number in enumerate(copies):
        mine = used[sum(copies[:expert]) :][:number]
        assert int(mine.max() - mine.min()) <= 1
    assert int(used.sum()) == int((routing.topk_ids[: int(routing.live if isinstance(routing.live, int) else 0)] >= 0).sum())


# ---- refused -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 1, 4], r"holds a slot outside 0\.\.3"),
        ([0, -1, 2], r"holds a slot outside 0\.\.3"),
        ([0, 1, 1], "holds a slot twice: a slot holds one expert"),
    ],
)
def test_wrong_static_slots_raise(slots: list[int], message: str) -> None:
    with debug("values"), pytest.raises(BoundaryError, match=message) as raised:
        StaticPlacement(vector(*slots), 4)
    assert (raised.value.boundary, raised.value.field) == ("StaticPlacement", "slots")


@pytest.mark.parametrize(
    ("slots", "copies", "field", "message"),
    [
        (SLOTS, [3, 0, 2], "copies", r"holds a count outside 1\.\.3"),
        (SLOTS, [3, 1, 4], "copies", r"holds a count outside 1\.\.3"),
        (SLOTS, [3, 2, 2], "slots", r"holds a slot outside 0\.\.5"),
        (SLOTS, [3, 1, 3], "slots", r"holds a slot outside 0\.\.5"),
        (ids([0, 3, 5], [1, -7, -7], [2, 3, 99]), [3, 1, 2], "slots", "holds a slot twice"),
    ],
)
def test_wrong_copies_raise(slots: Tensor, copies: list[int], field: str, message: str) -> None:
    with debug("values"), pytest.raises(BoundaryError, match=message) as hashed:
        HashedPlacement(slots, vector(*copies), 6, seed=0)
    with debug("values"), pytest.raises(BoundaryError, match=message) as balanced:
        BalancedPlacement(slots, vector(*copies), 6)
    assert (hashed.value.field, balanced.value.field) == (field, field)


def test_tables_of_the_default_integer_dtype_raise() -> None:
    """sgl-project/sglang#25380: a table made without a dtype widened the ids."""
    with debug("layout"), pytest.raises(BoundaryError, match="int64") as raised:
        StaticPlacement(torch.arange(4), 4)
    assert raised.value.field == "slots"
    with debug("off"):
        wide = StaticPlacement(torch.arange(4), 4)
    with debug("layout"), pytest.raises(BoundaryError, match="int64") as raised:
        wide.place(logical(ids([0, 1], [2, 3]), 4))
    assert (raised.value.boundary, raised.value.field) == ("Routing", "topk_ids")
    with debug("strict"):
        narrow = StaticPlacement(torch.arange(4).to(torch.int32), 4).place(logical(ids([0, -1], [2, 3]), 4))
    assert torch.equal(narrow.topk_ids, ids([0, -1], [2, 3]))


def test_copies_of_other_experts_raise() -> None:
    with debug("layout"), pytest.raises(BoundaryError, match="axis 0 is 2, expected experts = 3"):
        BalancedPlacement(SLOTS, vector(3, 1), 6)


# ---- without copies, without sentinels ------------------------------------------------------------------------------------------------


def test_in_order_moves_nothing() -> None:
    routing = append_shared(logical(ids([0, -1]), 4), SharedSlots(1, Settled()))
    placed = in_order(routing)
    assert placed.topk_ids is routing.topk_ids
    assert placed.topk_weights is routing.topk_weights
    assert (routing.space, placed.space, placed.num_experts, placed.num_shared) == (LogicalIds, PaddedPhysicalIds, 5, 1)


@pytest.mark.parametrize("live", [2, DeviceCount(count(2))], ids=["host", "device"])
def test_filled_routes_weigh_nothing(live: int | DeviceCount) -> None:
    routing = physical(ids([0, -1], [-1, 3], [77, -9]), 4, live)
    routing.topk_weights[2] = NAN
    with debug("strict"):
        filled = fill_nowhere(routing, 2)
    same(filled, ids([0, 2], [2, 3], [2, 3]), floats([1, 0], [0, 4], [0, 0]))
    assert (filled.space, filled.num_experts, filled.live) == (PhysicalIds, 4, live)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_to_fill_that_is_none_is_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slot {slot} is not one of the 4 slots"):
        fill_nowhere(physical(ids([0, -1]), 4), slot)


@pytest.mark.parametrize("slot", range(5))
def test_no_row_names_a_slot_twice(slot: int) -> None:
    """AITER takes the weight of the last of two equal ids, which would be the 0 of a route that was filled in."""
    generator = torch.Generator().manual_seed(slot)
    topk_ids = torch.rand(64, 5, generator=generator).argsort(1)[:, :4].to(torch.int32)
    topk_ids[torch.rand(64, 4, generator=generator) < 0.5] = -1
    routing = physical(topk_ids, 5)
    filled = fill_nowhere(routing, slot)
    goes = topk_ids >= 0
    assert torch.equal(filled.topk_ids[goes], topk_ids[goes])
    for row, before in zip(int_rows(filled.topk_ids), int_rows(topk_ids), strict=True):
        free = [(slot + turn) % 5 for turn in range(5) if (slot + turn) % 5 not in before]
        assert row == [(free.pop(0) if route < 0 else route) for route in before]
        assert len(set(row)) == len(row)


def test_more_routes_than_slots_cannot_be_filled() -> None:
    with pytest.raises(ValueError, match="3 routes of a row cannot go to 2 slots, each once"):
        fill_nowhere(physical(ids([0, 1, -1]), 2))

"""Shared experts as extra routes, against the eager steps that they replace."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_typed import (
    BoundaryError,
    DeviceCount,
    Experts,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    LogicalIds,
    Pending,
    Routing,
    ScoredTopK,
    Settled,
    StandardDispatcher,
    debug,
    fp32_as_is,
    prepare_reference,
)
from moe_typed.routing import PaddedPhysicalIds, RankSharedSlots, RoutedScaling, SharedSlots, append_rank_shared, append_shared, in_order
from tests.routing.support import count, floats, ids, logical, pending, physical, random, same


def two_steps(topk_ids: Tensor, weights: Tensor, shared: int, local: int, ep_rank: int, weight: float) -> tuple[Tensor, Tensor]:
    """Append the columns, then move the routed ids: what engines do in a row of small kernels."""
    rows, k = topk_ids.shape
    base = ep_rank * (local + shared) + local
    out_ids = torch.empty(rows, k + shared, dtype=torch.int32)
    out_ids[:, :k] = topk_ids
    out_ids[:, k:] = base + torch.arange(shared, dtype=torch.int32)
    out_weights = torch.cat((weights, torch.full((rows, shared), weight)), dim=1)
    routed = out_ids[:, :k]
    moved = routed + torch.div(routed, local, rounding_mode="floor") * shared
    out_ids[:, :k] = torch.where(routed == -1, routed, moved)
    return out_ids, out_weights


@pytest.mark.parametrize("factor", [None, 2.5])
@pytest.mark.parametrize(
    ("rows", "k", "experts", "ep_size", "ep_rank", "shared"),
    [(1, 8, 256, 8, 0, 1), (4, 8, 256, 8, 7, 1), (17, 8, 264, 8, 3, 1), (128, 16, 128, 4, 2, 2), (5, 7, 60, 4, 3, 3), (0, 8, 256, 8, 1, 1)],
)
def test_rank_slots_are_those_of_the_two_eager_steps(
    rows: int, k: int, experts: int, ep_size: int, ep_rank: int, shared: int, factor: float | None
) -> None:
    settled = logical(random(rows, k, experts), experts)
    local = experts // ep_size
    expected = two_steps(settled.topk_ids, settled.topk_weights, shared, local, ep_rank, 1.0 if factor is None else 1 / factor)
    with debug("strict"):
        if factor is None:
            out: Routing[PaddedPhysicalIds] = append_rank_shared(in_order(settled), RankSharedSlots(shared, local, ep_rank, ep_size, Settled()))
        else:
            state = Pending(factor)
            out = append_rank_shared(in_order(pending(settled, factor)), RankSharedSlots(shared, local, ep_rank, ep_size, state))
    same(out, *expected)
    assert (out.space, out.num_experts, out.num_shared) == (PaddedPhysicalIds, experts + ep_size * shared, shared)
    assert out.first_shared == ep_rank * (local + shared) + local


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_rank_slots_of_any_size(data: st.DataObject) -> None:
    ep_size, local, shared = (data.draw(st.integers(1, most)) for most in (9, 33, 5))
    ep_rank, rows, k = data.draw(st.integers(0, ep_size - 1)), data.draw(st.integers(0, 9)), data.draw(st.integers(1, 17))
    routing = physical(random(rows, k, ep_size * local, seed=data.draw(st.integers(0, 99))), ep_size * local)
    with debug("strict"):
        out = append_rank_shared(routing, RankSharedSlots(shared, local, ep_rank, ep_size, Settled()))
    same(out, *two_steps(routing.topk_ids, routing.topk_weights, shared, local, ep_rank, 1.0))
    # Every slot has one meaning: no routed id lands in a shared slot of any rank, and each can be moved back.
    routed = out.topk_ids[:, :k]
    assert not bool(((routed >= 0) & (routed % (local + shared) >= local)).any())
    assert torch.equal(torch.where(routed < 0, -1, routed - routed // (local + shared) * shared), routing.topk_ids)


@pytest.mark.parametrize("shared", [1, 3])
def test_global_slots_come_behind_the_experts(shared: int) -> None:
    routing = logical(random(6, 5, 12), 12)
    with debug("strict"):
        out = append_shared(routing, SharedSlots(shared, Settled()))
    columns = torch.arange(12, 12 + shared, dtype=torch.int32).expand(6, -1)
    same(out, torch.cat((routing.topk_ids, columns), 1), torch.cat((routing.topk_weights, torch.ones(6, shared)), 1))
    assert (out.space, out.num_experts, out.num_shared, out.first_shared) == (LogicalIds, 12 + shared, shared, 12)
    assert (out.scaling, out.renormalized, out.live) == (routing.scaling, routing.renormalized, routing.live)


@pytest.mark.parametrize("live", [0, 1, 3, DeviceCount(count(0)), DeviceCount(count(1)), DeviceCount(count(3))])
def test_padding_rows_go_to_no_shared_expert(live: int | DeviceCount) -> None:
    number = live if isinstance(live, int) else int(live.count)
    topk_ids = ids([0, 3], [2, 1], [3, 0])
    topk_ids[number:] = 99
    routing = logical(topk_ids, 4, live)
    routing.topk_weights[number:] = float("nan")
    with debug("strict"):
        outs = append_shared(routing, SharedSlots(2, Settled())), append_rank_shared(in_order(routing), RankSharedSlots(2, 2, 1, 2, Settled()))
    for out in outs:
        assert torch.equal(out.topk_ids[number:], torch.full((3 - number, 4), -1, dtype=torch.int32))
        assert torch.equal(out.topk_weights[number:], torch.zeros(3 - number, 4))
        assert bool((out.topk_ids[:number] >= 0).all())
        assert out.live is live


def test_a_live_count_that_changes_is_followed() -> None:
    live = count(3)
    routing = physical(random(3, 2, 4, lowest=0), 4, DeviceCount(live))
    for now in (1, 3, 0):
        live.fill_(now)
        out = append_rank_shared(routing, RankSharedSlots(1, 2, 0, 2, Settled()))
        assert torch.equal((out.topk_ids >= 0).all(1), torch.arange(3) < now)


@pytest.mark.parametrize("shared", [0, -1])
def test_without_shared_experts_the_routing_is_the_same_object(shared: int) -> None:
    routing = logical(ids([0, 1]), 4)
    placed = in_order(routing)
    assert append_shared(routing, SharedSlots(shared, Settled())) is routing
    assert append_rank_shared(placed, RankSharedSlots(shared, 2, 0, 2, Settled())) is placed


# ---- the factor ----------------------------------------------------------------------------------------------------------------------


def one_shared_route(scaling: RoutedScaling) -> Tensor:
    """Return the output of a layer where every expert answers 1, the routed weights are 0.5 and 0.5, and the factor is 2.5."""
    hidden, experts = 4, 4
    weights = Fp32ExpertWeights(
        torch.zeros(experts + 1, 2, hidden),
        torch.zeros(experts + 1, hidden, 1),
        GateUp,
        torch.zeros(experts + 1, 2),
        torch.ones(experts + 1, hidden),
    )
    routing = ScoredTopK(2, "sigmoid", True, scaling).route(torch.zeros(3, experts))
    layer = StandardDispatcher(fp32_as_is).then(Experts(prepare_reference(weights)))
    with debug("strict"):
        return layer(Fp32Rows(torch.zeros(3, hidden)), append_shared(routing, SharedSlots(1, scaling)))


@pytest.mark.parametrize("scaling", [Settled(2.5), Pending(2.5)], ids=["settled", "pending"])
def test_the_shared_expert_counts_once_whoever_applies_the_factor(scaling: RoutedScaling) -> None:
    torch.testing.assert_close(one_shared_route(scaling), torch.full((3, 4), 3.5), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("routed", "slots"),
    [(Settled(2.5), Pending(2.5)), (Pending(2.5), Settled(2.5)), (Pending(2.5), Settled()), (Pending(2.5), Pending(2.0))],
    ids=["pending-slots", "settled-slots", "settled-slots-without-factor", "other-factor"],
)
def test_slots_of_another_state_are_refused(routed: RoutedScaling, slots: RoutedScaling) -> None:
    routing = Routing(ids([0, 1]), floats([0.5, 0.5]), LogicalIds, 4, routed, True, 1)
    message = rf"the slots were made for routings that are {type(slots).__name__}\(.*, but this one is {type(routed).__name__}\("
    with pytest.raises(ValueError, match=message):
        append_shared(routing, SharedSlots(1, slots))
    with pytest.raises(ValueError, match=message):
        append_rank_shared(in_order(routing), RankSharedSlots(1, 2, 0, 2, slots))


# ---- refused -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [1, 0])
def test_columns_are_refused_a_second_time(shared: int) -> None:
    """sgl-project/sglang#36515: the gate and the append step both spent a column on the shared expert."""
    once = append_shared(logical(ids([0, 1]), 3), SharedSlots(1, Settled()))
    with pytest.raises(ValueError, match="has 1 shared columns already; they are appended once"):
        append_shared(once, SharedSlots(shared, Settled()))
    with pytest.raises(ValueError, match="has 1 shared columns already; they are appended once"):
        append_rank_shared(in_order(once), RankSharedSlots(shared, 2, 0, 2, Settled()))


@pytest.mark.parametrize("shared", [1, 0])
@pytest.mark.parametrize(("local", "ep_rank", "ep_size"), [(2, 2, 2), (2, -1, 2), (2, 0, 3), (3, 0, 2), (4, 0, 2), (2, 0, 0), (-2, 0, -2), (0, 0, 2)])
def test_slots_of_other_ranks_are_refused(local: int, ep_rank: int, ep_size: int, shared: int) -> None:
    with pytest.raises(ValueError, match=f"rank {ep_rank} of {ep_size} with {local} routed experts each, but the routing is over 4"):
        append_rank_shared(physical(ids([0, 3]), 4), RankSharedSlots(shared, local, ep_rank, ep_size, Settled()))


def test_a_marker_that_the_gate_wrote_raises_before_and_after_the_remap() -> None:
    """sgl-project/sglang#36515: marker 4 of 4 experts became slot 6, and the last slot is 5."""
    marked = ids([0, 4])
    with debug("values"), pytest.raises(BoundaryError, match=r"holds the id 4, but logical ids over 4 experts lie in -1\.\.3"):
        logical(marked, 4)
    with debug("off"):
        routing = physical(marked, 4)
    with debug("values"), pytest.raises(BoundaryError, match=r"holds the id 6, but physical, padded ids over 6 experts lie in -1\.\.5"):
        append_rank_shared(routing, RankSharedSlots(1, 2, 0, 2, Settled()))


def with_shared(topk_ids: Tensor, live: int | None = None) -> Routing[LogicalIds, Settled]:
    rows, k = topk_ids.shape
    return Routing(topk_ids, torch.ones(rows, k), LogicalIds, 6, Settled(), True, rows if live is None else live, 2, 4)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 1, 4, 3], r"lacks a shared id in a row: its last 2 columns must hold \[4, 5\]"),
        ([0, 1, 4, -1], "lacks a shared id in a row"),
        ([0, -1, -1, -1], "lacks a shared id in a row"),
        ([0, 1, 5, 4], "lacks a shared id in a row"),
        ([0, 1, 4, 4], "lacks a shared id in a row"),
        ([0, 4, 4, 5], "holds a shared id twice in a row"),
        ([5, -1, 4, 5], "holds a shared id twice in a row"),
    ],
)
def test_a_row_that_lacks_its_shared_id_or_has_it_twice_raises(row: list[int], message: str) -> None:
    with debug("values"), pytest.raises(BoundaryError, match=message) as raised:
        with_shared(ids([0, 1, 4, 5], row))
    assert (raised.value.boundary, raised.value.field) == ("Routing", "topk_ids")
    with debug("values"):
        with_shared(ids([0, 1, 4, 5], row), live=1)


def test_a_row_that_goes_nowhere_needs_no_shared_id() -> None:
    with debug("values"):
        with_shared(ids([-1, -1, -1, -1], [-1, -1, 4, 5]))


@pytest.mark.parametrize("shared", [-1, 3])
def test_more_shared_columns_than_there_are_raise(shared: int) -> None:
    with debug("values"), pytest.raises(BoundaryError, match=f"is {shared}, but there are 2 columns") as raised:
        Routing(ids([0, 1]), torch.ones(1, 2), LogicalIds, 6, Settled(), True, 1, shared)
    assert raised.value.field == "num_shared"

"""Id spaces, live rows, the way to local ids, and who scales."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed import (
    BoundaryError,
    DeviceCount,
    LocalIds,
    LocalSinkIds,
    LogicalIds,
    Pending,
    PhysicalIds,
    Routing,
    Settled,
    debug,
    from_topk,
    localize,
)
from moe_typed.routing import (
    Ids,
    RankSharedSlots,
    SharedSlots,
    StaticPlacement,
    append_rank_shared,
    append_shared,
    fill_nowhere,
    from_int64_topk,
    from_sink,
    in_order,
    int64_ids,
    live_mask,
    to_sink,
)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def count(live: int) -> DeviceCount:
    return DeviceCount(torch.tensor([live], dtype=torch.int32))


def logical(topk_ids: Tensor, *, experts: int = 8, live: int | DeviceCount | None = None) -> Routing[LogicalIds, Pending]:
    """Return a routing with a weight of its own for every route."""
    rows, k = topk_ids.shape
    weights = torch.arange(1, rows * k + 1, dtype=torch.float32).view(rows, k)
    return Routing(topk_ids, weights, LogicalIds, experts, Pending(2.5), True, rows if live is None else live)


@pytest.mark.parametrize(
    ("space", "sentinel", "bounds"),
    [(LogicalIds, -1, (-1, 7)), (LocalIds, -1, (-1, 7)), (PhysicalIds, None, (0, 7)), (LocalSinkIds, 8, (0, 8))],
)
def test_the_bounds_of_a_space_hold_its_sentinel(space: type[Ids], sentinel: int | None, bounds: tuple[int, int]) -> None:
    assert space.sentinel(8) == sentinel
    assert space.bounds(8) == bounds


def test_the_spaces_have_names_of_their_own() -> None:
    assert len({space.title for space in (LogicalIds, LocalIds, PhysicalIds, LocalSinkIds)}) == 4


@pytest.mark.parametrize("live", [0, 1, 3])
def test_live_rows_by_host_and_device_count(live: int) -> None:
    expected = torch.arange(3).unsqueeze(1) < live
    for counted in (live, count(live)):
        assert torch.equal(live_mask(logical(ids([0], [1], [2]), live=counted)), expected)


def test_localize_keeps_the_place_and_the_weight_of_what_is_here() -> None:
    routing = logical(ids([0, 3], [4, 5], [7, 2]))
    with debug("strict"):
        local = localize(routing, 3, 3)
    assert torch.equal(local.topk_ids, ids([-1, 0], [1, 2], [-1, -1]))
    assert torch.equal(local.topk_weights, torch.tensor([[0.0, 2.0], [3.0, 4.0], [0.0, 0.0]]))
    assert (local.space, local.num_experts, local.live, local.renormalized) == (LocalIds, 3, 3, True)
    assert local.scaling is routing.scaling
    assert (local.topk_ids.dtype, local.topk_weights.dtype) == (torch.int32, torch.float32)


@pytest.mark.parametrize(("first", "count_here"), [(0, 8), (0, 1), (7, 1), (4, 4)])
def test_the_borders_of_a_rank(first: int, count_here: int) -> None:
    every = ids(*([expert] for expert in range(8)))
    local = localize(logical(every), first, count_here)
    expected = [[expert - first if first <= expert < first + count_here else -1] for expert in range(8)]
    assert torch.equal(local.topk_ids, ids(*expected))


def test_ranks_share_all_routes_out_and_none_twice() -> None:
    generator = torch.Generator().manual_seed(0)
    routing = logical(torch.randint(-1, 8, (16, 4), generator=generator, dtype=torch.int32))
    parts = [localize(routing, first, 2) for first in range(0, 8, 2)]
    taken = torch.stack([part.topk_ids >= 0 for part in parts]).sum(0)
    assert torch.equal(taken, (routing.topk_ids >= 0).long())
    whole = torch.stack([torch.where(part.topk_ids >= 0, part.topk_ids + 2 * rank, 0) for rank, part in enumerate(parts)]).sum(0)
    assert torch.equal(whole, routing.topk_ids.clamp(min=0).long())
    total = torch.stack([part.topk_weights for part in parts]).sum(0)
    assert torch.equal(total, torch.where(routing.topk_ids >= 0, routing.topk_weights, 0.0))


def test_an_id_that_is_no_route_stays_none_on_every_rank() -> None:
    for first in (0, 1, 4):
        assert torch.equal(localize(logical(ids([-1, -1])), first, 2).topk_ids, ids([-1, -1]))


@pytest.mark.parametrize("live", [1, count(1)], ids=["host", "device"])
def test_padding_rows_lose_their_routes(live: int | DeviceCount) -> None:
    routing = logical(ids([0, 1], [2, 99], [-5, 3]), live=live)
    weights = routing.topk_weights.clone()
    routing.topk_weights[1:] = float("nan")
    local = localize(routing, 0, 7)
    assert torch.equal(local.topk_ids, ids([0, 1], [-1, -1], [-1, -1]))
    assert torch.equal(local.topk_weights, torch.tensor([[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]))
    assert torch.equal(local.topk_weights[0], weights[0])
    assert local.live is live


def test_a_device_count_may_change_without_anything_being_rebuilt() -> None:
    live = count(3)
    routing = logical(ids([0], [1], [2], [3]), live=live)
    for now in (2, 4, 0):
        live.count.fill_(now)
        assert torch.equal(localize(routing, 0, 7).topk_ids[:, 0] >= 0, torch.arange(4) < now)


@pytest.mark.parametrize("live", [1, 3, count(1)], ids=["host", "all", "device"])
def test_a_rank_with_every_expert_takes_ids_and_weights_as_they_are(live: int | DeviceCount) -> None:
    routing = logical(ids([0, 1], [2, -1], [7, 3]), live=live)
    local = localize(routing, 0, 8)
    assert local.topk_ids is routing.topk_ids
    assert local.topk_weights is routing.topk_weights
    assert (local.space, local.num_experts, local.live) == (LocalIds, 8, live)


@pytest.mark.parametrize(("first", "count_here"), [(-1, 2), (0, 0), (0, 9), (7, 2), (8, 1), (2, -1)])
def test_a_range_outside_the_experts_is_refused(first: int, count_here: int) -> None:
    with pytest.raises(ValueError, match=f"experts {first}..{first + count_here - 1} do not lie within the 8 experts"):
        localize(logical(ids([0])), first, count_here)


def test_no_rows() -> None:
    with debug("strict"):
        local = localize(logical(torch.empty(0, 2, dtype=torch.int32)), 2, 4)
    assert local.topk_ids.shape == local.topk_weights.shape == (0, 2)


def test_what_an_engine_chose() -> None:
    topk_ids, weights = ids([1, 0]), torch.tensor([[0.5, 0.25]])
    routing = from_topk(topk_ids, weights, 4, renormalized=False)
    assert routing.topk_ids is topk_ids
    assert routing.topk_weights is weights
    assert (routing.space, routing.num_experts, routing.live, routing.renormalized, routing.num_shared) == (LogicalIds, 4, 1, False, 0)
    assert isinstance(routing.scaling, Settled)


def test_int64_ids_come_and_go_by_name() -> None:
    topk_ids = torch.tensor([[1, 0]])
    routing = from_int64_topk(topk_ids, torch.ones(1, 2), 4, renormalized=False)
    assert torch.equal(routing.topk_ids, ids([1, 0]))
    assert (routing.topk_ids.dtype, routing.renormalized) == (torch.int32, False)
    assert torch.equal(int64_ids(routing), topk_ids)
    assert int64_ids(routing).dtype == torch.int64
    with pytest.raises(TypeError, match=r"the ids must be int64; got torch\.int32"):
        from_int64_topk(ids([1, 0]), torch.ones(1, 2), 4)


LOGICAL = logical(ids([0, 3]))
PADDED, LOCAL = in_order(LOGICAL), localize(LOGICAL, 0, 4)


@pytest.mark.parametrize(
    ("convert", "given", "more", "expected"),
    [
        (localize, LOCAL, (0, 4), "LogicalIds"),
        (in_order, PADDED, (), "LogicalIds"),
        (StaticPlacement(torch.arange(4, dtype=torch.int32), 4).place, PADDED, (), "LogicalIds"),
        (fill_nowhere, LOGICAL, (), "PaddedPhysicalIds"),
        (to_sink, LOGICAL, (), "LocalIds"),
        (to_sink, to_sink(LOCAL), (), "LocalIds"),
        (from_sink, LOCAL, (), "LocalSinkIds"),
        (append_shared, PADDED, (SharedSlots(1, Settled()),), "LogicalIds"),
        (append_rank_shared, LOGICAL, (RankSharedSlots(1, 2, 0, 2, Settled()),), "PaddedPhysicalIds"),
    ],
)
def test_a_conversion_takes_its_own_space_alone(convert: Callable[..., object], given: Routing[Ids], more: tuple[object, ...], expected: str) -> None:
    with pytest.raises(BoundaryError, match=rf"Routing\.space: is {given.space.__qualname__}, expected {expected}"):
        convert(given, *more)


def test_settled_changes_nothing_and_pending_multiplies() -> None:
    combined = torch.tensor([[1.0, -2.0]])
    assert Settled().settle(combined) is combined
    assert torch.equal(Pending(2.5).settle(combined), torch.tensor([[2.5, -5.0]]))
    assert torch.equal(combined, torch.tensor([[1.0, -2.0]]))
    assert Pending(2.0).settle(combined.bfloat16()).dtype == torch.bfloat16


def test_ids_and_weights_of_different_shapes_are_no_routing() -> None:
    with debug("layout"), pytest.raises(BoundaryError, match="axis 1 is 4, expected k = 2"):
        from_topk(ids([0, 1]), torch.zeros(1, 4), 4)

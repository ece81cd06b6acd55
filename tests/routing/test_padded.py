"""Rows beyond a count on the device, marked in the routing."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from moe_typed import DeviceCount, LocalIds, LocalSinkIds, LogicalIds, PhysicalIds, Routing, Settled, debug
from moe_typed.routing import Ids, PaddedPhysicalIds, SharedSlots, append_shared, mask_padded
from tests.routing.support import NAN, count, floats, ids, logical, same


def in_space(space: type[Ids], live: int | DeviceCount = 3) -> Routing[Ids, Settled]:
    return Routing(ids([0, 3], [2, 1], [3, 0]), floats([1, 2], [3, 4], [5, 6]), space, 4, Settled(2.5), True, live)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("live", [0, 1, 3])
@pytest.mark.parametrize(("space", "sentinel"), [(LogicalIds, -1), (PaddedPhysicalIds, -1), (LocalIds, -1), (LocalSinkIds, 4)])
def test_rows_from_the_count_on_hold_the_sentinel_of_their_space(space: type[Ids], sentinel: int, live: int, dtype: torch.dtype) -> None:
    routing = in_space(space)
    expected = routing.topk_ids.clone(), routing.topk_weights.clone()
    expected[0][live:], expected[1][live:] = sentinel, 0.0
    with debug("strict"):
        masked = mask_padded(routing, count(live, dtype))
    same(masked, *expected)
    assert (masked.space, masked.num_experts, masked.scaling, masked.renormalized) == (space, 4, routing.scaling, True)
    assert isinstance(masked.live, DeviceCount)
    assert torch.equal(masked.live.count, count(live))
    same(routing, ids([0, 3], [2, 1], [3, 0]), floats([1, 2], [3, 4], [5, 6]))


def test_a_count_without_axes_will_do() -> None:
    same(mask_padded(in_space(LogicalIds), torch.tensor(1)), ids([0, 3], [-1, -1], [-1, -1]), floats([1, 2], [0, 0], [0, 0]))


def test_garbage_in_padding_rows_is_overwritten() -> None:
    routing = logical(ids([0, 1], [77, -9]), 4, live=1)
    routing.topk_weights[1] = NAN
    same(mask_padded(routing, count(1)), ids([0, 1], [-1, -1]), floats([1, 2], [0, 0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("live", [1, DeviceCount(count(1))], ids=["host", "device"])
def test_padding_rows_stay_padding_under_a_larger_count(live: int | DeviceCount, dtype: torch.dtype) -> None:
    with debug("off"):
        routing = in_space(LogicalIds, live)
    with debug("strict"):
        masked = mask_padded(routing, count(2, dtype))
    same(masked, ids([0, 3], [-1, -1], [-1, -1]), floats([1, 2], [0, 0], [0, 0]))
    assert isinstance(masked.live, DeviceCount)
    assert torch.equal(masked.live.count, count(1))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_count_that_changes_in_place_is_seen(dtype: torch.dtype) -> None:
    live, routing = count(3, dtype), in_space(LogicalIds)
    for now in (2, 0, 3):
        live.fill_(now)
        assert torch.equal((mask_padded(routing, live).topk_ids >= 0).all(1), torch.arange(3) < now)


def test_shared_columns_of_padding_rows_are_marked_too() -> None:
    with debug("strict"):
        masked = mask_padded(append_shared(logical(ids([0, 1], [2, 3]), 4), SharedSlots(1, Settled())), count(1))
    same(masked, ids([0, 1, 4], [-1, -1, -1]), floats([1, 2, 1], [0, 0, 0]))
    assert (masked.num_shared, masked.first_shared) == (1, 4)


def test_a_space_without_a_sentinel_is_refused() -> None:
    with pytest.raises(ValueError, match="physical ids have no sentinel for rows that go nowhere; mask the rows before the ids become such"):
        mask_padded(in_space(PhysicalIds), count(1))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([1.0]), "must be int32 or int64; got torch.float32"),
        (torch.tensor([True]), "must be int32 or int64; got torch.bool"),
        (torch.tensor([1], dtype=torch.int16), "must be int32 or int64; got torch.int16"),
    ],
)
def test_a_count_of_another_dtype_is_refused(bad: Tensor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        mask_padded(in_space(LogicalIds), bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (torch.tensor([1, 2]), r"must have one element; got \[2\]"),
        (torch.empty(0, dtype=torch.int32), r"must have one element; got \[0\]"),
        (torch.empty(1, dtype=torch.int32, device="meta"), "is on meta, but the ids are on cpu"),
    ],
)
def test_a_count_of_another_size_or_place_is_refused(bad: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mask_padded(in_space(LogicalIds), bad)


PROGRAM = """
import torch
from moe_typed import from_topk
from moe_typed.routing import mask_padded
assert False, "assertions are off"
routing = from_topk(torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2), 4)
for bad in (1, torch.tensor([1, 2]), torch.tensor([1.0]), torch.empty(1, dtype=torch.int32, device="meta")):
    try:
        mask_padded(routing, bad)
    except (TypeError, ValueError) as error:
        print(type(error).__name__)
"""


def test_all_four_bad_counts_are_refused_without_assertions() -> None:
    run = subprocess.run([sys.executable, "-O", "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["TypeError", "ValueError", "TypeError", "ValueError"]

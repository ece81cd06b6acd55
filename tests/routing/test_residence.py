"""Masks, maps and sinks: what becomes of what, and that none stands for another."""

import pytest
import torch
from torch import Tensor

from moe_typed import (
    BoundaryError,
    DeviceCount,
    Experts,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    LocalIds,
    LocalSinkIds,
    LogicalIds,
    StandardDispatcher,
    StandardDispatchOutput,
    debug,
    fp32_as_is,
    localize,
    prepare_reference,
)
from moe_typed.routing import (
    ExpertMap,
    ExpertMask,
    Ids,
    PaddedPhysicalIds,
    PhysicalIds,
    Residence,
    SinkMask,
    contiguous_map,
    contiguous_residence,
    from_sink,
    in_order,
    localize_by_map,
    map_of,
    mask_of,
    sink_mask,
    to_sink,
)
from tests.routing.support import NAN, count, floats, ids, logical, physical, random, same, vector

CPU = torch.device("cpu")
# Four slots, of which this rank holds the last two: as a map, and as a mask.
MAP, MASK = vector(-1, -1, 0, 1), vector(0, 0, 1, 1)


@pytest.mark.parametrize(
    ("first", "number", "expected"),
    [(0, 1, [0, -1, -1, -1]), (3, 1, [-1, -1, -1, 0]), (2, 2, [-1, -1, 0, 1]), (1, 2, [-1, 0, 1, -1]), (0, 4, [0, 1, 2, 3])],
)
def test_a_rank_with_slots_that_follow_each_other(first: int, number: int, expected: list[int]) -> None:
    with debug("strict"):
        here = contiguous_map(PaddedPhysicalIds, 4, first, number, CPU)
        mask = mask_of(here)
        back = map_of(mask, number)
    assert torch.equal(here.local, vector(*expected))
    assert torch.equal(mask.mask, vector(*(int(local >= 0) for local in expected)))
    assert torch.equal(back.local, here.local)
    assert (here.num_local, back.num_local, here.space, mask.space, back.space) == (number, number, *(PaddedPhysicalIds,) * 3)


@pytest.mark.parametrize(("first", "number"), [(-1, 2), (0, 0), (0, 5), (3, 2), (4, 1)])
def test_slots_that_are_none_are_refused(first: int, number: int) -> None:
    with pytest.raises(ValueError, match=rf"slots {first}\.\.{first + number - 1} do not lie within the 4 slots"):
        contiguous_map(LogicalIds, 4, first, number, CPU)


def test_slots_that_do_not_follow_each_other_are_numbered_in_their_order() -> None:
    with debug("strict"):
        numbered = map_of(ExpertMask(vector(1, 0, 0, 1, 1), LogicalIds), 3)
    assert torch.equal(numbered.local, vector(0, -1, -1, 1, 2))


def test_another_number_of_slots_than_are_marked_raises() -> None:
    for number in (2, 4):
        with debug("values"), pytest.raises(BoundaryError, match="does not hold each of"):
            map_of(ExpertMask(vector(1, 0, 1, 1), LogicalIds), number)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_the_mask_of_a_sink(number: int) -> None:
    with debug("strict"):
        assert torch.equal(sink_mask(number, CPU).mask, vector(*[1] * number, 0))


# ---- none stands for another -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [MAP, vector(0, 2, 1, 1), vector(1, 1, -1)])
def test_what_is_no_mask_raises(wrong: Tensor) -> None:
    """vllm-project/vllm#49758, the other way round."""
    with debug("values"), pytest.raises(BoundaryError, match="holds something other than 0 and 1") as raised:
        ExpertMask(wrong, LogicalIds)
    assert raised.value.field == "mask"


@pytest.mark.parametrize("wrong", [MASK, vector(0, 0, 1, -1), vector(-1, -1, 1, 2), vector(-1, -1, 0, -1), vector(-1, -2, 0, 1), vector(2, 0, 1, -1)])
def test_what_is_no_map_raises(wrong: Tensor) -> None:
    """vllm-project/vllm#49758: kernels read the zeros and ones of a mask as slot numbers."""
    with debug("values"), pytest.raises(BoundaryError, match=r"does not hold each of 0\.\.1 once and -1 everywhere else") as raised:
        ExpertMap(wrong, LogicalIds, 2)
    assert raised.value.field == "local"


@pytest.mark.parametrize("wrong", [MASK, MAP, vector(1, 1), vector(1, 0, 1, 0), vector(), vector(1, 2, 0)])
def test_what_is_no_mask_of_a_sink_raises(wrong: Tensor) -> None:
    with debug("values"), pytest.raises(BoundaryError, match="is not all ones with a last zero") as raised:
        SinkMask(wrong)
    assert raised.value.field == "mask"


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_all_three_are_int32(dtype: torch.dtype) -> None:
    with debug("layout"), pytest.raises(BoundaryError, match=r"ExpertMask\.mask"):
        ExpertMask(MASK.to(dtype), LogicalIds)
    with debug("layout"), pytest.raises(BoundaryError, match=r"ExpertMap\.local"):
        ExpertMap(MAP.to(dtype), LogicalIds, 2)
    with debug("layout"), pytest.raises(BoundaryError, match=r"SinkMask\.mask"):
        SinkMask(vector(1, 0).to(dtype))


# ---- routings --------------------------------------------------------------------------------------------------------------------------


def test_only_the_routes_to_this_rank_stay() -> None:
    """vllm-project/vllm#49758: with ids 0 to 3, tokens 2 and 3 have output on the rank that owns them."""
    routing = physical(ids([0], [1], [2], [3], [-1]), 4)
    with debug("strict"):
        local = localize_by_map(routing, ExpertMap(MAP, PaddedPhysicalIds, 2))
    same(local, ids([-1], [-1], [0], [1], [-1]), floats([0], [0], [3], [4], [0]))
    assert (local.space, local.num_experts, local.live, local.scaling) == (LocalIds, 2, 5, routing.scaling)


def test_a_map_of_slots_that_follow_each_other_is_localize() -> None:
    routing = logical(random(20, 3, 12), 12)
    for first in (0, 4, 9):
        expected = localize(routing, first, 3)
        same(localize_by_map(routing, contiguous_map(LogicalIds, 12, first, 3, CPU)), expected.topk_ids, expected.topk_weights)


def test_scattered_slots_are_found_by_their_number() -> None:
    local = localize_by_map(logical(ids([4, 0], [2, 1]), 5), ExpertMap(vector(1, -1, 2, -1, 0), LogicalIds, 3))
    same(local, ids([0, 1], [2, -1]), floats([1, 2], [3, 0]))


@pytest.mark.parametrize("live", [1, DeviceCount(count(1))], ids=["host", "device"])
def test_padding_rows_are_on_no_rank_whatever_is_in_them(live: int | DeviceCount) -> None:
    routing = logical(ids([2, 3], [2, 77], [-9, 3]), 4, live)
    routing.topk_weights[1:] = NAN
    with debug("strict"):
        local = localize_by_map(routing, ExpertMap(MAP, LogicalIds, 2))
    same(local, ids([0, 1], [-1, -1], [-1, -1]), floats([1, 2], [0, 0], [0, 0]))


def test_an_id_beyond_the_map_is_not_taken_for_its_last_slot() -> None:
    with debug("off"):
        wrong = logical(ids([4]), 4)
    with debug("off"), pytest.raises(IndexError):
        localize_by_map(wrong, ExpertMap(MAP, LogicalIds, 2))


@pytest.mark.parametrize(
    ("slots", "space", "message"),
    [
        (3, PaddedPhysicalIds, "the map is over 3 physical, padded slots, but the routing over 4 physical, padded ones"),
        (5, PaddedPhysicalIds, "the map is over 5 physical, padded slots, but the routing over 4 physical, padded ones"),
        (4, LogicalIds, "the map is over 4 logical slots, but the routing over 4 physical, padded ones"),
    ],
)
def test_a_map_over_other_slots_is_refused(slots: int, space: type[Ids], message: str) -> None:
    """ROCm/aiter#3995: ids that happen to be in range are still of another space."""
    with pytest.raises(ValueError, match=message):
        localize_by_map(physical(ids([0, 1]), 4), contiguous_map(space, slots, 0, 2, CPU))


@pytest.mark.parametrize("topk_ids", [ids([0, 3]), ids([0, 1])], ids=["out-of-range", "in-range"])
def test_ids_that_are_not_local_do_not_reach_the_experts(topk_ids: Tensor) -> None:
    """ROCm/aiter#3995: global ids indexed the weights of this rank."""
    rows, weights = Fp32Rows(torch.ones(1, 4)), Fp32ExpertWeights(torch.ones(2, 2, 4), torch.ones(2, 4, 1), GateUp)
    dispatched = StandardDispatchOutput(rows, localize(logical(topk_ids, 4), 2, 2))
    experts = Experts(prepare_reference(weights))
    with debug("strict"):
        StandardDispatcher(fp32_as_is).combine(experts(dispatched))
    with debug("layout"), pytest.raises(BoundaryError, match="LocalIds") as raised:
        StandardDispatchOutput(rows, logical(topk_ids, 4))  # type: ignore[arg-type]
    assert raised.value.field == "routing"


# ---- sinks -----------------------------------------------------------------------------------------------------------------------------


def test_to_the_sink_and_back() -> None:
    local = localize(logical(ids([0, 3], [-1, 2]), 4), 2, 2)
    with debug("strict"):
        sunk = to_sink(local)
        back = from_sink(sunk)
    same(sunk, ids([2, 1], [2, 0]), local.topk_weights)
    same(back, local.topk_ids, local.topk_weights)
    assert (sunk.space, sunk.num_experts, back.space, back.num_experts) == (LocalSinkIds, 2, LocalIds, 2)
    assert sink_mask(sunk.num_experts, CPU).mask.shape == (3,)


def test_two_conventions_of_no_expert_are_told_apart() -> None:
    """vllm-project/vllm#47733: the producer marks with the number of experts, the consumer with -1."""
    topk_ids = ids([4, 0], [1, 4])
    with debug("values"), pytest.raises(BoundaryError, match=r"holds the id 4, but local ids over 4 experts lie in -1\.\.3"):
        in_order(logical(topk_ids, 5)).moved(topk_ids, torch.ones(2, 2), LocalIds, 4)
    with debug("strict"):
        sunk = logical(topk_ids, 5).moved(topk_ids, torch.ones(2, 2), LocalSinkIds, 4)
        assert torch.equal(from_sink(sunk).topk_ids, ids([-1, 0], [1, -1]))


# ---- both forms -----------------------------------------------------------------------------------------------------------------------


def test_the_two_forms_of_a_residence_say_the_same() -> None:
    """AITER numbers marked slots by the running sum of its mask: a map in another order would name other experts to other runners."""
    first, second = (contiguous_residence(PhysicalIds, 4, slot, 2, torch.device("cpu")) for slot in (0, 2))
    scattered = ExpertMask(ids([0, 1, 0, 1])[0], PhysicalIds)
    backwards = ExpertMap(ids([-1, 1, -1, 0])[0], PhysicalIds, 2)
    with debug("values"):
        assert Residence(scattered, map_of(scattered, 2)).map.num_local == 2
        for mask, expert_map in ((first.mask, second.map), (scattered, first.map), (scattered, backwards)):
            with pytest.raises(BoundaryError, match=r"Residence\.map: does not number the slots that the mask marks, in ascending order"):
                Residence(mask, expert_map)

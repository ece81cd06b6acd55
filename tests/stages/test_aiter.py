"""What AITER takes: which ids, which mask, and what a row may name."""

import pytest
import torch

from moe_typed import Bf16Rows, LocalIds, LocalSinkIds, LogicalIds, PaddedPhysicalIds, PhysicalIds, Routing, Settled
from moe_typed.routing import Ids, contiguous_residence, sink_mask, to_sink
from moe_typed.stages import (
    AiterSinkInput,
    AiterSlotInput,
    MoriEPLLDispatchOutput,
)
from tests.ops.support import ints
from tests.stages.support import (
    CASES,
    FIRST,
    HIDDEN,
    LOCAL,
    NAN,
    SLOTS,
    Owner,
    changed,
    device,
    local,
    random,
    refused,
    residence,
    routes,
    standard,
)


def sink_input(owner: Owner) -> AiterSinkInput:
    case = standard(owner)
    return AiterSinkInput(case.dispatched.payload, to_sink(vars(case.dispatched)["routing"]), torch.bfloat16)


def slot_input(owner: Owner) -> AiterSlotInput:
    dispatched = CASES["mori_ll"](owner).dispatched
    assert isinstance(dispatched, MoriEPLLDispatchOutput)
    return AiterSlotInput(dispatched.payload, dispatched.routing, dispatched.residence.mask, torch.bfloat16)


@pytest.mark.parametrize("space", [LocalIds, LogicalIds, PhysicalIds, PaddedPhysicalIds])
def test_aiter_takes_no_local_ids_without_a_sink(space: type[Ids], owner: Owner) -> None:
    error = refused(sink_input(owner), routing=routes(space, 5, experts=LOCAL))
    assert (error.field, error.reason) == ("routing", f"holds space = {space.__name__}, expected LocalSinkIds")
    if space is not PhysicalIds:
        assert refused(slot_input(owner), routing=routes(space, 4)).reason == f"holds space = {space.__name__}, expected PhysicalIds"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("mask", residence().map, "is of type ExpertMap, expected ExpertMask[PhysicalIds]"),
        ("mask", sink_mask(SLOTS - 1, torch.device("cpu")), "is of type SinkMask, expected ExpertMask[PhysicalIds]"),
        (
            "mask",
            contiguous_residence(LogicalIds, SLOTS, FIRST, LOCAL, torch.device("cpu")).mask,
            "holds space = LogicalIds, expected PhysicalIds",
        ),
        (
            "mask",
            contiguous_residence(PhysicalIds, 8, FIRST, LOCAL, torch.device("cpu")).mask,
            "has experts = 8 inside, but experts = 6 here",
        ),
        ("routing", routes(PhysicalIds, 3), "has rows = 3 inside, but rows = 4 here"),
        ("output", torch.zeros(3, HIDDEN), "axis 0 is 3, expected rows = 4"),
        ("output", torch.zeros(4, HIDDEN, dtype=torch.float64), "dtype is float64, expected bfloat16 or float16 or float32"),
        ("out_dtype", None, "is of type NoneType, expected"),
    ],
)
def test_aiter_reads_slots_by_a_mask_over_them(field: str, value: object, reason: str, owner: Owner) -> None:
    error = refused(slot_input(owner), **{field: value})
    assert error.field == field
    assert error.reason.startswith(reason)


def test_padding_of_local_rows_goes_to_the_sink(owner: Owner) -> None:
    """AITER knows no live count: ids and weights of padding rows, whatever they are, must not count."""
    made = sink_input(owner)
    assert ints(made.routing.topk_ids.view(-1)) == [0, LOCAL, 1, 0, LOCAL, LOCAL, LOCAL, LOCAL, LOCAL, LOCAL]
    routing = local(torch.zeros(2, 1, dtype=torch.int32), torch.tensor([[1.0], [NAN]]), device(1))
    assert ints(to_sink(routing).topk_ids.view(-1)) == [0, LOCAL]


def routed(ids: list[list[int]], space: type[Ids], experts: int, live: int) -> Routing[Ids]:
    return Routing(torch.tensor(ids, dtype=torch.int32), torch.ones(len(ids), len(ids[0])), space, experts, Settled(), True, live)


def test_an_expert_stands_once_in_a_row_that_aiter_sorts(owner: Owner) -> None:
    """AITER keeps the weight of the last one alone; the sink, and slots of other ranks, are not sorted."""
    rows = Bf16Rows(random(2, HIDDEN).bfloat16())
    sink = changed(sink_input(owner), payload=rows, routing=routed([[LOCAL, LOCAL, 1], [1, 0, LOCAL]], LocalSinkIds, LOCAL, 2))
    error = refused(sink, "values", routing=routed([[LOCAL, LOCAL, 1], [1, LOCAL, 1]], LocalSinkIds, LOCAL, 2))
    assert (error.field, error.reason) == ("routing", "names 1 twice in row 1")
    assert "weight of the last one alone" in error.hint
    mine, elsewhere = FIRST, (FIRST + LOCAL) % SLOTS
    slot = changed(slot_input(owner), payload=rows, routing=routed([[mine, elsewhere, elsewhere], [mine, mine, mine]], PhysicalIds, SLOTS, 1))
    error = refused(slot, "values", routing=routed([[mine, elsewhere, mine], [0, 1, 2]], PhysicalIds, SLOTS, 1))
    assert (error.field, error.reason) == ("routing", f"names {mine} twice in row 0")

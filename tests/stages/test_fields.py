"""What holds for the dispatch output of every variant: whose handle, which payload, and which rows are looked at."""

import pytest
import torch

from moe_typed import Bf16Rows, Payload
from moe_typed.formats import Fp8TokenRows
from moe_typed.stages import DeepEPNormalDispatchOutput, Handle
from tests.stages.support import CASES, HANDLES, HIDDEN, NAN, Case, Owner, changed, refused

every_variant = pytest.mark.parametrize("name", CASES)
with_handle = pytest.mark.parametrize("name", [name for name in CASES if name != "standard"])


def scaled(case: Case, *bad: int) -> Fp8TokenRows:
    """Return rows with a scale each: NaN in the rows that are not live, and in ``bad`` ones."""
    scale = torch.ones(len(case.routes))
    scale[[routes is None for routes in case.routes]] = NAN
    scale[[*bad]] = NAN
    return Fp8TokenRows(torch.zeros(len(case.routes), HIDDEN).to(torch.float8_e4m3fn), scale)


@every_variant
def test_what_libraries_leave_undefined_is_not_looked_at(name: str, owner: Owner) -> None:
    case = CASES[name](owner)
    if name == "deepep_normal_worst":
        changed(case.dispatched, payload=scaled(case, 3, 4))
    changed(case.dispatched, payload=scaled(case))


@every_variant
def test_each_live_row_is_looked_at(name: str, owner: Owner) -> None:
    case = CASES[name](owner)
    for row, routes in enumerate(case.routes):
        if routes or (routes is not None and not isinstance(case.dispatched, DeepEPNormalDispatchOutput)):
            error = refused(case.dispatched, "values", payload=scaled(case, row))
            assert (error.boundary, error.field) == ("Fp8TokenRows", "scale")
        elif routes is None:
            changed(case.dispatched, payload=scaled(case, row))


@with_handle
@pytest.mark.parametrize("cls", HANDLES, ids=lambda cls: cls.__name__)
def test_the_handle_is_that_of_its_own_library_and_mode(name: str, cls: type[Handle[object]], owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    own: type = vars(dispatched)["handle"].__class__
    other = owner.handle(cls)
    if cls is own:
        changed(dispatched, handle=other)
        return
    error = refused(dispatched, handle=other)
    assert (error.boundary, error.field) == (type(dispatched).__name__, "handle")
    assert error.reason == f"is of type {cls.__name__}, expected {own.__name__}"


@with_handle
@pytest.mark.parametrize("handle", [None, (), "handle"])
def test_nothing_else_is_a_handle(name: str, handle: object, owner: Owner) -> None:
    assert refused(CASES[name](owner).dispatched, handle=handle).field == "handle"


@every_variant
@pytest.mark.parametrize("payload", [None, torch.zeros(3, HIDDEN), Bf16Rows])
def test_rows_are_a_payload(name: str, payload: object, owner: Owner) -> None:
    error = refused(CASES[name](owner).dispatched, payload=payload)
    assert error.field == "payload"
    assert "expected" in error.reason


@every_variant
@pytest.mark.parametrize("more", [1, -1])
def test_rows_are_as_many_as_the_rest_says(name: str, more: int, owner: Owner) -> None:
    """Of a slab, the host knows the product of two numbers, which values mode compares."""
    case = CASES[name](owner)
    rows = case.dispatched.payload.rows + more
    refused(case.dispatched, "values", payload=Bf16Rows(torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)))
    if "capacity" not in vars(case.dispatched):
        error = refused(case.dispatched, payload=Bf16Rows(torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)))
        assert str(rows) in error.reason or str(rows - more) in error.reason


@every_variant
def test_all_is_on_one_device(name: str, owner: Owner) -> None:
    case = CASES[name](owner)
    elsewhere = Bf16Rows(torch.zeros(case.dispatched.payload.rows, HIDDEN, dtype=torch.bfloat16, device="meta"))
    error = refused(case.dispatched, payload=elsewhere)
    assert "meta" in error.reason
    assert "cpu" in error.reason


@every_variant
def test_with_payload_changes_the_payload_alone(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    other: Payload = Bf16Rows(dispatched.payload.dequantize().bfloat16())
    again = dispatched.with_payload(other)
    assert type(again) is type(dispatched)
    assert again.payload is other
    before, after = vars(dispatched), vars(again)
    assert before.keys() == after.keys()
    assert [field for field in before if before[field] is not after[field]] == ["payload"]


@every_variant
def test_live_rows_are_the_leading_ones_or_nothing_is_said(name: str, owner: Owner) -> None:
    case = CASES[name](owner)
    live = case.dispatched.live_rows
    dead = [row for row, routes in enumerate(case.routes) if routes is None]
    if live is None:
        assert "routing" not in vars(case.dispatched) or not dead
        return
    assert (live.dtype, live.shape) == (torch.int32, (1,))
    assert dead == [*range(int(live), len(case.routes))]


@every_variant
def test_the_class_of_combine_is_told_at_run_time(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    assert dispatched.combine_input.__name__ == type(dispatched).__name__.replace("Masked", "Expanded").replace("DispatchOutput", "CombineInput")

"""Stages of one library where another's belong, past the checkers: with debug on, the error names both sides."""

from collections.abc import Callable
from typing import get_origin, get_type_hints

import pytest
import torch

from moe_typed import BoundaryError, PhysicalIds, Routing, Settled, debug
from moe_typed.boundary import judged
from moe_typed.stages import Carry, Handle, ReceivedPerExpert, RunnerInput, SlabCarry, SummedRowsOutput
from moe_typed.table import Row
from tests.stages.support import CAPACITY, CASES, HANDLES, HIDDEN, LOCAL, AnyOutput, Owner, origin, vector
from tests.stages.test_libraries import combine_inputs
from tests.stages.test_rows import ROWS

every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: " to ".join(cls.__name__ for cls in row.key))


def refused(build: Callable[..., object], *values: object, level: str = "layout") -> BoundaryError:
    with debug("strict" if level == "strict" else "layout"), pytest.raises(BoundaryError) as caught:
        build(*values)
    return caught.value


def test_handle_of_one_in_the_combine_input_of_another(owner: Owner) -> None:
    for made in combine_inputs(owner):
        fields: dict[str, object] = dict(vars(made))
        own: type = fields["handle"].__class__
        for cls in HANDLES:
            if cls is own:
                continue
            fields["handle"] = owner.handle(cls)
            error = refused(type(made), *fields.values())
            assert (error.boundary, error.field) == (type(made).__name__, "handle")
            assert error.reason == f"is of type {cls.__name__}, expected {own.__name__}"


def outputs(owner: Owner) -> list[AnyOutput]:
    return [make(owner).dispatched for make in CASES.values()]


@every_row
def test_output_of_one_in_the_way_of_another(row: Row, owner: Owner) -> None:
    """Strict mode judges the functions themselves."""
    for dispatched in outputs(owner):
        if type(dispatched) is not row.key[0]:
            error = refused(judged(row.functions[0]), dispatched, level="strict")
            assert type(dispatched).__name__ in str(error)
            assert row.key[0].__name__ in str(error)


@every_row
def test_carry_of_one_in_the_way_home_of_another(row: Row, owner: Owner) -> None:
    post = row.functions[1]
    hint: object = get_type_hints(post)["carry"]
    taken = get_origin(hint) or hint
    assert isinstance(taken, type)
    for other in ROWS:
        for dispatched in outputs(owner):
            if type(dispatched) is other.key[0]:
                carry = carry_of(other, dispatched)
                if not isinstance(carry, taken):
                    error = refused(judged(post), SummedRowsOutput(torch.zeros(6, HIDDEN)), carry, level="strict")
                    assert type(carry).__name__ in str(error)
                    assert taken.__name__ in str(error)


def carry_of(row: Row, dispatched: AnyOutput) -> Carry:
    match row.functions[0](dispatched):
        case (RunnerInput(), Carry() as carry):
            return carry
        case made:
            raise AssertionError(made)


@every_row
def test_slab_carry_of_one_library_in_the_way_home_of_another(row: Row, owner: Owner) -> None:
    """Its class is one for three libraries, and its handle says which."""
    hint = get_type_hints(row.functions[1])["carry"]
    if get_origin(hint) is not SlabCarry:
        return
    own: type[Handle[object]] = hint.__args__[0]
    for cls in HANDLES:
        carry = SlabCarry(origin(), CAPACITY, owner.handle(cls))
        output = SummedRowsOutput(torch.zeros(LOCAL * CAPACITY, HIDDEN))
        if cls is own:
            with debug("layout"):
                row.functions[1](output, carry)
        else:
            error = refused(row.functions[1], output, carry)
            assert error.reason == f"is of type {cls.__name__}, expected {own.__name__}"
            assert error.boundary == row.ends_at.__name__


def test_counts_per_expert_are_no_live_count() -> None:
    ids, weights = torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    error = refused(Routing, ids, weights, PhysicalIds, 4, Settled(), True, ReceivedPerExpert(vector(1, 2)))
    assert (error.field, error.reason) == ("live", "is of type ReceivedPerExpert, expected int | DeviceCount")

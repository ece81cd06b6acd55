"""The transition table: total, and each row what its classes and annotations say."""

import inspect
from typing import ClassVar, TypeVar, cast, get_args, get_origin, get_type_hints

import attrs
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import BoundaryError, Fp32Rows, Payload, StandardCombineInput, StandardDispatchOutput, UnsupportedError, debug, from_topk, localize
from moe_typed.runners import ReferenceRunner, Runner
from moe_typed.runners.flat_rows import standard_pre
from moe_typed.runners.posts import standard_post
from moe_typed.stages import Carry, CombineInput, DispatchOutput, FlatRowsInput, RunnerInput, RunnerOutput, StandardCarry, SummedRowsOutput
from moe_typed.table import ROWS, TRANSITIONS, UNSUPPORTED, AnyDispatchOutput, AnyRunner, Edge, Row, Unsupported, UnsupportedReason, connect, find


def finals(base: type) -> list[type]:
    """Return the concrete classes of the package under a base."""
    found: list[type] = []
    subclasses: list[type] = base.__subclasses__()
    for cls in subclasses:
        found += finals(cls)
        if not inspect.isabstract(cls) and cls.__module__.startswith("moe_typed.") and not cls.__subclasses__():
            found.append(cls)
    return found


def bare(hint: object) -> object:
    return get_origin(hint) or hint


Q = TypeVar("Q", bound=Payload)

VARIANTS, INPUTS = finals(DispatchOutput), finals(RunnerInput)
rows = pytest.mark.parametrize("row", ROWS, ids=lambda row: " to ".join(cls.__name__ for cls in row.key))


def test_the_classes_are_found() -> None:
    assert StandardDispatchOutput in VARIANTS
    assert FlatRowsInput in INPUTS


@pytest.mark.parametrize("runner_input", INPUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_pair_is_a_row_or_has_a_reason(variant: type[AnyDispatchOutput], runner_input: type[RunnerInput]) -> None:
    cell = TRANSITIONS[variant, runner_input]
    assert isinstance(cell, Row) or (cell.reason in UnsupportedReason and cell.detail)


def test_nothing_else_is_in_the_table() -> None:
    assert {variant for variant, _ in TRANSITIONS} <= set(VARIANTS)
    assert {runner_input for _, runner_input in TRANSITIONS} <= set(INPUTS)
    assert len(TRANSITIONS) == len(ROWS) + len(UNSUPPORTED)


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        cast("dict[object, object]", TRANSITIONS)[StandardDispatchOutput, FlatRowsInput] = None


def arguments_of_base(cls: type, base: type) -> tuple[object, ...]:
    """Return the type arguments with which a class derives from a generic base, through the classes between them."""
    for parent in vars(cls)["__orig_bases__"]:
        origin = get_origin(parent)
        if origin is base:
            return get_args(parent)
        if isinstance(origin, type) and issubclass(origin, base):
            parameters: tuple[object, ...] = getattr(origin, "__parameters__")  # noqa: B009  typing makes it
            given = dict(zip(parameters, get_args(parent), strict=True))
            return tuple(given.get(argument, argument) for argument in arguments_of_base(origin, base))
    raise AssertionError(f"{cls} does not derive from {base}")


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_combine_class_of_a_variant_is_its_type_argument(variant: type[AnyDispatchOutput]) -> None:
    payload, combine_input = arguments_of_base(variant, DispatchOutput)
    assert isinstance(payload, TypeVar)
    assert variant.combine_input is combine_input


@rows
def test_a_row_ends_at_the_combine_class_of_its_variant(row: Row) -> None:
    assert row.ends_at is row.key[0].combine_input


@rows
def test_the_annotations_of_pre_and_post_are_those_of_the_row(row: Row) -> None:
    variant, runner_input = row.key
    pre, post = row.functions
    *parameters, to = get_type_hints(pre).values()
    assert list(map(bare, parameters)) == [variant]
    assert get_args(parameters[0]) == (Payload,)  # a row moves any payload
    assert bare(to) is tuple
    made, carry = get_args(to)
    assert bare(made) is runner_input

    *parameters, end = get_type_hints(post).values()
    output, carried = parameters
    assert bare(end) is row.ends_at
    assert carried == carry  # what pre leaves is what post takes
    for cls, base in ((carry, Carry), (output, RunnerOutput)):
        bare_cls = bare(cls)
        assert isinstance(bare_cls, type)
        assert issubclass(bare_cls, base)


@rows
def test_a_carry_belongs_to_one_combine_class(row: Row) -> None:
    def carry_of(other: Row) -> object:
        return get_args(get_type_hints(other.functions[0])["return"])[1]

    assert {other.ends_at for other in ROWS if carry_of(other) == carry_of(row)} == {row.ends_at}


@attrs.frozen(eq=False)
class Foreign(Runner[FlatRowsInput, SummedRowsOutput]):
    """A runner with inputs of its own."""

    name: ClassVar[str] = "foreign"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = ()

    @override
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput:
        raise NotImplementedError


class NoInput(RunnerInput):
    pass


class OtherInput(RunnerInput):
    pass


@attrs.frozen(eq=False)
class Stranger(Foreign):
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (NoInput, OtherInput)


@attrs.frozen(eq=False)
class Choosy(Foreign):
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (NoInput, FlatRowsInput)


class NoDispatch(DispatchOutput[Payload, CombineInput]):
    @property
    @override
    def live_rows(self) -> Tensor | None:
        raise NotImplementedError

    @override
    def with_payload(self, payload: Q) -> DispatchOutput[Q, CombineInput]:
        raise NotImplementedError


def test_no_way_names_both_sides_and_every_cell_and_changes_nothing() -> None:
    before = dict(TRANSITIONS)
    runner: AnyRunner = Stranger()
    with pytest.raises(UnsupportedError) as caught:
        find(StandardDispatchOutput, runner)
    assert str(caught.value) == (
        "the runner 'foreign' has no way from StandardDispatchOutput: NoInput: not in the table; OtherInput: not in the table"
    )
    with pytest.raises(UnsupportedError, match="'foreign' has no way from NoDispatch: NoInput: not in the table; FlatRowsInput: not in the table"):
        connect(NoDispatch, Choosy())
    assert before == TRANSITIONS


def test_the_first_input_with_a_row_is_taken() -> None:
    assert find(StandardDispatchOutput, Choosy()) is TRANSITIONS[StandardDispatchOutput, FlatRowsInput]


def test_an_unsupported_cell_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Unsupported(UnsupportedReason.LAYOUT, "rows lie in slabs")
    monkeypatch.setattr("moe_typed.table.TRANSITIONS", {(StandardDispatchOutput, NoInput): cell})
    with pytest.raises(UnsupportedError, match=rf"NoInput: {UnsupportedReason.LAYOUT.value} \(rows lie in slabs\); OtherInput: not in the table"):
        find(StandardDispatchOutput, Stranger())


def test_a_row_is_keyed_by_the_bare_classes() -> None:
    row = Edge(StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput).pre(standard_pre).post(standard_post)
    assert row.key == (StandardDispatchOutput, FlatRowsInput)
    assert row.functions == (standard_pre, standard_post)


@attrs.frozen(eq=False)
class Zeros(Foreign):
    @override
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput:
        return SummedRowsOutput(torch.zeros_like(runner_input.payload.data))


def test_the_oracle_judges_what_pre_returns_and_post_takes() -> None:
    def pre(dispatched: StandardDispatchOutput[Payload]) -> tuple[FlatRowsInput, StandardCarry]:
        return FlatRowsInput(dispatched.payload, dispatched.routing), cast("StandardCarry", dispatched.routing)

    edge = Edge(StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput)
    foreign_carry, own_carry = edge.pre(pre).post(standard_post), edge.pre(standard_pre).post(standard_post)
    routing = from_topk(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1), 1)
    dispatched = StandardDispatchOutput(Fp32Rows(torch.zeros(1, 4)), localize(routing, 0, 1))
    with debug("strict"):
        assert isinstance(own_carry.using(Zeros())(dispatched), StandardCombineInput)
        with pytest.raises(BoundaryError, match="StandardCarry"):
            foreign_carry.using(Zeros())(dispatched)


def test_the_reference_runner_takes_what_the_table_has() -> None:
    assert all((StandardDispatchOutput, runner_input) in TRANSITIONS for runner_input in ReferenceRunner.inputs)

"""Handles: usable once, by their owner, and never forgotten without a word."""

import gc
import logging
import warnings

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import (
    Bf16Rows,
    BoundaryError,
    Dispatcher,
    Experts,
    Fp32ExpertWeights,
    GateUp,
    LogicalIds,
    Routing,
    debug,
    from_topk,
    localize,
    prepare_reference,
)
from moe_typed.stages import (
    DeepEPNormalCombineInput,
    DeepEPNormalDispatchOutput,
    DeepEPNormalHandle,
    DispatchOutput,
    Handle,
    HandleError,
    HandleWarning,
)
from tests.stages.support import CASES, HANDLES, Owner

every_class = pytest.mark.parametrize("cls", HANDLES, ids=lambda cls: cls.__name__)


class Library:
    """An owner that has a name."""

    @override
    def __repr__(self) -> str:
        return "<the dispatcher>"


def handle(owner: object, value: tuple[object, ...] = ("value",)) -> DeepEPNormalHandle:
    return DeepEPNormalHandle(value, owner)


def test_the_classes_are_found() -> None:
    assert {DeepEPNormalHandle} < {*HANDLES}


@every_class
def test_the_owner_gets_the_value_once(cls: type[Handle[object]], owner: Owner) -> None:
    made = owner.handle(cls)
    assert made.open
    assert made.consume(owner) == ("what the library returned",)
    assert not made.open
    with pytest.raises(HandleError, match=f"{cls.__name__} was consumed already; a dispatch is combined once"):
        made.consume(owner)


def test_another_owner_is_named_and_changes_nothing() -> None:
    library, stranger = Library(), object()
    made = handle(library)
    with pytest.raises(HandleError) as caught:
        made.consume(stranger)
    assert str(caught.value) == (
        f"DeepEPNormalHandle was made by <the dispatcher>, and {stranger!r} cannot use it: combine with the dispatcher that dispatched"
    )
    assert made.open
    assert made.consume(library) == ("value",)


def test_an_owner_is_one_object_and_not_its_equal() -> None:
    owner, equal = [1], [1]
    made = handle(owner)
    with pytest.raises(HandleError, match="cannot use it"):
        made.consume(equal)
    made.consume(owner)


def test_after_an_error_the_handle_says_which() -> None:
    library = Library()
    made = handle(library)
    made.fail(ValueError("out of memory"))
    assert not made.open
    with pytest.raises(HandleError, match=r"DeepEPNormalHandle ended with an error \(ValueError: out of memory\); a dispatch is combined once"):
        made.consume(library)


def test_after_a_discard_the_handle_says_why() -> None:
    library = Library()
    made = handle(library)
    made.discard("warm-up")
    with pytest.raises(HandleError, match=r"was discarded \(warm-up\)"):
        made.consume(library)


def test_an_end_is_told_before_a_wrong_owner() -> None:
    made = handle(Library())
    made.discard("warm-up")
    with pytest.raises(HandleError, match="was discarded"):
        made.consume(object())


# ---- never used ----------------------------------------------------------------------------------------------------------------------


@every_class
def test_a_handle_that_is_never_used_warns_and_logs(cls: type[Handle[object]], caplog: pytest.LogCaptureFixture) -> None:
    made = [cls(("value",), Library())]
    text = f"{cls.__name__} was never consumed: combine each dispatch, or discard its handle with a reason"
    with caplog.at_level(logging.WARNING, "moe_typed.stages"), pytest.warns(HandleWarning) as caught:
        made.clear()
    assert [str(warning.message) for warning in caught] == [text]
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [("moe_typed.stages", "WARNING", text)]


def test_a_handle_in_a_cycle_warns_when_it_is_collected(caplog: pytest.LogCaptureFixture) -> None:
    cycle: list[object] = []
    cycle += [cycle, handle(cycle)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del cycle  # nothing yet
    with pytest.warns(HandleWarning, match="never consumed"):
        gc.collect()


@pytest.mark.parametrize("end", ["consume", "fail", "discard"])
def test_a_handle_that_ended_says_nothing(end: str, caplog: pytest.LogCaptureFixture) -> None:
    library = Library()
    made = handle(library)
    match end:
        case "consume":
            made.consume(library)
        case "fail":
            made.fail(ValueError())
        case _:
            made.discard("warm-up")
    with warnings.catch_warnings(record=True) as caught, caplog.at_level(logging.WARNING, "moe_typed.stages"):
        warnings.simplefilter("always")
        del made
        gc.collect()
    assert caught == []
    assert caplog.records == []


def test_a_handle_that_was_never_made_says_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = DeepEPNormalHandle.__new__(DeepEPNormalHandle)
        del made
        gc.collect()
    assert caught == []


# ---- ended by the stages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_dispatch_output_ends_its_handle(name: str, owner: Owner) -> None:
    CASES[name](owner).dispatched.fail(ValueError("no memory"))
    assert len(owner.made) == (name != "standard")
    for made in owner.made:
        with pytest.raises(HandleError, match="ValueError: no memory"):
            made.consume(owner)


class OneRank(Dispatcher[Bf16Rows, Bf16Rows, DeepEPNormalCombineInput]):
    """Rows stay where they are, but with a handle."""

    def __init__(self) -> None:
        self.handles: list[DeepEPNormalHandle] = []

    @property
    @override
    def variant(self) -> type[DispatchOutput[Bf16Rows, DeepEPNormalCombineInput]]:
        return DeepEPNormalDispatchOutput

    @property
    @override
    def payload(self) -> type[Bf16Rows]:
        return Bf16Rows

    @override
    def dispatch(self, rows: Bf16Rows, routing: Routing[LogicalIds]) -> DeepEPNormalDispatchOutput[Bf16Rows]:
        self.handles.append(DeepEPNormalHandle((), self))
        return DeepEPNormalDispatchOutput(rows, localize(routing, 0, routing.num_experts), None, self.handles[-1])

    @override
    def combine(self, combine_input: DeepEPNormalCombineInput) -> Tensor:
        combine_input.handle.consume(self)
        return combine_input.hidden_states


ROUTING = from_topk(torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), 1)


@pytest.mark.parametrize(("level", "error"), [("off", RuntimeError), ("layout", BoundaryError)])
def test_experts_that_raise_end_the_dispatch(level: str, error: type[Exception]) -> None:
    """The rows are wider than the weights: torch says so, or with debug on a boundary."""
    dispatcher = OneRank()
    weights = Fp32ExpertWeights(torch.ones(1, 4, 8), torch.ones(1, 8, 2), GateUp)
    layer = dispatcher.then(Experts(prepare_reference(weights)))
    with debug("layout" if level == "layout" else "off"):
        with pytest.raises(error):
            layer(Bf16Rows(torch.ones(2, 16, dtype=torch.bfloat16)), ROUTING)
        with pytest.raises(HandleError, match=rf"ended with an error \({error.__name__}: "):
            dispatcher.handles[0].consume(dispatcher)
        got = layer(Bf16Rows(torch.ones(2, 8, dtype=torch.bfloat16)), ROUTING)  # the layer lives on
    assert got.shape == (2, 8)
    assert not dispatcher.handles[1].open
    with pytest.raises(HandleError, match="was consumed already"):
        dispatcher.handles[1].consume(dispatcher)

"""Every row of the table from end to end: what arrives at combine is what a loop over routes gives, and nothing of rows that are not live."""

from collections.abc import Callable
from typing import ClassVar, cast, final

import attrs
import pytest
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import Bf16Rows, Experts, Fp16Rows, Fp32ExpertWeights, Fp32Rows, GateUp, Payload, SiluAndMul, debug, prepare_reference
from moe_typed.formats import Fp8Block128Rows, Fp8Block128SlabRows, GateUpOrder, relayouts, upscalers
from moe_typed.routing import from_sink, live_mask, localize_by_map, map_of
from moe_typed.runners import ReferenceRunner, Runner
from moe_typed.runners.aiter.rows import standard_to_aiter
from moe_typed.runners.posts import standard_post
from moe_typed.stages import (
    AiterSinkInput,
    AiterSlotInput,
    Carry,
    CombineInput,
    DeepEPLLCombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    FlatRowsInput,
    LiveRowsOutput,
    MoriEPNormalCombineInput,
    MoriEPNormalDispatchOutput,
    ReceivedPerExpert,
    RunnerInput,
    SegmentRowsInput,
    SlabRowsInput,
    StandardCombineInput,
    StandardDispatchOutput,
    SummedRowsOutput,
)
from moe_typed.table import ROWS as ALL_ROWS
from moe_typed.table import AnyRunner, Row
from tests.formats.support import slab
from tests.stages.support import (
    CAPACITY,
    CASES,
    HIDDEN,
    LOCAL,
    NAN,
    PENDING,
    AnyOutput,
    Case,
    Owner,
    local,
    mori_normal_staged,
    origin,
    random,
    standard,
    vector,
)

INTER = 4
ROWS = [row for row in ALL_ROWS if ".ascend." not in row.functions[0].__module__]  # those of the NPU have tests of their own


def expert_weights(hidden: int = HIDDEN) -> Fp32ExpertWeights[GateUpOrder]:
    w13, w2 = random(LOCAL, 2 * INTER, hidden, seed=1), random(LOCAL, hidden, INTER, seed=2)
    return Fp32ExpertWeights(w13, w2, GateUp)


def reference(weights: Fp32ExpertWeights[GateUpOrder]) -> ReferenceRunner:
    return ReferenceRunner(weights, SiluAndMul(), torch.float32)


@final
@attrs.frozen(eq=False)
class SinkRunner(Runner[AiterSinkInput, SummedRowsOutput]):
    """As AITER reads rows with a sink: every row is computed, whatever the routing says of live ones, and routes to the sink are dropped."""

    name: ClassVar[str] = "sink"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (AiterSinkInput,)
    weights: Fp32ExpertWeights[GateUpOrder]

    @override
    def run(self, runner_input: AiterSinkInput, /) -> SummedRowsOutput:
        given = from_sink(runner_input.routing)
        with debug("off"):  # weights of routes to the sink may be anything
            routing = local(given.topk_ids, given.topk_weights, given.topk_ids.shape[0])
            return reference(self.weights).run(FlatRowsInput(runner_input.payload, routing))


@final
@attrs.frozen(eq=False)
class SlotRunner(Runner[AiterSlotInput, LiveRowsOutput]):
    """As AITER reads rows with slots: what the mask does not mark is dropped, and rows that are not live are left undefined."""

    name: ClassVar[str] = "slot"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (AiterSlotInput,)
    weights: Fp32ExpertWeights[GateUpOrder]

    @override
    def run(self, runner_input: AiterSlotInput, /) -> LiveRowsOutput:
        routing = localize_by_map(runner_input.routing, map_of(runner_input.mask, LOCAL))
        made = reference(self.weights).run(FlatRowsInput(runner_input.payload, routing)).hidden_states
        made = torch.where(live_mask(runner_input.routing), made, NAN).to(runner_input.out_dtype)
        return LiveRowsOutput(made if runner_input.output is None else runner_input.output.copy_(made))


@final
@attrs.frozen(eq=False)
class PlaceRunner(Runner[SlabRowsInput | SegmentRowsInput, LiveRowsOutput]):
    """As rows are read that lie by expert: each expert goes through its own, and the results of the others are left undefined."""

    name: ClassVar[str] = "place"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (SlabRowsInput, SegmentRowsInput)
    weights: Fp32ExpertWeights[GateUpOrder]

    @override
    def run(self, runner_input: SlabRowsInput | SegmentRowsInput, /) -> LiveRowsOutput:
        rows = runner_input.payload.dequantize()
        made = torch.full_like(rows, NAN)
        end = 0
        for number in range(LOCAL):
            if isinstance(runner_input, SlabRowsInput):
                first = number * runner_input.capacity
                end = first + int(runner_input.received.counts[number])
            else:
                first = -(-end // runner_input.segments.alignment) * runner_input.segments.alignment
                end = int(runner_input.segments.ends[number])
            for row in range(first, end):
                weight = 1.0 if isinstance(runner_input, SlabRowsInput) else float(runner_input.slot_weights[row])
                made[row] = weight * expert(self.weights, number, rows[row]).float()
        return LiveRowsOutput(made)


def through(row: Row, weights: Fp32ExpertWeights[GateUpOrder]) -> Callable[[AnyOutput], CombineInput]:
    """Return the experts' part of a layer by one row of the table."""
    runners: dict[type[RunnerInput], Callable[[Fp32ExpertWeights[GateUpOrder]], AnyRunner]]
    runners = {FlatRowsInput: reference, AiterSinkInput: SinkRunner, AiterSlotInput: SlotRunner}
    runners |= {SlabRowsInput: PlaceRunner, SegmentRowsInput: PlaceRunner}
    return cast("Callable[[AnyOutput], CombineInput]", row.bind(runners[row.key[1]](weights)))


def result_of(made: CombineInput) -> Tensor:
    """Return the expert results of a combine input as (rows, hidden)."""
    found: Tensor = vars(made)["hidden_states"]
    return found.flatten(0, -2)


def expert(weights: Fp32ExpertWeights[GateUpOrder], number: int, row: Tensor) -> Tensor:
    gate, up = (weights.w13[number].double() @ row.double()).chunk(2)
    return weights.w2[number].double() @ (gate * torch.sigmoid(gate) * up)


def compare(made: CombineInput, case: Case, weights: Fp32ExpertWeights[GateUpOrder]) -> None:
    """Compare what arrives at combine with a loop over the routes of each live row."""
    got, rows = result_of(made), case.dispatched.payload.dequantize()
    assert got.shape == rows.shape
    for row, routes in enumerate(case.routes):
        if routes is None:
            continue
        total = torch.zeros(rows.shape[1], dtype=torch.float64)
        for number, weight in routes:
            total += weight * expert(weights, number, rows[row])
        torch.testing.assert_close(got[row].double(), total, rtol=2.0**-7, atol=2.0**-7)


def cases_of(row: Row, owner: Owner) -> list[Case]:
    made = [make(owner) for make in CASES.values()]
    return [case for case in made if type(case.dispatched) is row.key[0]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " to ".join(cls.__name__ for cls in row.key))
@pytest.mark.parametrize("level", ["off", "strict"])
def test_what_arrives_at_combine_is_the_loop(row: Row, level: str, owner: Owner) -> None:
    weights, cases = expert_weights(), cases_of(row, owner)
    assert cases
    for case in cases:
        with debug("strict" if level == "strict" else "off"):
            made = through(row, weights)(case.dispatched)
        assert type(made) is row.ends_at
        compare(made, case, weights)


def test_rows_that_go_nowhere_give_zeros_where_a_library_sums_them_all(owner: Owner) -> None:
    """Standard and DeepEP's normal mode read every row that is there."""
    for row in ROWS:
        if row.key[1] is not AiterSlotInput and row.functions[1].__annotations__["output"] is SummedRowsOutput:
            for case in cases_of(row, owner):
                got = result_of(run(row, case))
                assert not got[[not routes for routes in case.routes]].any()


def run(row: Row, case: Case) -> CombineInput:
    return through(row, expert_weights())(case.dispatched)


# What combine needs beside the results: the same objects that dispatch returned.
KEPT = ("origin", "handle", "scaling", "routing")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " to ".join(cls.__name__ for cls in row.key))
def test_what_combine_needs_comes_through_untouched(row: Row, owner: Owner) -> None:
    for case in cases_of(row, owner):
        made, given = vars(run(row, case)), vars(case.dispatched)
        for name in {*made} & {*KEPT}:
            assert made[name] is (given[name] if name in given else given["routing"].scaling)
        assert {*made} - {*KEPT} == {"hidden_states"}
        if "handle" in made:
            assert made["handle"].open
            assert made["hidden_states"].dtype == torch.bfloat16  # libraries combine nothing else


@pytest.mark.parametrize("row", ROWS, ids=lambda row: " to ".join(cls.__name__ for cls in row.key))
def test_the_rows_are_not_copied_on_the_way_in(row: Row, owner: Owner) -> None:
    for case in cases_of(row, owner):
        match row.functions[0](case.dispatched):
            case (RunnerInput() as runner_input, Carry()):
                assert vars(runner_input)["payload"] is case.dispatched.payload
            case made:
                raise AssertionError(made)


def test_a_slab_comes_home_in_its_shape(owner: Owner) -> None:
    for row in ROWS:
        for case in cases_of(row, owner):
            if "capacity" in vars(case.dispatched):
                assert vars(run(row, case))["hidden_states"].shape == (LOCAL, CAPACITY, HIDDEN)


def test_a_result_in_staging_memory_stays_there(owner: Owner) -> None:
    case = mori_normal_staged(owner)
    assert isinstance(case.dispatched, MoriEPNormalDispatchOutput)
    row = next(row for row in ROWS if row.key == (MoriEPNormalDispatchOutput, AiterSlotInput))
    made = run(row, case)
    assert isinstance(made, MoriEPNormalCombineInput)
    assert case.dispatched.staging is not None
    assert made.hidden_states.data_ptr() == case.dispatched.staging.data_ptr()


@pytest.mark.parametrize(
    ("payload", "out_dtype"),
    [
        (Bf16Rows(torch.zeros(5, HIDDEN, dtype=torch.bfloat16)), torch.bfloat16),
        (Fp16Rows(torch.zeros(5, HIDDEN, dtype=torch.float16)), torch.float16),
        (Fp32Rows(torch.zeros(5, HIDDEN)), torch.bfloat16),
        (Fp8Block128Rows(torch.zeros(5, 128).to(torch.float8_e4m3fn), torch.ones(5, 1)), torch.bfloat16),
    ],
    ids=["bf16", "fp16", "fp32", "fp8"],
)
def test_aiter_writes_the_dtype_of_the_model_where_it_can(payload: Payload, out_dtype: torch.dtype, owner: Owner) -> None:
    dispatched = standard(owner).dispatched.with_payload(payload)
    assert isinstance(dispatched, StandardDispatchOutput)
    assert standard_to_aiter(dispatched)[0].out_dtype == out_dtype


def test_the_weights_of_a_slab_stay_pending(owner: Owner) -> None:
    """The same slab under other router weights gives the same combine input but for those."""
    row = next(row for row in ROWS if row.key == (DeepEPLLDispatchOutput, FlatRowsInput))
    case = next(iter(cases_of(row, owner)))
    assert isinstance(case.dispatched, DeepEPLLDispatchOutput)
    other = attrs.evolve(case.dispatched, origin=attrs.evolve(origin(), topk_weights=torch.full((3, 2), 7.0)))
    one, two = run(row, case), run(row, Case(other, case.routes))
    assert isinstance(one, DeepEPLLCombineInput)
    assert isinstance(two, DeepEPLLCombineInput)
    live = [routes is not None for routes in case.routes]
    assert torch.equal(result_of(one)[live], result_of(two)[live])
    assert two.origin is other.origin


@pytest.mark.parametrize("convert", [relayouts.slab_to_row, upscalers.fp32], ids=lambda conversion: conversion.name)
def test_a_quantised_slab_may_be_converted_before_the_experts(convert: object, owner: Owner) -> None:
    """Stale rows hold NaN in data and scales."""
    data = random(LOCAL * CAPACITY, 128)
    payload = slab(Fp8Block128SlabRows, data, LOCAL, CAPACITY)
    assert isinstance(payload, Fp8Block128SlabRows)
    payload.data.view(torch.uint8)[1:3] = 0x7F
    payload.scale[0, 1:] = NAN
    dispatched = DeepEPLLDispatchOutput(payload, ReceivedPerExpert(vector(1, 3)), CAPACITY, 2, origin(), owner.handle(DeepEPLLHandle))
    routes: list[list[tuple[int, float]] | None] = [[(0, 1.0)], None, None, *[[(1, 1.0)]] * 3]
    weights = expert_weights(128)
    row = next(row for row in ROWS if row.key == (DeepEPLLDispatchOutput, FlatRowsInput))
    with debug("strict"):
        if convert is upscalers.fp32:
            made: CombineInput = Experts(prepare_reference(weights)).accepting(upscalers.fp32)(dispatched)
        else:  # no reference weights take both float32 rows and these
            made = through(row, weights)(dispatched.with_payload(relayouts.slab_to_row.run(payload)))
    assert isinstance(made, DeepEPLLCombineInput)
    assert made.handle is dispatched.handle
    compare(made, Case(dispatched, routes), weights)


def test_the_factor_of_standard_is_settled_by_its_combine(owner: Owner) -> None:
    with debug("strict"):
        made = standard_post(SummedRowsOutput(torch.ones(2, HIDDEN)), standard_to_aiter(as_standard(standard(owner)))[1])
    assert type(made) is StandardCombineInput
    assert made.scaling is PENDING


def as_standard(case: Case) -> StandardDispatchOutput[Payload]:
    assert isinstance(case.dispatched, StandardDispatchOutput)
    return case.dispatched

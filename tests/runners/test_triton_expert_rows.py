"""Rows that lie by expert, straight into both Triton runners: against the reference, and nothing of what is stale or in gaps."""

from collections.abc import Callable
from functools import partial
from typing import cast

import attrs
import pytest
import torch

from moe_typed import BoundaryError, GateUp, Payload, debug
from moe_typed.formats import ExpertWeights, GateUpOrder
from moe_typed.ops.product_plans.choose import Layer, Plans
from moe_typed.ops.product_plans.spec import How, Plan, Tile
from moe_typed.runners import OpaqueActivation, ThenNorm
from moe_typed.runners.triton.general import TritonGeneralRunner
from moe_typed.runners.triton.in_place import plan_for, weights_of
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.stages import LiveRowsOutput, ReceivedPerExpert, SegmentEnds, SegmentRowsInput, SlabRowsInput
from tests.ops.support import on_cpu, on_cuda
from tests.runners import triton_formats_support as formats
from tests.runners.expert_rows_support import ExpertRowsInput, Placed, place_segments, place_slab
from tests.runners.triton_support import HIDDEN, SILU, TOLERANCE, make_payload, make_runner, make_weights, one_target_a_device, row_norms, targets

COUNTS = ([1, 2, 0, 3], [0, 0, 0, 0], [0, 0, 20, 0], [20, 20, 20, 20], [17, 0, 1, 16])
EXPECTED = (1, 20, 40, 100)  # tiles of 16, 32 and 64 rows, and where there is one the wide kernel


def placed(fmt: str, device: str, layout: str, counts: list[int], expected: int = 4, most: int | None = None) -> Placed:
    rows_of = partial(make_payload, fmt)
    if layout == "slab":
        return place_slab(rows_of, device, counts, 20, HIDDEN, expected=expected, most=most)
    return place_segments(rows_of, device, counts, int(layout), HIDDEN, expected=expected)


layouts = pytest.mark.parametrize("layout", ["slab", "1", "4", "128"])
both = pytest.mark.parametrize("layout", ["slab", "4"])

# ---- what is computed -----------------------------------------------------------------------------------------------------------


@targets
@layouts
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_matches_the_reference(device: str, fmt: str, layout: str, counts: list[int]) -> None:
    weights, case = make_weights(fmt, device, 4, biased=True), placed(fmt, device, layout, counts)
    output = make_runner(weights, SILU).run(case.runner_input)
    assert isinstance(output, LiveRowsOutput)
    case.check(output.hidden_states, weights, TOLERANCE[fmt])


@one_target_a_device
@both
@pytest.mark.parametrize("expected", EXPECTED)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_wrong_hint_costs_no_row(device: str, fmt: str, layout: str, counts: list[int], expected: int) -> None:
    """Whatever the plan makes of the hint; and with a bound above what came, too."""
    weights, case = make_weights(fmt, device, 4, biased=True), placed(fmt, device, layout, counts, expected, most=80)
    case.check(make_runner(weights, SILU).run(case.runner_input).hidden_states, weights, TOLERANCE[fmt])


@formats.every_format
@both
def test_every_format_of_weights(device: str, fmt: str, rows_fmt: str, layout: str) -> None:
    activation = formats.default_activation(fmt)
    weights, counts = formats.make_weights(fmt, device, 4, biased=True), [17, 0, 1, 16]
    rows_of = formats.ROWS[rows_fmt]
    case = (
        place_slab(rows_of, device, counts, 20, formats.HIDDEN)
        if layout == "slab"
        else place_segments(rows_of, device, counts, int(layout), formats.HIDDEN)
    )
    found = formats.make_runner(weights, activation).run(case.runner_input).hidden_states
    case.check(found, weights, formats.TOLERANCE[rows_fmt], activation)


@pytest.mark.parametrize(("device", "rows_fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
@both
@pytest.mark.parametrize("normed", [False, True])
def test_functions_that_no_kernel_knows(device: str, rows_fmt: str, layout: str, normed: bool) -> None:
    """A norm of an expert's result comes before the router's weight."""
    inner = OpaqueActivation(lambda joined: torch.tanh(joined[..., ::2]) * joined[..., 1::2].flip(-1), GateUp, torch.float32, "of tanh")
    activation = ThenNorm(inner, lambda rows: rows / row_norms(rows).unsqueeze(1), torch.float32) if normed else inner
    weights, counts, rows_of = formats.make_weights("int8-channel", device, 4, biased=True), [17, 0, 1, 16], formats.ROWS[rows_fmt]
    case = (
        place_slab(rows_of, device, counts, 20, formats.HIDDEN)
        if layout == "slab"
        else place_segments(rows_of, device, counts, int(layout), formats.HIDDEN)
    )
    found = formats.make_runner(weights, activation).run(case.runner_input).hidden_states
    case.check(found, weights, formats.TOLERANCE[rows_fmt], activation)


@one_target_a_device
def test_no_rows_at_all(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 3)
    case = place_segments(partial(make_payload, fmt), device, [0, 0, 0], 4, HIDDEN, behind=0)
    found = make_runner(weights, SILU).run(case.runner_input).hidden_states
    assert found.shape == (0, HIDDEN)


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cuda", name, marks=on_cuda) for name in ("bf16", "fp8-block128")])
@pytest.mark.parametrize("expected", [2, 128])
@pytest.mark.parametrize("layout", ["slab", "128"])
def test_a_layer_of_a_real_size(device: str, fmt: str, layout: str, expected: int) -> None:
    hidden, counts = 2048, [int(count) for count in torch.randint(0, 200, (16,), generator=torch.Generator().manual_seed(1))]
    weights, rows_of = make_weights(fmt, device, 16, hidden=hidden, inter=768), partial(make_payload, fmt)
    case = (
        place_slab(rows_of, device, counts, 256, hidden, expected=expected, most=16 * 256)
        if layout == "slab"
        else place_segments(rows_of, device, counts, 128, hidden, expected=expected)
    )
    case.check(make_runner(weights, SILU).run(case.runner_input).hidden_states, weights, TOLERANCE[fmt])


@one_target_a_device
@both
def test_two_runs_agree_to_the_bit(device: str, fmt: str, layout: str) -> None:
    runner, case = make_runner(make_weights(fmt, device, 4), SILU), placed(fmt, device, layout, [17, 0, 1, 16])
    live = case.experts >= 0
    first, second = (runner.run(case.runner_input).hidden_states[live] for _ in range(2))
    assert torch.equal(first, second)


# ---- which plan -----------------------------------------------------------------------------------------------------------------

HALF = Layer(torch.bfloat16, 4, 256, 128, interleaved=False)


def hinted(expected: int, most: int = 10_000) -> SlabRowsInput:
    case = place_slab(partial(make_payload, "fp32"), "cpu", [0, 0, 0, 0], 3, 8, expected=expected, most=most)
    assert isinstance(case.runner_input, SlabRowsInput)
    return case.runner_input


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("expected", "rows"), [(0, 32), (1, 32), (16, 32), (17, 64), (32, 64), (33, 128), (47, 128), (48, 128), (10_000, 128)])
def test_the_plan_is_for_twice_what_is_expected_and_never_by_single_rows(expected: int, rows: int, wide: bool) -> None:
    plan = plan_for(Plans(HALF, wide, {}), hinted(expected, 40_000))
    assert plan.how is (How.WIDE if wide and expected >= 48 else How.SORTED)
    assert plan.up.rows == rows


def test_a_hint_above_the_bound_counts_as_the_bound() -> None:
    assert plan_for(Plans(HALF, True, {}), hinted(10_000, most=8)).up.rows == 32


def test_tiles_are_the_layer_s_own_where_they_were_measured() -> None:
    own = Plan(How.SORTED, Tile(32, 64, 128, 4, 3), Tile(32, 128, 128, 4, 3))
    others = Plan(How.WALK, Tile(32, 16, 16, 4, 1), Tile(32, 16, 16, 4, 1)), Plan(How.SORTED, Tile(16, 16, 16, 4, 1), Tile(16, 16, 16, 4, 1))
    plans = Plans(HALF, False, {8: ((8, others[0]), (64, others[1]), (512, own))})
    assert plan_for(plans, hinted(4)) == own
    assert plan_for(plans, hinted(30)) == Plans(HALF, False, {}).by_rule(240, 1)


def test_what_was_measured_for_one_route_a_row_is_taken_for_the_rows_that_are_expected() -> None:
    few, many = (Plan(how, Tile(rows, 64, 64, 4, 3), Tile(rows, 64, 64, 4, 3)) for how, rows in ((How.SORTED, 16), (How.WIDE, 128)))
    by_single_rows = Plan(How.VECTOR, Tile(1, 8, 512, 4, 1), Tile(1, 8, 512, 4, 1))
    plans = Plans(HALF, True, {1: ((8, by_single_rows), (64, few), (512, many))})
    assert plan_for(plans, hinted(16)) == few
    assert plan_for(plans, hinted(17)) == many
    assert plan_for(plans, hinted(1)).how is How.SORTED  # never row by row
    assert plan_for(plans, hinted(10_000)).how is How.WIDE


def test_the_weights_of_segments_are_those_of_their_slots() -> None:
    segments = place_segments(partial(make_payload, "fp32"), "cpu", [1, 2], 4, 8).runner_input
    assert isinstance(segments, SegmentRowsInput)
    assert weights_of(segments) is segments.slot_weights
    assert weights_of(hinted(1)) is None


# ---- what is refused ------------------------------------------------------------------------------------------------------------


def general(device: str) -> TritonGeneralRunner:
    return formats.make_runner(formats.make_weights("int8-channel", device, 4), SILU)


def tuned(device: str) -> TritonRunner:
    runner = make_runner(make_weights("fp32", device, 4), SILU)
    assert isinstance(runner, TritonRunner)
    return runner


devices = pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])


@devices
@both
@pytest.mark.parametrize("make", [general, tuned])
@pytest.mark.parametrize("level", ["off", "layout"])
def test_rows_of_other_experts_than_the_weights_are_refused_even_with_debug_off(
    device: str, layout: str, make: Callable[[str], TritonGeneralRunner | TritonRunner], level: str
) -> None:
    """The kernels would read beyond the weights."""
    case = placed("fp32", device, layout, [1, 2, 3, 4, 5])
    with debug("off" if level == "off" else "layout"), pytest.raises(ValueError if level == "off" else BoundaryError) as caught:
        make(device).run(case.runner_input)
    assert "5" in str(caught.value)
    assert "4" in str(caught.value)


@devices
@pytest.mark.parametrize("make", [general, tuned])
def test_a_slab_of_other_rows_than_it_says_is_refused_even_with_debug_off(
    device: str, make: Callable[[str], TritonGeneralRunner | TritonRunner]
) -> None:
    """The kernels would read beyond the payload."""
    case = placed("fp32", device, "slab", [1, 2, 3, 4])
    assert isinstance(case.runner_input, SlabRowsInput)
    with debug("off"), pytest.raises(ValueError, match="4 slabs of 21 rows are 84 rows; the payload has 80"):
        make(device).run(attrs.evolve(case.runner_input, capacity=21))


@devices
@pytest.mark.parametrize("make", [general, tuned])
@pytest.mark.parametrize("alignment", [0, -4])
def test_segments_that_begin_nowhere_are_refused_even_with_debug_off(
    device: str, make: Callable[[str], TritonGeneralRunner | TritonRunner], alignment: int
) -> None:
    """The kernels would read before the payload."""
    case = placed("fp32", device, "4", [1, 2, 3, 4])
    assert isinstance(case.runner_input, SegmentRowsInput)
    with debug("off"), pytest.raises(ValueError, match=f"segments begin at multiples of {alignment}; 1 says"):
        make(device).run(attrs.evolve(case.runner_input, segments=SegmentEnds(case.runner_input.segments.ends, alignment)))


@devices
@pytest.mark.parametrize("make", [general, tuned])
def test_weights_of_other_rows_than_the_payload_s_are_refused_even_with_debug_off(
    device: str, make: Callable[[str], TritonGeneralRunner | TritonRunner]
) -> None:
    """The kernels would read beyond the weights."""
    case = placed("fp32", device, "4", [1, 2, 3, 4])
    assert isinstance(case.runner_input, SegmentRowsInput)
    rows = case.runner_input.payload.rows
    with debug("off"), pytest.raises(ValueError, match=rf"the payload has {rows} rows, their weights are \[{rows - 1}\]"):
        make(device).run(attrs.evolve(case.runner_input, slot_weights=case.runner_input.slot_weights[1:]))


@devices
@both
@pytest.mark.parametrize("make", [general, tuned])
def test_rows_of_another_width_are_refused(device: str, layout: str, make: Callable[[str], TritonGeneralRunner | TritonRunner]) -> None:
    rows_of, counts = partial(make_payload, "fp32"), [1, 2, 3, 4]
    wide = (
        place_slab(rows_of, device, counts, 20, 2 * HIDDEN) if layout == "slab" else place_segments(rows_of, device, counts, int(layout), 2 * HIDDEN)
    )
    with debug("layout"), pytest.raises(BoundaryError, match="hidden"):
        make(device).run(wide.runner_input)


# ---- compiled and captured ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "fmt", "backend"),
    [
        pytest.param("cpu", "fp32", "aot_eager", marks=on_cpu),
        pytest.param("cuda", "bf16", "inductor", marks=on_cuda),
        pytest.param("cuda", "fp8-block128", "inductor", marks=on_cuda),
    ],
)
@both
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, while it compiles
def test_compiles_as_one_graph(device: str, fmt: str, backend: str, layout: str) -> None:
    runner, case = make_runner(make_weights(fmt, device, 4), SILU), placed(fmt, device, layout, [17, 0, 1, 16])

    def layer(payload: Payload, held: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if isinstance(case.runner_input, SlabRowsInput):
            runner_input: ExpertRowsInput = SlabRowsInput(payload, ReceivedPerExpert(held), 20, 80, 4)
        else:
            runner_input = SegmentRowsInput(payload, SegmentEnds(held, 4), weights, 4)
        return runner.run(runner_input).hidden_states

    compiled = cast("Callable[[Payload, torch.Tensor, torch.Tensor], torch.Tensor]", torch.compile(layer, fullgraph=True, backend=backend))  # pyright: ignore[reportUnknownMemberType]
    live, payload = case.experts >= 0, case.runner_input.payload
    assert torch.equal(compiled(payload, _held(case), case.weights)[live], layer(payload, _held(case), case.weights)[live])


def _held(case: Placed) -> torch.Tensor:
    given = case.runner_input
    return given.received.counts if isinstance(given, SlabRowsInput) else given.segments.ends


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cuda", name, marks=on_cuda) for name in ("bf16", "fp8-block128", "int8-channel")])
@both
@pytest.mark.parametrize("expected", [2, 128])
def test_a_cuda_graph_follows_the_counts(device: str, fmt: str, layout: str, expected: int) -> None:
    """Rows, weights and counts change between replays; everything stale is NaN each time."""
    weights: ExpertWeights[GateUpOrder]
    if fmt == "int8-channel":
        general_weights = formats.make_weights(fmt, device, 4, biased=True)
        runner: TritonGeneralRunner | TritonRunner = formats.make_runner(general_weights, SILU)
        weights, rows_of, hidden, tolerance = general_weights, formats.ROWS["int8-token"], formats.HIDDEN, formats.TOLERANCE["int8-token"]
    else:
        tuned_weights = make_weights(fmt, device, 4, biased=True)
        runner = make_runner(tuned_weights, SILU)
        weights, rows_of, hidden, tolerance = tuned_weights, partial(make_payload, fmt), HIDDEN, TOLERANCE[fmt]

    def case(counts: list[int]) -> Placed:
        if layout == "slab":
            return place_slab(rows_of, device, counts, 20, hidden, expected=expected, most=80)
        return place_segments(rows_of, device, counts, 4, hidden, expected=expected, behind=80 - 4 * (sum(-(-count // 4) for count in counts)))

    held = case([20, 20, 20, 20])
    runner.run(held.runner_input)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = runner.run(held.runner_input).hidden_states
    for counts in ([20, 20, 20, 20], [0, 0, 0, 0], [3, 0, 17, 4], [0, 20, 0, 0]):
        now = case(counts)
        _copy(now, held)
        graph.replay()
        now.check(captured, weights, tolerance)


def _copy(source: Placed, target: Placed) -> None:
    tensors = [(target.runner_input.payload.data, source.runner_input.payload.data), (_held(target), _held(source)), (target.weights, source.weights)]
    if "scale" in vars(source.runner_input.payload):
        tensors.append((vars(target.runner_input.payload)["scale"], vars(source.runner_input.payload)["scale"]))
    for into, out_of in tensors:
        rows = min(into.shape[0], out_of.shape[0])
        into[:rows].copy_(out_of[:rows])

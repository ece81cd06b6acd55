"""The runner in the emulated library, strict: every weight format with every payload it takes is near the float32 reference on the same values."""

import itertools

import pytest
import torch

from moe_typed import DeviceCount, Experts, GateUp, Interleaved, StandardDispatchOutput, UpGate, debug
from moe_typed.formats import Bf16ExpertWeights, Bf16Rows, GateUpOrder, Payload
from moe_typed.runners.aiter import AiterOptions, prepare_aiter
from moe_typed.stages import LiveRowsOutput, SummedRowsOutput
from tests.emulation.aiter.dtypes import Gfx
from tests.emulation.aiter.library import VersionName
from tests.emulation.aiter.memory import poison_rows
from tests.runners.aiter.support import (
    FNUZ_FORMS,
    FORMS,
    HIDDEN,
    INTER,
    SLOTS,
    Form,
    L,
    accepted,
    activation_of,
    distance,
    local_routing,
    localized,
    make_library,
    make_rows,
    make_runner,
    make_weights,
    out_dtype,
    prepare,
    prepare_fnuz,
    random_ids,
    reference,
    sink_input,
    slot_input,
    tolerance,
)

PAYLOADS = [
    pytest.param(form, cls, id=f"{form}, {cls.format.name}")
    for form in FORMS
    for cls in accepted(prepare(form, make_weights(form), make_library()[0]))
]


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize(("form", "payload"), PAYLOADS)
def test_rows_with_local_ids(form: Form, payload: type[Payload], rows: int) -> None:
    library, _ = make_library()
    weights, data, ids = make_weights(form), make_rows(payload, rows), random_ids(rows, L)
    ids[0, 1] = -1
    if rows > 1:
        ids[rows // 2] = -1
    with debug("strict"):
        runner_input = sink_input(data, ids, form)
        output = make_runner(form, weights, library).run(runner_input)
    assert isinstance(output, SummedRowsOutput)
    assert output.hidden_states.dtype == out_dtype(form)
    expected = reference(data, ids, runner_input.routing.topk_weights, weights, activation_of(form))
    assert distance(output.hidden_states, expected) < tolerance(form)
    if rows > 1:
        assert not output.hidden_states[rows // 2].any()  # no route: zero


@pytest.mark.parametrize(("form", "payload"), PAYLOADS)
def test_rows_that_go_nowhere_hold_anything(form: Form, payload: type[Payload]) -> None:
    """Padding, and what is stale in a slab: neither what it holds nor its scales change a row that goes somewhere."""
    library, _ = make_library()
    weights, data, ids = make_weights(form), make_rows(payload, 6), random_ids(6, L)
    ids[1] = ids[4:] = -1
    runner = make_runner(form, weights, library)
    clean = make_rows(payload, 6)
    for row in (1, 4, 5):
        poison_rows(data.data[row : row + 1], 0)
    with debug("strict"):
        found = runner.run(sink_input(data, ids, form)).hidden_states
    runner_input = sink_input(clean, ids, form)
    assert bool(found.isfinite().all())
    assert distance(found, reference(clean, ids, runner_input.routing.topk_weights, weights, activation_of(form))) < tolerance(form)


COUNTED = [case for case in PAYLOADS if case.values[0] != "fp8-tensor"]  # its quantiser takes no count; the refusal is tested


@pytest.mark.parametrize(("on_device", "live"), [(True, 0), (True, 3), (False, 3), (False, 7)])
@pytest.mark.parametrize(("form", "payload"), COUNTED)
def test_rows_with_slots_over_all_ranks_and_a_stale_tail(form: Form, payload: type[Payload], on_device: bool, live: int) -> None:
    library, _ = make_library()
    rows = 7
    weights, data, ids = make_weights(form), make_rows(payload, rows), random_ids(rows, SLOTS)
    clean = make_rows(payload, rows)
    poison_rows(data.data, live)
    scale = getattr(data, "scale", None)
    if isinstance(scale, torch.Tensor) and scale.shape[0] == rows:
        poison_rows(scale, live)
    ids[live:] = 0x7F7F7F7F
    count = DeviceCount(torch.tensor([live], dtype=torch.int32)) if on_device else live
    with debug("strict"):
        runner_input = slot_input(data, ids, count, out_dtype(form))
        output = make_runner(form, weights, library).run(runner_input)
    assert isinstance(output, LiveRowsOutput)
    assert output.hidden_states.shape == (rows, HIDDEN)
    expected = reference(clean, localized(ids), runner_input.routing.topk_weights, weights, activation_of(form))[:live]
    if live:
        assert distance(output.hidden_states[:live], expected) < tolerance(form)


BLOCKS = ("fp8-block128", Interleaved)  # a block has one scale for both; its refusal is tested


@pytest.mark.parametrize(("form", "order"), [case for case in itertools.product(FORMS, (UpGate, Interleaved)) if case != BLOCKS])
def test_every_order_of_gate_and_up_becomes_the_one_that_is_read(form: Form, order: type[GateUpOrder]) -> None:
    library, _ = make_library()
    biased = form in ("a16w4", "a8w4", "a4w4", "mxfp8")
    weights, ids = make_weights(form, order, biased=biased), random_ids(5, L)
    prepared = prepare(form, weights, library)
    data = make_rows(accepted(prepared)[-1], 5)
    runner_input = sink_input(data, ids, form)
    found = prepared.runner(activation_of(form)).run(runner_input).hidden_states
    assert distance(found, reference(data, ids, runner_input.routing.topk_weights, weights, activation_of(form))) < tolerance(form)
    if form != "fp8-block128":  # its scales differ from order to order
        plain = make_runner(form, make_weights(form, GateUp, biased=biased), library).run(runner_input).hidden_states
        assert torch.equal(found, plain)


@pytest.mark.parametrize("form", FNUZ_FORMS)
def test_gfx942_has_another_fp8(form: Form) -> None:
    library, emulated = make_library(gfx="gfx942")
    weights, ids = make_weights(form), random_ids(9, L)
    prepared = prepare_fnuz(form, weights, library)
    for payload in accepted(prepared):
        data = make_rows(payload, 9)
        with debug("strict"):
            runner_input = sink_input(data, ids, form)
            found = prepared.runner(activation_of(form)).run(runner_input).hidden_states
        assert distance(found, reference(data, ids, runner_input.routing.topk_weights, weights, activation_of(form))) < tolerance(form)
        assert emulated.decisions[-1].activation is torch.float8_e4m3fnuz


VERSIONS: list[tuple[VersionName, Gfx, Form]] = [
    ("0.1.7", "gfx942", "bf16"),
    ("0.1.7", "gfx950", "fp8-channel"),
    ("0.1.7", "gfx950", "fp8-tensor"),
    ("0.1.7", "gfx950", "fp8-block128"),
    ("0.1.7", "gfx942", "int8-channel"),
    ("0.1.7", "gfx950", "a4w4"),
    ("0.1.7", "gfx950", "a16w4"),
    ("0.1.7", "gfx942", "a16w4"),
    ("head", "gfx950", "bf16"),
    ("head", "gfx950", "a4w4"),
    ("head", "gfx942", "a16w4"),
    ("head", "gfx950", "a8w4"),
    ("head", "gfx942", "a8w4"),
    ("head", "gfx950", "mxfp8"),
    ("later", "gfx942", "a8w4"),
    ("no_combine", "gfx950", "a8w4"),
]


@pytest.mark.parametrize(("version", "gfx", "form"), VERSIONS)
def test_every_version_is_given_what_it_takes(version: VersionName, gfx: Gfx, form: Form) -> None:
    library, _ = make_library(version, gfx)
    weights, data, ids = make_weights(form), make_rows(Bf16Rows, 6), random_ids(6, L)
    runner_input = sink_input(data, ids, form)
    found = make_runner(form, weights, library).run(runner_input).hidden_states
    assert distance(found, reference(data, ids, runner_input.routing.topk_weights, weights, activation_of(form))) < tolerance(form)


def test_one_layout_is_read_by_few_rows_and_by_many() -> None:
    library, emulated = make_library("head", env={"AITER_BF16_FP8_MOE_BOUND": "8"})
    weights = make_weights("a8w4")
    for rows, precision in ((7, torch.bfloat16), (8, torch.float8_e4m3fn)):
        data, ids = make_rows(Bf16Rows, rows), random_ids(rows, L)
        runner_input = sink_input(data, ids, "a8w4")
        found = make_runner("a8w4", weights, library).run(runner_input).hidden_states
        assert emulated.decisions[-1].activation is precision
        assert distance(found, reference(data, ids, runner_input.routing.topk_weights, weights, activation_of("a8w4"))) < tolerance("a8w4")


def test_the_weight_before_the_activation_is_another_layer() -> None:
    """With a weight w the gate and up rows are scaled by w, and nothing after."""
    library, _ = make_library()
    weights = make_weights("bf16")
    assert isinstance(weights, Bf16ExpertWeights)
    data, ids = make_rows(Bf16Rows, 5), random_ids(5, L, k=1)
    runner_input = sink_input(data, ids, "bf16")
    found = prepare_aiter(weights, library, options=AiterOptions(doweight_stage1=True)).runner(activation_of("bf16")).run(runner_input).hidden_states
    routed = runner_input.routing.topk_weights
    scaled = Bf16Rows((data.dequantize() * routed).to(torch.bfloat16))
    expected = reference(scaled, ids, torch.ones_like(routed), weights, activation_of("bf16"))
    assert distance(found, expected) < 2 * tolerance("bf16")
    assert distance(found, reference(data, ids, routed, weights, activation_of("bf16"))) > 0.1


def test_columns_of_zeros_may_be_skipped() -> None:
    library, _ = make_library()
    weights = make_weights("bf16", hidden=HIDDEN, inter=2 * INTER)
    weights.w13[:, :, -64:] = 0
    weights.w13.view(L, 2, 2 * INTER, HIDDEN)[:, :, -INTER:] = 0
    weights.w2[:, :, -INTER:] = 0
    data, ids = make_rows(Bf16Rows, 5), random_ids(5, L)
    runner_input = sink_input(data, ids, "bf16")
    options = AiterOptions(hidden_pad=64, intermediate_pad=INTER)
    found = make_runner("bf16", weights, library, options).run(runner_input).hidden_states
    assert distance(found, reference(data, ids, runner_input.routing.topk_weights, weights, activation_of("bf16"))) < tolerance("bf16")


def test_experts_run_on_it_through_the_table() -> None:
    library, _ = make_library()
    weights = make_weights("bf16")
    assert isinstance(weights, Bf16ExpertWeights)
    data, ids = Bf16Rows(make_rows(Bf16Rows, 5).data), random_ids(5, L)
    ids[2] = -1
    routing = local_routing(ids)
    found = Experts(prepare_aiter(weights, library))(StandardDispatchOutput(data, routing)).hidden_states
    assert distance(found, reference(data, ids, routing.topk_weights, weights, activation_of("bf16"))) < tolerance("bf16")

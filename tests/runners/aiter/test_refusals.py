"""What is refused when a runner is made, and before the call when the rows come, and why."""

import attrs
import pytest
import torch

from moe_typed import BoundaryError, DeviceCount, SiluAndMul, SwigluOai, UnsupportedError, debug
from moe_typed.formats import (
    Bf16Rows,
    Fp8Block128Rows,
    Fp8TensorRows,
    MxFp4Rows,
    MxFp8Rows,
    Payload,
)
from moe_typed.routing import to_sink
from moe_typed.runners import Activation, GeluAndMul, SwigluStep
from moe_typed.runners.aiter.admission import Admission
from moe_typed.stages import AiterSinkInput
from tests.emulation.aiter.dtypes import Gfx
from tests.emulation.aiter.library import VersionName
from tests.emulation.aiter.misuse import EmulatedMisuse
from tests.runners.aiter.support import (
    FORMS,
    HIDDEN,
    OAI,
    SILU,
    SLOTS,
    Form,
    L,
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
    random_ids,
    reference,
    sink_input,
    slot_input,
    tolerance,
)

BF16 = torch.bfloat16

# ---- the activation ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "form", "activation", "fragment"),
    [
        ("later", "bf16", GeluAndMul(), "does not know the activation 'gelu'"),
        ("later", "a8w4", SwigluStep(limit=7.0), "does not know the activation 'swiglu-step'"),
        ("later", "a8w4", SwigluOai(alpha=1.0), r"the alpha of AITER's swiglu is 1\.702; 1\.0 was asked for"),
        ("later", "bf16", SwigluOai(limit=3.0), r"get no limit, and keep 7\.0; 3\.0 was asked for"),
        ("0.1.7", "a16w4", SwigluOai(limit=3.0), r"the limit of AITER 0\.1\.7 is 7\.0; 3\.0 was asked for"),
        ("later", "a16w4", SiluAndMul(), "AITER chooses fp4 rows for silu, and would round those over a16w4 weights"),
        ("0.1.7", "a16w4", SiluAndMul(), "AITER chooses fp4 rows for silu"),
        ("0.1.7", "a4w4", SwigluOai(), r"AITER 0\.1\.7 chooses bf16 rows for the clamped swiglu"),
    ],
)
def test_an_activation_that_aiter_would_replace_is_refused(version: VersionName, form: Form, activation: Activation, fragment: str) -> None:
    prepared = prepare(form, make_weights(form), make_library(version)[0])
    with pytest.raises(UnsupportedError, match=fragment):
        prepared.runner(activation)


# ---- the rows ---------------------------------------------------------------------------------------------------------------------------------


ROWS: list[tuple[VersionName, Gfx, Form, Activation, type[Payload], int, str]] = [
    ("0.1.7", "gfx950", "a4w4", SILU, MxFp4Rows, 5, r"AITER 0\.1\.7 does not take rows that are mxfp4 already"),
    ("head", "gfx950", "a4w4", OAI, MxFp4Rows, 5, "with the clamped swiglu AITER may choose bf16 rows and drop their scale"),
    ("head", "gfx950", "a8w4", SILU, MxFp8Rows, 300, "AITER head does not take rows that are mxfp8 already, and would drop their scale"),
    ("head", "gfx950", "mxfp8", SILU, MxFp8Rows, 5, "AITER head does not take rows that are mxfp8 already"),
    ("later", "gfx942", "a8w4", SILU, MxFp8Rows, 300, "over mxfp4 weights AITER takes fp8 rows on gfx950 alone; this is gfx942"),
    ("head", "gfx950", "a16w4", OAI, Bf16Rows, 256, "from 256 on AITER chooses fp4 rows"),
]


@pytest.mark.parametrize(("version", "gfx", "form", "activation", "payload", "rows", "fragment"), ROWS)
def test_rows_that_aiter_would_misread_are_refused(
    version: VersionName, gfx: Gfx, form: Form, activation: Activation, payload: type[Payload], rows: int, fragment: str
) -> None:
    library, emulated = make_library(version, gfx)
    runner = prepare(form, make_weights(form), library).runner(activation)
    with pytest.raises(UnsupportedError, match=f"{rows} rows of {payload.__qualname__}: {fragment}"):
        runner.run(sink_input(make_rows(payload, rows), random_ids(rows, L), form))
    assert emulated.decisions == []


@pytest.mark.parametrize(("version", "gfx", "form", "activation", "payload", "rows", "_"), ROWS)
def test_none_of_them_is_refused_without_need(
    version: VersionName, gfx: Gfx, form: Form, activation: Activation, payload: type[Payload], rows: int, _: str
) -> None:
    """Past the refusal the library raises, is misused, or returns another layer."""
    library, _emulated = make_library(version, gfx)
    weights, data = make_weights(form), make_rows(payload, rows)
    runner = prepare(form, weights, library).runner(activation)
    admitted = attrs.evolve(runner, dense=Admission(runner.dense.payload), scaled=runner.scaled and Admission(runner.scaled.payload))
    runner_input = sink_input(data, random_ids(rows, L), form)
    try:
        found = admitted.run(runner_input).hidden_states
    except (EmulatedMisuse, RuntimeError, ValueError):
        return
    expected = reference(data, runner_input.routing.topk_ids, runner_input.routing.topk_weights, weights, activation)
    assert distance(found, expected) > 2 * tolerance(form)


@pytest.mark.parametrize(("form", "rows", "precision"), [("a16w4", 255, BF16), ("a4w4", 255, BF16), ("a4w4", 256, torch.float4_e2m1fn_x2)])
def test_while_gate_and_up_are_apart_both_precisions_read_one_layout(form: Form, rows: int, precision: torch.dtype) -> None:
    library, emulated = make_library("head")
    weights, data = make_weights(form), make_rows(Bf16Rows, rows)
    runner_input = sink_input(data, random_ids(rows, L), form)
    found = prepare(form, weights, library).runner(OAI).run(runner_input).hidden_states
    assert emulated.decisions[-1].activation is precision
    bound = tolerance("a16w4" if precision is BF16 else "a4w4")
    assert distance(found, reference(data, runner_input.routing.topk_ids, runner_input.routing.topk_weights, weights, OAI)) < bound


def test_but_for_sizes_that_are_whole_in_one_alone() -> None:
    library, emulated = make_library("head")
    runner = prepare("a4w4", make_weights("a4w4", hidden=192, inter=64), library).runner(OAI)
    with pytest.raises(UnsupportedError, match="255 rows of Bf16Rows: below 256 AITER chooses bf16 rows for the clamped swiglu"):
        runner.run(sink_input(make_rows(Bf16Rows, 255, hidden=192), random_ids(255, L), "a4w4"))
    runner.run(sink_input(make_rows(Bf16Rows, 256, hidden=192), random_ids(256, L), "a4w4"))
    assert [decision.activation for decision in emulated.decisions] == [torch.float4_e2m1fn_x2]


def test_mxfp8_rows_below_the_bound_are_refused_where_fp8_cannot_be_asked_for() -> None:
    library, emulated = make_library("later", env={"AITER_BF16_FP8_MOE_BOUND": "6"})
    older = attrs.evolve(library, facts=attrs.evolve(library.facts, parameters=library.facts.parameters - {"quant_dtype_a"}))
    runner = make_runner("a8w4", make_weights("a8w4"), older)
    with pytest.raises(UnsupportedError, match=r"5 rows of MxFp8Rows: below 6 AITER chooses bf16 rows .* set AITER_BF16_FP8_MOE_BOUND to 0"):
        runner.run(sink_input(make_rows(MxFp8Rows, 5), random_ids(5, L), "a8w4"))
    runner.run(sink_input(make_rows(MxFp8Rows, 6), random_ids(6, L), "a8w4"))
    assert [(decision.activation, decision.branch) for decision in emulated.decisions] == [(torch.float8_e4m3fn, 3)]


@pytest.mark.parametrize("payload", [Bf16Rows, Fp8TensorRows])
def test_one_scale_over_all_rows_needs_all_of_them_alive(payload: type[Payload]) -> None:
    """Rows that are fp8 already do not help: what lies between the products is quantised by the same function, which takes no count."""
    library, emulated = make_library()
    weights = make_weights("fp8-tensor")
    runner = make_runner("fp8-tensor", weights, library)
    rows, ids = make_rows(payload, 5), random_ids(5, SLOTS)
    for live in (3, DeviceCount(torch.tensor([3], dtype=torch.int32)), DeviceCount(torch.tensor([5], dtype=torch.int32))):
        with pytest.raises(UnsupportedError, match=r"no count of live rows with fp8-tensor weights.*rows that are all live"):
            runner.run(slot_input(rows, ids, live, torch.bfloat16))
    assert emulated.decisions == []
    runner_input = slot_input(rows, ids, 5, torch.bfloat16)
    expected = reference(rows, localized(ids), runner_input.routing.topk_weights, weights, SILU)
    assert distance(runner.run(runner_input).hidden_states, expected) < tolerance("fp8-tensor")


@pytest.mark.parametrize("form", ["bf16", "a8w4", "mxfp8"])
def test_a_payload_that_the_weights_do_not_take_is_refused_though_no_checker_looked(form: Form) -> None:
    library, emulated = make_library()
    runner = make_runner(form, make_weights(form), library)
    with pytest.raises(BoundaryError, match=r"payload is Fp8Block128Rows \(fp8-block128\), but Aiter.* takes Bf16Rows"):
        runner.run(sink_input(make_rows(Fp8Block128Rows, 5), random_ids(5, L), form))
    assert emulated.decisions == []


# ---- where rows and weights meet ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bf16", "a4w4", "mxfp8"])
def test_widths_and_numbers_of_experts_meet(form: Form) -> None:
    runner = make_runner(form, make_weights(form), make_library()[0])
    payload = runner.scaled.payload if runner.scaled is not None else Bf16Rows
    with debug("layout"), pytest.raises(BoundaryError, match=f"hidden = {HIDDEN}"):
        runner.run(sink_input(make_rows(payload, 3, hidden=2 * HIDDEN), random_ids(3, L), form))
    more = AiterSinkInput(make_rows(Bf16Rows, 3), to_sink(local_routing(random_ids(3, L), L + 1)), out_dtype(form))
    with debug("layout"), pytest.raises(BoundaryError, match=f"experts = {L + 1}"):
        runner.run(more)


def test_the_mask_marks_as_many_slots_as_there_are_experts() -> None:
    runner = make_runner("bf16", make_weights("bf16"), make_library()[0])
    runner_input = slot_input(make_rows(Bf16Rows, 3), random_ids(3, SLOTS), 3, torch.bfloat16)
    runner_input.mask.mask[0] = 1
    with debug("values"), pytest.raises(BoundaryError, match=f"a mask of {L + 1} slots on this rank; the weights have {L} experts"):
        runner.run(runner_input)


def test_the_output_has_the_width_of_the_weights() -> None:
    runner = make_runner("bf16", make_weights("bf16"), make_library()[0])
    output = torch.empty(3, HIDDEN + 1, dtype=torch.bfloat16)
    with debug("layout"), pytest.raises(BoundaryError, match="hidden = "):
        runner.run(slot_input(make_rows(Bf16Rows, 3), random_ids(3, SLOTS), 3, torch.bfloat16, output))


def test_the_activation_of_each_form_is_one_that_its_layout_serves() -> None:
    for form in FORMS:
        assert not make_runner(form, make_weights(form), make_library()[0]).dense.is_empty, activation_of(form)

"""What is refused, and why: before any work when weights are prepared or a runner is made, and before the call when the rows come."""

from collections.abc import Callable, Mapping
from typing import cast

import attrs
import pytest
import torch
from typing_extensions import override

from moe_typed import BoundaryError, DeviceCount, GateUp, Interleaved, SiluAndMul, SwigluOai, UnsupportedError, debug
from moe_typed.formats import (
    Bf16ExpertWeights,
    Bf16Rows,
    Fp8Block128Rows,
    Fp8TensorRows,
    GateUpOrder,
    MxFp4ExpertWeights,
    MxFp4Rows,
    MxFp8Rows,
    Payload,
)
from moe_typed.runners import Activation
from moe_typed.runners.aiter import (
    AiterBf16Weights,
    AiterLibrary,
    AiterMxFp4A8W4Weights,
    AiterOptions,
    MxFp4Layout,
    StaticScales,
    prepare_aiter,
    prepare_aiter_as,
    prepare_aiter_fnuz,
)
from moe_typed.runners.aiter import (
    AiterOptions as Options,
)
from tests.emulation.aiter.dtypes import Gfx
from tests.emulation.aiter.library import VersionName
from tests.runners.aiter.support import (
    FNUZ_FORMS,
    FORMS,
    HIDDEN,
    OAI,
    SILU,
    SLOTS,
    Form,
    L,
    activation_of,
    local_routing,
    make_library,
    make_rows,
    make_runner,
    make_weights,
    out_dtype,
    prepare,
    prepare_fnuz,
    random_ids,
    sink_input,
    slot_input,
)

UNTYPED = cast("Callable[..., object]", prepare_aiter)


def on(gfx: str | None) -> AiterLibrary:
    library, _ = make_library()
    return attrs.evolve(library, facts=attrs.evolve(library.facts, gfx=gfx))


# ---- preparing -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gfx", [None, "gfx90a", "gfx1250"])
@pytest.mark.parametrize("form", FORMS)
def test_other_architectures_have_other_layouts(form: Form, gfx: str | None) -> None:
    with pytest.raises(UnsupportedError, match=f"this is {gfx or 'no device that torch knows'}"):
        prepare(form, make_weights(form), on(gfx))


@pytest.mark.parametrize("form", ["a4w4", "mxfp8"])
def test_microscaled_products_need_cdna4(form: Form) -> None:
    with pytest.raises(UnsupportedError, match="need gfx950 with AITER; this is gfx942"):
        prepare(form, make_weights(form), on("gfx942"))


@pytest.mark.parametrize("form", FNUZ_FORMS)
def test_fp8_is_prepared_for_the_fp8_of_the_device(form: Form) -> None:
    with pytest.raises(UnsupportedError, match=r"fp8 is e4m3fnuz on gfx942: prepare .* with prepare_aiter_fnuz"):
        prepare(form, make_weights(form), on("gfx942"))
    with pytest.raises(UnsupportedError, match=r"fp8 is e4m3fn on gfx950: prepare .* with prepare_aiter$"):
        prepare_fnuz(make_weights(form), on("gfx950"))


@pytest.mark.parametrize("form", ["a8w4", "mxfp8"])
def test_version_0_1_7_has_no_gate_modes(form: Form) -> None:
    with pytest.raises(UnsupportedError, match=r"AITER 0\.1\.7 has no gate modes"):
        prepare(form, make_weights(form), make_library("0.1.7")[0])


@pytest.mark.parametrize("form", ["bf16", "fp8-tensor", "fp8-channel", "fp8-block128", "int8-channel"])
def test_biases_that_would_be_dropped_are_refused(form: Form) -> None:
    with pytest.raises(UnsupportedError, match="AITER drops the biases"):
        prepare(form, make_weights(form, biased=True), make_library()[0])


@pytest.mark.parametrize(
    ("form", "hidden", "inter", "fragment"),
    [
        ("bf16", 48, 64, "hidden = 48 is not a multiple of 32"),
        ("bf16", 64, 48, "inter = 48 is not a multiple of 32"),
        ("fp8-channel", 64, 40, "inter = 40 is not a multiple of 32"),
        ("a4w4", 96, 64, "hidden = 96 is not a multiple of 64"),
        ("a16w4", 192, 128, "hidden = 192 is not a multiple of 128"),
        ("a8w4", 256, 64, "inter = 64 is not a multiple of 128"),
        ("mxfp8", 96, 64, "hidden = 96 is not a multiple of 64"),
    ],
)
def test_sizes_that_cannot_be_shuffled_are_refused(form: Form, hidden: int, inter: int, fragment: str) -> None:
    with pytest.raises(UnsupportedError, match=fragment):
        prepare(form, make_weights(form, hidden=hidden, inter=inter), make_library()[0])


def test_interleaved_blocks_have_one_scale_for_gate_and_up() -> None:
    with pytest.raises(UnsupportedError, match="a block of 128 interleaved rows"):
        prepare("fp8-block128", make_weights("fp8-block128", Interleaved), make_library()[0])


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        (Options(hidden_pad=64), "the last columns of w13 are not zero"),
        (Options(intermediate_pad=64), "the last columns of w2 are not zero"),
        (Options(hidden_pad=HIDDEN + 2), f"hidden_pad = {HIDDEN + 2} is more than there is"),
    ],
)
@pytest.mark.parametrize("form", ["bf16", "a4w4", "mxfp8"])
def test_pads_hold_zeros(form: Form, options: AiterOptions, fragment: str) -> None:
    with pytest.raises(UnsupportedError, match=fragment):
        prepare(form, make_weights(form), make_library()[0], options)


@pytest.mark.parametrize("order", [GateUp, Interleaved])
@pytest.mark.parametrize("half", [0, 1])
def test_rows_of_gate_and_up_are_pads_too(half: int, order: type[GateUpOrder]) -> None:
    weights = make_weights("bf16", order)
    weights.w2[:, :, -64:] = 0
    order.split(weights.w13, 1)[half][:, -64:] = 0  # the other one is not
    with pytest.raises(UnsupportedError, match="the last rows of gate or up are not zero"):
        prepare("bf16", weights, make_library()[0], Options(intermediate_pad=64))


def test_a_pad_ends_with_a_byte() -> None:
    with pytest.raises(UnsupportedError, match="hidden_pad = 3 ends within a byte"):
        prepare("a4w4", make_weights("a4w4"), make_library()[0], Options(hidden_pad=3))
    with pytest.raises(ValueError, match="intermediate_pad is -1"):
        Options(intermediate_pad=-1)


def test_a_nan_has_no_same_byte_in_fnuz() -> None:
    weights = make_weights("fp8-channel")
    weights.w2.view(torch.uint8)[0, 0, 0] = 0xFF
    with pytest.raises(UnsupportedError, match="hold a NaN"):
        prepare_fnuz(weights, on("gfx942"))


def test_what_is_no_checkpoint_is_refused() -> None:
    library, _ = make_library()
    weights = make_weights("bf16")
    assert isinstance(weights, Bf16ExpertWeights)
    with pytest.raises(TypeError, match=r"prepare_aiter takes .* in checkpoint layout; got AiterBf16Weights"):
        UNTYPED(prepare_aiter(weights, library), library)
    with pytest.raises(TypeError, match=r"prepare_aiter_fnuz takes fp8 expert weights .*; got Bf16ExpertWeights"):
        cast("Callable[..., object]", prepare_aiter_fnuz)(weights, library)


@pytest.mark.parametrize(
    ("form", "keywords", "fragment"),
    [
        ("a4w4", {}, "mxfp4 weights have three layouts in AITER: say which"),
        ("bf16", {"layout": MxFp4Layout.A4W4}, "layout is for mxfp4 weights alone; got Bf16ExpertWeights"),
        ("bf16", {"static": StaticScales()}, "static scales are for fp8-tensor weights alone: AITER computes those of bf16"),
    ],
)
def test_keywords_belong_to_a_format(form: Form, keywords: Mapping[str, object], fragment: str) -> None:
    with pytest.raises(TypeError, match=fragment):
        UNTYPED(make_weights(form), make_library()[0], **keywords)


def test_a_plan_names_a_class_that_the_weights_can_become() -> None:
    library, _ = make_library()
    mxfp4, bf16 = make_weights("a8w4"), make_weights("bf16")
    assert isinstance(mxfp4, MxFp4ExpertWeights)
    assert isinstance(bf16, Bf16ExpertWeights)
    assert isinstance(prepare_aiter_as(AiterMxFp4A8W4Weights, mxfp4, library), AiterMxFp4A8W4Weights)
    with pytest.raises(TypeError, match="Bf16ExpertWeights cannot become AiterMxFp4A8W4Weights; it becomes AiterBf16Weights"):
        prepare_aiter_as(AiterMxFp4A8W4Weights, bf16, library)
    assert isinstance(prepare_aiter_as(AiterBf16Weights, bf16, library), AiterBf16Weights)


# ---- the activation ---------------------------------------------------------------------------------------------------------------------------


class Relu(Activation):
    name = "relu"

    @override
    def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return gate.relu() * up


@pytest.mark.parametrize(
    ("version", "form", "activation", "fragment"),
    [
        ("later", "bf16", Relu(), "does not know the activation 'relu'"),
        ("later", "a8w4", SwigluOai(alpha=1.0), r"the alpha of AITER's swiglu is 1\.702; 1\.0 was asked for"),
        ("later", "bf16", SwigluOai(limit=3.0), r"get no limit, and keep 7\.0; 3\.0 was asked for"),
        ("0.1.7", "a16w4", SwigluOai(limit=3.0), r"the limit of AITER 0\.1\.7 is 7\.0; 3\.0 was asked for"),
        ("later", "a16w4", SiluAndMul(), "AITER chooses fp4 rows for silu, and would read a16w4 weights as another layout"),
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
    ("head", "gfx950", "a4w4", OAI, MxFp4Rows, 300, "with the clamped swiglu AITER may choose bf16 rows and drop their scale"),
    ("head", "gfx950", "a8w4", SILU, MxFp8Rows, 300, "AITER head does not take rows that are mxfp8 already, and would drop their scale"),
    ("head", "gfx950", "mxfp8", SILU, MxFp8Rows, 5, "AITER head does not take rows that are mxfp8 already"),
    ("later", "gfx942", "a8w4", SILU, MxFp8Rows, 300, "over mxfp4 weights AITER takes fp8 rows on gfx950 alone; this is gfx942"),
    ("head", "gfx950", "a16w4", OAI, Bf16Rows, 256, "from 256 on AITER chooses fp4 rows"),
    ("head", "gfx950", "a4w4", OAI, Bf16Rows, 255, "below 256 AITER chooses bf16 rows for the clamped swiglu"),
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


@pytest.mark.parametrize(("form", "activation", "rows"), [("a16w4", OAI, 255), ("a4w4", OAI, 256)])
def test_the_bound_itself_is_aiter_s(form: Form, activation: Activation, rows: int) -> None:
    """One row fewer or more is refused above; in strict mode the emulation judges what is let through."""
    library, emulated = make_library("head")
    prepare(form, make_weights(form), library).runner(activation).run(sink_input(make_rows(Bf16Rows, rows), random_ids(rows, L), form))
    assert emulated.decisions[-1].activation is (torch.bfloat16 if form == "a16w4" else torch.float4_e2m1fn_x2)


def test_mxfp8_rows_below_the_bound_are_refused_where_fp8_cannot_be_asked_for() -> None:
    library, emulated = make_library("later", env={"AITER_BF16_FP8_MOE_BOUND": "6"})
    older = attrs.evolve(library, facts=attrs.evolve(library.facts, parameters=library.facts.parameters - {"quant_dtype_a"}))
    runner = make_runner("a8w4", make_weights("a8w4"), older)
    with pytest.raises(UnsupportedError, match=r"5 rows of MxFp8Rows: below 6 AITER chooses bf16 rows .* set AITER_BF16_FP8_MOE_BOUND to 0"):
        runner.run(sink_input(make_rows(MxFp8Rows, 5), random_ids(5, L), "a8w4"))
    runner.run(sink_input(make_rows(MxFp8Rows, 6), random_ids(6, L), "a8w4"))
    assert [(decision.activation, decision.branch) for decision in emulated.decisions] == [(torch.float8_e4m3fn, 3)]


def test_one_scale_over_all_rows_needs_all_of_them_alive() -> None:
    library, emulated = make_library()
    runner = make_runner("fp8-tensor", make_weights("fp8-tensor"), library)
    ids = random_ids(5, SLOTS)
    count = DeviceCount(torch.tensor([3], dtype=torch.int32))
    with pytest.raises(UnsupportedError, match="under one scale only if all are live"):
        runner.run(slot_input(make_rows(Bf16Rows, 5), ids, count, torch.bfloat16))
    runner.run(slot_input(make_rows(Fp8TensorRows, 5), ids, count, torch.bfloat16))
    assert len(emulated.decisions) == 1


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
    from moe_typed.routing import to_sink
    from moe_typed.stages import AiterSinkInput

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

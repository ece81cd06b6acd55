"""What is refused when weights are prepared, before any work, and why."""

from collections.abc import Callable, Mapping
from typing import cast

import attrs
import pytest
import torch

from moe_typed import GateUp, Interleaved, UnsupportedError
from moe_typed.formats import (
    Bf16ExpertWeights,
    GateUpOrder,
    MxFp4ExpertWeights,
)
from moe_typed.runners.aiter import (
    AiterBf16Weights,
    AiterLibrary,
    AiterMxFp4A8W4Weights,
    AiterOptions,
    MxFp4Layout,
    prepare_aiter,
    prepare_aiter_as,
    prepare_aiter_fnuz,
)
from tests.emulation.aiter.dtypes import Gfx
from tests.runners.aiter.support import (
    FNUZ_FORMS,
    FORMS,
    HIDDEN,
    Form,
    make_library,
    make_weights,
    prepare,
    prepare_fnuz,
    static_scales,
)

UNTYPED = cast("Callable[..., object]", prepare_aiter)


def on(gfx: str | None) -> AiterLibrary:
    library, _ = make_library()
    return attrs.evolve(library, facts=attrs.evolve(library.facts, gfx=gfx))


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
        prepare_fnuz(form, make_weights(form), on("gfx950"))


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
        (AiterOptions(hidden_pad=64), "the last columns of w13 are not zero"),
        (AiterOptions(intermediate_pad=64), "the last columns of w2 are not zero"),
        (AiterOptions(hidden_pad=HIDDEN + 2), f"hidden_pad = {HIDDEN + 2} is more than there is"),
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
        prepare("bf16", weights, make_library()[0], AiterOptions(intermediate_pad=64))


def test_a_pad_ends_with_a_byte() -> None:
    with pytest.raises(UnsupportedError, match="hidden_pad = 3 ends within a byte"):
        prepare("a4w4", make_weights("a4w4"), make_library()[0], AiterOptions(hidden_pad=3))
    with pytest.raises(ValueError, match="intermediate_pad is -1"):
        AiterOptions(intermediate_pad=-1)


def test_a_nan_has_no_same_byte_in_fnuz() -> None:
    weights = make_weights("fp8-channel")
    weights.w2.view(torch.uint8)[0, 0, 0] = 0xFF
    with pytest.raises(UnsupportedError, match="hold a NaN"):
        prepare_fnuz("fp8-channel", weights, on("gfx942"))


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
        ("bf16", {"static": static_scales()}, "static scales are for fp8-tensor weights alone: AITER computes those of bf16"),
    ],
)
def test_keywords_belong_to_a_format(form: Form, keywords: Mapping[str, object], fragment: str) -> None:
    with pytest.raises(TypeError, match=fragment):
        UNTYPED(make_weights(form), make_library()[0], **keywords)


@pytest.mark.parametrize(("gfx", "prepare_tensor"), [("gfx950", prepare_aiter), ("gfx942", prepare_aiter_fnuz)])
def test_one_scale_between_the_products_must_be_given(gfx: Gfx, prepare_tensor: Callable[..., object]) -> None:
    """AITER would find it among rows of routes that go nowhere, which no product wrote."""
    with pytest.raises(UnsupportedError, match=r"rows that it never wrote.*static=StaticScales\(w2_input=\.\.\.\)"):
        prepare_tensor(make_weights("fp8-tensor"), make_library(gfx=gfx)[0])


def test_a_plan_names_a_class_that_the_weights_can_become() -> None:
    library, _ = make_library()
    mxfp4, bf16 = make_weights("a8w4"), make_weights("bf16")
    assert isinstance(mxfp4, MxFp4ExpertWeights)
    assert isinstance(bf16, Bf16ExpertWeights)
    assert isinstance(prepare_aiter_as(AiterMxFp4A8W4Weights, mxfp4, library), AiterMxFp4A8W4Weights)
    with pytest.raises(TypeError, match="Bf16ExpertWeights cannot become AiterMxFp4A8W4Weights; it becomes AiterBf16Weights"):
        prepare_aiter_as(AiterMxFp4A8W4Weights, bf16, library)
    assert isinstance(prepare_aiter_as(AiterBf16Weights, bf16, library), AiterBf16Weights)

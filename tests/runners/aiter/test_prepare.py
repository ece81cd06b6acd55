"""What preparation does to weights: its named rules, the classes that come out and what they accept, and that the checkpoint stays as it is."""

from collections.abc import Callable
from typing import cast

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import BoundaryError, GateUp, Interleaved, UpGate, debug
from moe_typed.formats import (
    Bf16Rows,
    Fp8Block128Rows,
    Fp8ChannelExpertWeights,
    Fp8FnuzBlock128Rows,
    Fp8FnuzTensorRows,
    Fp8FnuzTokenRows,
    Fp8TensorExpertWeights,
    Fp8TensorRows,
    Fp8TokenRows,
    Fp16Rows,
    GateUpOrder,
    Int8TokenRows,
    MxFp4Rows,
    MxFp8Rows,
    Payload,
)
from moe_typed.runners import aiter as room
from moe_typed.runners.acceptance import ACCEPTANCE, RunnerName
from moe_typed.runners.aiter.weights_fp8 import e4m3fn_to_e4m3fnuz, join_scales
from tests.runners.aiter.support import (
    FNUZ,
    FNUZ_FORMS,
    FORMS,
    HIDDEN,
    INTER,
    Form,
    L,
    make_library,
    make_weights,
    prepare,
    prepare_fnuz,
    static_scales,
)

FN = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("form", "payloads"),
    [
        ("bf16", (Bf16Rows,)),
        ("fp16", (Fp16Rows,)),
        ("fp8-tensor", (Bf16Rows, Fp8TensorRows)),
        ("fp8-channel", (Bf16Rows, Fp8TokenRows)),
        ("fp8-block128", (Bf16Rows, Fp8Block128Rows)),
        ("int8-channel", (Bf16Rows, Int8TokenRows)),
        ("a4w4", (Bf16Rows, MxFp4Rows)),
        ("a16w4", (Bf16Rows,)),
        ("a8w4", (Bf16Rows, MxFp8Rows)),
        ("mxfp8", (Bf16Rows, MxFp8Rows)),
    ],
)
def test_the_accept_sets(form: Form, payloads: tuple[type[Payload], ...]) -> None:
    prepared = prepare(form, make_weights(form), make_library()[0])
    (row,) = [row for row in ACCEPTANCE if row.prepared.__qualname__ == type(prepared).__qualname__]
    assert (row.runner, row.weights, row.payloads) == (RunnerName.AITER, type(make_weights(form)), payloads)


@pytest.mark.parametrize(
    ("form", "payload"), [("fp8-tensor", Fp8FnuzTensorRows), ("fp8-channel", Fp8FnuzTokenRows), ("fp8-block128", Fp8FnuzBlock128Rows)]
)
def test_the_accept_sets_of_fnuz(form: Form, payload: type[Payload]) -> None:
    prepared = prepare_fnuz(form, make_weights(form), make_library(gfx="gfx942")[0])
    (row,) = [row for row in ACCEPTANCE if row.prepared.__qualname__ == type(prepared).__qualname__]
    assert (row.weights, row.payloads) == (type(make_weights(form)), (Bf16Rows, payload))


def test_every_row_of_the_acceptance_table_suits_some_device_and_activation() -> None:
    rows = [row.prepared for row in ACCEPTANCE if row.runner is RunnerName.AITER]
    everywhere = [(gfx, clamped) for gfx in ("gfx942", "gfx950") for clamped in (False, True)]
    assert all(any(room.suits(prepared, gfx, clamped=clamped) for gfx, clamped in everywhere) for prepared in rows)
    assert not any(room.suits(prepared, "gfx1250", clamped=clamped) for prepared in rows for clamped in (False, True))
    first = {
        case: next(prepared.__name__ for prepared in rows if "MxFp4" in prepared.__name__ and room.suits(prepared, case[0], clamped=case[1]))
        for case in everywhere
    }
    assert first == {
        ("gfx942", False): "AiterMxFp4A8W4Weights",
        ("gfx942", True): "AiterMxFp4A8W4Weights",
        ("gfx950", False): "AiterMxFp4A4W4Weights",
        ("gfx950", True): "AiterMxFp4A8W4Weights",
    }


def raw(weights: object) -> dict[str, Tensor]:
    return {name: value.view(torch.uint8).clone() for name, value in vars(weights).items() if isinstance(value, Tensor)}


@pytest.mark.parametrize("order", [GateUp, UpGate])
@pytest.mark.parametrize("form", FORMS)
def test_the_checkpoint_stays_as_it_is(form: Form, order: type[GateUpOrder]) -> None:
    weights = make_weights(form, order)
    before = raw(weights)
    prepared = prepare(form, weights, make_library()[0])
    after = raw(weights)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert prepared.w1.data_ptr() != weights.w13.data_ptr()
    assert prepared.w2.data_ptr() != weights.w2.data_ptr()
    assert not vars(weights.w13)


def test_biases_come_in_float32_with_gate_before_up() -> None:
    weights = make_weights("a8w4", Interleaved, biased=True)
    prepared = prepare("a8w4", weights, make_library()[0])
    assert isinstance(prepared, room.AiterMxFp4A8W4Weights)
    assert weights.b13 is not None
    assert prepared.b1 is not None
    assert torch.equal(prepared.b1, torch.cat((weights.b13[:, ::2], weights.b13[:, 1::2]), 1).float())


WRONG: list[tuple[Form, str, Callable[[Tensor], Tensor]]] = [
    ("a4w4", "w1_scale", lambda scale: scale[:, :-1].contiguous()),
    ("a16w4", "w2_scale", lambda scale: scale.view(L, -1, scale.shape[1])),
    ("a8w4", "w1_scale", lambda scale: scale.view(torch.uint8)),
    ("mxfp8", "w2_scale", lambda scale: scale[:-1]),
    ("fp8-tensor", "w1_scale", lambda scale: scale.unsqueeze(1)),
    ("bf16", "w1", lambda weight: weight[:, :-1].contiguous()),
]


@pytest.mark.parametrize(("form", "field", "wrong"), WRONG)
def test_a_prepared_class_says_what_its_tensors_are(form: Form, field: str, wrong: Callable[[Tensor], Tensor]) -> None:
    prepared = prepare(form, make_weights(form), make_library()[0])
    change = cast("Callable[..., object]", attrs.evolve)
    with debug("layout"):
        change(prepared)
        with pytest.raises(BoundaryError, match=rf"{type(prepared).__qualname__}\.{field}"):
            change(prepared, **{field: wrong(getattr(prepared, field))})


# ---- gate and up under one scale -----------------------------------------------------------------------------------------------------------------


def test_the_half_with_the_larger_scale_keeps_its_bytes_and_the_other_is_within_half_a_step() -> None:
    weights = make_weights("fp8-tensor")
    assert isinstance(weights, Fp8TensorExpertWeights)
    weights.w13_scale[1] = torch.tensor([0.25, 0.0625])
    joined, scale = join_scales(weights.w13, weights.w13_scale)
    assert torch.equal(scale, weights.w13_scale.amax(1))
    for expert in range(L):
        larger = int(weights.w13_scale[expert].argmax())
        before, after = (tensor[expert].view(2, INTER, HIDDEN) for tensor in (weights.w13, joined))
        assert torch.equal(before[larger].view(torch.uint8), after[larger].view(torch.uint8))
        exact = before[1 - larger].float() * (weights.w13_scale[expert, 1 - larger] / scale[expert])
        error, least = (after[1 - larger].float() - exact).abs(), 2.0**-10  # half of the smallest e4m3fn
        assert bool((error <= (exact.abs() * 2.0**-4).clamp(min=least)).all())


def test_scales_of_zero_stay_zero() -> None:
    joined, scale = join_scales(torch.ones(1, 4, 2).to(FN), torch.zeros(1, 2))
    assert torch.equal(scale, torch.zeros(1))
    assert bool((joined.float() == 1).all())


# ---- e4m3fnuz ------------------------------------------------------------------------------------------------------------------------------------


def test_every_byte_means_half_as_much_in_fnuz() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)  # those are NaN, and refused
    data = codes.view(FN)
    found = e4m3fn_to_e4m3fnuz(data)
    assert found.dtype == FNUZ
    assert torch.equal(found.float() * 2, data.float())
    assert torch.equal(found.view(torch.uint8)[codes == 0x80], torch.zeros(1, dtype=torch.uint8))  # where NaN would be


@pytest.mark.parametrize("form", FNUZ_FORMS)
def test_scales_are_doubled_for_fnuz(form: Form) -> None:
    weights = make_weights(form)
    fn, fnuz = prepare(form, weights, make_library()[0]), prepare_fnuz(form, weights, make_library(gfx="gfx942")[0])
    for mine, other in ((fn.operands().w1_scale, fnuz.operands().w1_scale), (fn.operands().w2_scale, fnuz.operands().w2_scale)):
        assert mine is not None
        assert other is not None
        assert torch.equal(other, 2 * mine)


def test_static_scales_are_doubled_too() -> None:
    weights = make_weights("fp8-tensor")
    assert isinstance(weights, Fp8TensorExpertWeights)
    prepared = room.prepare_aiter_fnuz(weights, make_library(gfx="gfx942")[0], static=static_scales(0.5, 0.25))
    assert prepared.a1_scale is not None
    assert torch.equal(prepared.a1_scale, torch.ones(1))
    assert torch.equal(prepared.a2_scale, torch.tensor([0.5]))


def test_negative_zeros_of_a_checkpoint_become_zeros() -> None:
    weights = make_weights("fp8-channel")
    assert isinstance(weights, Fp8ChannelExpertWeights)
    weights.w2.view(torch.uint8)[0, 0] = 0x80
    prepared = room.prepare_aiter_fnuz(weights, make_library(gfx="gfx942")[0])
    assert not bool(prepared.w2.float().isnan().any())

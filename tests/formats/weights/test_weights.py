"""Every weight class: what it means, and what it refuses."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from moe_typed import BoundaryError, GateUp, debug
from moe_typed.boundary import fields_of
from moe_typed.formats import (
    AwqExpertWeights,
    Fp32ExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    TransposedExpertWeights,
    UngatedExpertWeights,
    catalogue,
)
from tests.formats.weights.support import ASCENDING, AWQ_PLACES, CASES, EXPERTS, ORDERS, Case, pack_words

every_class = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
every_order = pytest.mark.parametrize("order", ORDERS)


def test_no_class_is_forgotten() -> None:
    """Those that are stored with the reduction first, or without a gate, have tests of their own: test_stored.py."""
    apart: set[type] = {cls for cls in catalogue.WEIGHTS if issubclass(cls, (TransposedExpertWeights, UngatedExpertWeights))}
    assert {case.cls for case in CASES.values()} == set(catalogue.WEIGHTS) - apart


@every_class
@every_order
def test_weights_mean_what_their_bytes_say(case: Case, order: type[GateUpOrder]) -> None:
    made = case.build(order, 2 * case.unit)
    weights = made.weights
    assert (weights.num_experts, weights.hidden, weights.inter) == (EXPERTS, case.hidden, 2 * case.unit)
    for expert in range(EXPERTS):
        for got, want in ((weights.dequantize_w13(expert), made.w13[expert]), (weights.dequantize_w2(expert), made.w2[expert])):
            assert got.dtype == torch.float32
            # nvfp4 multiplies by two scales, and rounds twice; nothing else rounds more than once
            torch.testing.assert_close(got.double(), want, rtol=2.0**-23, atol=0)


@every_class
def test_there_is_no_expert_beyond_the_last(case: Case) -> None:
    weights = case.build(GateUp, 2 * case.unit).weights
    for read in (weights.dequantize_w13, weights.dequantize_w2):
        with pytest.raises(IndexError):
            read(EXPERTS)


def test_a_word_of_eight() -> None:
    eight = torch.arange(8).view(1, 8)
    assert [hex(int(pack_words(eight, 1, places))) for places in (ASCENDING, AWQ_PLACES)] == ["0x76543210", "0x75316420"]


# ---- boundary ----------------------------------------------------------------------------------------------------------------------


def parts_of(case: Case) -> dict[str, object]:
    weights = case.build(GateUp, 2 * case.unit, bias=True).weights
    return {field.name: getattr(weights, field.name) for field in fields_of(type(weights))}


@every_class
def test_every_tensor_is_checked(case: Case) -> None:
    parts = parts_of(case)
    for name, part in parts.items():
        if not isinstance(part, Tensor):
            continue
        wrong = [torch.zeros(part.shape, dtype=torch.int16), part[:1]]
        if name not in ("b13", "b2") and part.dim() > 1:
            wrong.append(part.new_empty([*part.shape[:-1], 2 * part.shape[-1]])[..., : part.shape[-1]])
        for other in wrong:
            with debug("layout"), pytest.raises(BoundaryError) as caught:
                case.cls(**(parts | {name: other}))
            # a w13 of one expert binds the name first, so the fault is then in what comes next
            assert caught.value.field == name or (name == "w13" and other.shape != part.shape)


FP8, I32, F32 = torch.float8_e4m3fn, torch.int32, torch.float32


def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.zeros(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)


@pytest.mark.parametrize(
    ("name", "given", "reason"),
    [
        # inter = 192: both halves together are whole blocks, each alone is not
        pytest.param(
            "fp8 block",
            lambda: (zeros(FP8, 1, 384, 128), zeros(FP8, 1, 128, 192), zeros(F32, 1, 3, 1), zeros(F32, 1, 1, 1), GateUp),
            "inter = 192 is not a multiple of 128",
            id="block",
        ),
        pytest.param(
            "mxfp8",
            lambda: (
                zeros(FP8, 1, 96, 64),
                zeros(FP8, 1, 64, 48),
                zeros(torch.float8_e8m0fnu, 1, 96, 2),
                zeros(torch.float8_e8m0fnu, 1, 64, 1),
                GateUp,
            ),
            "inter = 48 is not a multiple of 32",
            id="mxfp8",
        ),
        pytest.param(
            "mxfp4",
            lambda: (
                zeros(torch.float4_e2m1fn_x2, 1, 96, 32),
                zeros(torch.float4_e2m1fn_x2, 1, 64, 24),
                zeros(torch.float8_e8m0fnu, 1, 96, 2),
                zeros(torch.float8_e8m0fnu, 1, 64, 1),
                GateUp,
            ),
            "inter_bytes = 24 is not a multiple of 16",
            id="mxfp4",
        ),
        pytest.param(
            "awq",
            lambda: (zeros(I32, 1, 8, 3), zeros(I32, 1, 12, 1), zeros(F32, 1, 1, 24), zeros(F32, 1, 1, 8), GateUp, 8),
            "inter = 12 is not a multiple of 8",
            id="awq",
        ),
        pytest.param(
            "gptq",
            lambda: (zeros(I32, 1, 3, 16), zeros(I32, 1, 1, 24), zeros(F32, 1, 1, 16), zeros(F32, 1, 1, 24), GateUp, 16),
            "hidden = 24 is not a multiple of 16",
            id="gptq",
        ),
    ],
)
def test_widths_that_cut_a_block_are_refused(name: str, given: Callable[[], tuple[object, ...]], reason: str) -> None:
    with debug("layout"), pytest.raises(BoundaryError) as caught:
        CASES[name].cls(*given())
    assert caught.value.reason == reason


@pytest.mark.parametrize(("made", "other"), [("awq", GptqExpertWeights), ("gptq", AwqExpertWeights)])
def test_one_int4_order_is_refused_as_the_other(made: str, other: Callable[..., object]) -> None:
    with debug("layout"), pytest.raises(BoundaryError):
        other(**parts_of(CASES[made]))


def test_a_group_that_there_is_not_is_refused() -> None:
    build = cast("Callable[..., object]", AwqExpertWeights)
    parts = parts_of(CASES["awq"])
    for group in (0, -8, 3, 16):
        with debug("layout"), pytest.raises(BoundaryError):
            build(**(parts | {"group": group}))


def test_dense_weights_may_be_of_any_width() -> None:
    with debug("strict"):
        assert Fp32ExpertWeights(torch.zeros(1, 6, 5), torch.zeros(1, 5, 3), GateUp).inter == 3

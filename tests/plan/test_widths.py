"""A plan and the preparation of weights agree on the widths that weights may have: neither takes what the other refuses."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import attrs
import pytest

from moe_typed import SiluAndMul, SwigluOai, debug
from moe_typed.formats import ExpertWeights, GateUpOrder
from moe_typed.formats.weights.compressed import CompressedInt4ExpertWeights
from moe_typed.formats.weights.int4 import Int4ExpertWeights
from moe_typed.plan import AiterFacts, Backend, Environment, MoEProblem, PlanError, RejectReason, RunnerRequest, plan
from moe_typed.runners import UnsupportedError
from moe_typed.runners.acceptance import ACCEPTANCE, Acceptance, RunnerName
from moe_typed.runners.aiter import (
    AiterBf16Weights,
    AiterFp8Block128Weights,
    AiterFp8TokenWeights,
    AiterInt8TokenWeights,
    AiterMxFp4A4W4Weights,
    AiterMxFp4A8W4Weights,
    AiterMxFp4A16W4Weights,
    AiterMxFp8Weights,
)
from moe_typed.runners.aiter.prepare import prepare_aiter_as
from moe_typed.runners.ascend import prepare_ascend_as
from tests.emulation.ascend.misuse import Device
from tests.runners.aiter.support import Form, make_library, make_weights
from tests.runners.ascend.support import SCHEMES, emulated

NPU = Environment(device="npu", device_name="Ascend", capability=(0, 0), libraries={"torch": "2.13.0", "torch_npu": "2.13.0"})
AMD = Environment(
    device="cuda",
    device_name="MI355X",
    capability=(9, 5),
    libraries={"torch": "2.13.0", "amd-aiter": "9.0"},
    gfx="gfx950",
    aiter=AiterFacts("9.0", quantizes_mxfp8=True, passes_mxfp8=True, passes_mxfp4=True, gfx="gfx950"),
)
PROBLEM = MoEProblem(num_experts=2, top_k=2, hidden=256, inter=128, model="bf16", weights="bf16", activation=SiluAndMul.name, rows=10)
WIDTHS = (32, 48, 64, 72, 96, 128, 160, 192, 256)

Weights = ExpertWeights[GateUpOrder]


def sized(make: Callable[[int, int], Weights], widths: tuple[int, ...] = WIDTHS) -> Iterator[Weights]:
    """Yield weights of all widths that a checkpoint of their format can have."""
    for hidden, inter in [(256, size) for size in widths] + [(size, 256) for size in widths]:
        try:
            with debug("layout"):
                weights = make(hidden, inter)
        except (TypeError, ValueError, RuntimeError):
            continue
        yield weights


def prepare(row: Acceptance, weights: Weights, device: Device) -> str | None:
    """Return why preparation refuses weights, None where it takes them."""
    try:
        if row.runner is RunnerName.ASCEND:
            prepare_ascend_as(row.prepared, cast("Any", weights), emulated(device))
        else:
            prepare_aiter_as(row.prepared, cast("Any", weights), make_library()[0])
    except UnsupportedError as error:
        return str(error)
    return None


def planned(problem: MoEProblem, environment: Environment) -> str | None:
    """Return why a plan refuses widths, None where it does not; other refusals are errors of the test."""
    try:
        plan(problem, environment)
    except PlanError as error:
        (item,) = error.rejected
        assert item.reason is RejectReason.DIVISIBILITY, item
        return item.detail
    return None


def asking(weights: Weights, runner: RunnerRequest, **changes: Any) -> MoEProblem:
    return attrs.evolve(PROBLEM, hidden=weights.hidden, inter=weights.inter, weights=weights.format.name, runner=runner, **changes)


def on_npu(weights: Weights, model: str = "bf16") -> MoEProblem:
    return asking(weights, RunnerRequest.ASCEND, backend=Backend.ASCEND_TP, model=model)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_of_the_npu(name: str) -> None:
    scheme, taken = SCHEMES[name], 0
    widths = (64, 128) if name in ("awq", "gptq", "gptq symmetric", "compressed") else WIDTHS  # those are slow to pack
    for weights in sized(lambda hidden, inter: scheme.weights(experts=1, hidden=hidden, inter=inter), widths):
        row = next(row for row in ACCEPTANCE if row.runner is RunnerName.ASCEND and isinstance(weights, row.weights))
        of_plan, of_preparation = planned(on_npu(weights, "fp16" if name == "fp16" else "bf16"), NPU), prepare(row, weights, scheme.device)
        if isinstance(weights, Int4ExpertWeights | CompressedInt4ExpertWeights):
            assert of_plan or not of_preparation  # their group is the checkpoint's own, which a plan does not know
        else:
            assert (of_plan is None) == (of_preparation is None), (of_plan, of_preparation)
            assert (of_preparation or "").endswith(of_plan or "")
        taken += of_plan is None
    assert taken


@pytest.mark.parametrize(("name", "hidden", "inter", "fragment"), [("w4a8", 1000, 128, "hidden = 1000"), ("mxfp8", 256, 96, "inter = 96")])
def test_those_of_the_npu_are_named(name: str, hidden: int, inter: int, fragment: str) -> None:
    weights = SCHEMES[name].weights(experts=1, hidden=hidden, inter=inter)
    assert (planned(on_npu(weights), NPU) or "").startswith(f"{fragment} is not a multiple of 64")


def test_the_longest_reduction_of_w4a8_is_the_plan_s_too() -> None:
    problem = on_npu(SCHEMES["w4a8"].weights(experts=1))
    assert planned(attrs.evolve(problem, inter=18432), NPU) is None
    assert planned(attrs.evolve(problem, inter=18496), NPU) == "inter = 18496 is more than 18432, the most that these products take"


@pytest.mark.parametrize(
    ("form", "prepared"),
    [
        ("bf16", (AiterBf16Weights,)),
        ("fp8-channel", (AiterFp8TokenWeights,)),
        ("fp8-block128", (AiterFp8Block128Weights,)),
        ("int8-channel", (AiterInt8TokenWeights,)),
        ("a4w4", (AiterMxFp4A4W4Weights, AiterMxFp4A8W4Weights)),
        ("a8w4", (AiterMxFp4A8W4Weights, AiterMxFp4A16W4Weights)),
        ("mxfp8", (AiterMxFp8Weights,)),
    ],
)
def test_of_aiter(form: Form, prepared: tuple[type[object], ...]) -> None:
    """``prepared``: the classes that a plan may take; mxfp4 has more than one, and the clamped swiglu others than silu."""
    activation = SwigluOai.name if form == "a8w4" else SiluAndMul.name
    rows, taken = [row for row in ACCEPTANCE if row.prepared in prepared], 0
    for weights in sized(lambda hidden, inter: make_weights(form, hidden=hidden, inter=inter)):
        of_plan = planned(asking(weights, RunnerRequest.AITER, activation=activation), AMD)
        of_preparation = [prepare(row, weights, Device.A3) for row in rows]
        assert (of_plan is None) == (None in of_preparation), (of_plan, of_preparation)
        assert of_plan is None or (of_preparation[0] or "").endswith(of_plan)
        taken += of_plan is None
    assert taken


def test_of_two_layouts_of_mxfp4_the_one_whose_tiles_fit() -> None:
    problem = attrs.evolve(PROBLEM, hidden=192, inter=192, weights="mxfp4", runner=RunnerRequest.AITER)
    assert plan(problem, AMD).prepared_weights == AiterMxFp4A4W4Weights.__qualname__
    refused = planned(attrs.evolve(problem, activation=SwigluOai.name), AMD)
    assert refused == "hidden = 192 is not a multiple of 128, in which AITER shuffles these weights; pad with zeros"

"""Plans on AMD GPUs: AITER comes first, with the class of prepared weights that suits the device, and how far it may be from the reference."""

import attrs
import pytest

from moe_typed import SiluAndMul, SwigluOai
from moe_typed.plan import AiterFacts, Environment, MoEProblem, RejectReason, StepKind, plan, tolerance

FACTS = AiterFacts("9.0", quantizes_mxfp8=True, passes_mxfp8=True, passes_mxfp4=True, gfx="gfx950")
MI355 = Environment(
    device="cuda",
    device_name="MI355X",
    capability=(9, 5),
    libraries={"torch": "2.13.0", "triton": "3.9.0", "amd-aiter": "9.0"},
    gfx="gfx950",
    aiter=FACTS,
)
MI300 = attrs.evolve(MI355, device_name="MI300X", gfx="gfx942", aiter=attrs.evolve(FACTS, gfx="gfx942"))
HOPPER = attrs.evolve(MI355, device_name="H100", gfx="", aiter=None, libraries={"torch": "2.13.0", "triton": "3.9.0"})
PROBLEM = MoEProblem(num_experts=8, top_k=2, hidden=256, inter=128, model="bf16", weights="bf16", activation=SiluAndMul.name, rows=10)


def weights(name: str, activation: str = SiluAndMul.name) -> MoEProblem:
    return attrs.evolve(PROBLEM, weights=name, activation=activation)


@pytest.mark.parametrize(
    ("problem", "environment", "prepared"),
    [
        (weights("bf16"), MI355, "AiterBf16Weights"),
        (weights("fp8-block128"), MI355, "AiterFp8Block128Weights"),
        (weights("fp8-block128"), MI300, "AiterFp8FnuzBlock128Weights"),
        (weights("int8-channel"), MI300, "AiterInt8TokenWeights"),
        (weights("mxfp4"), MI355, "AiterMxFp4A4W4Weights"),
        (weights("mxfp4"), MI300, "AiterMxFp4A8W4Weights"),
        (weights("mxfp4", SwigluOai.name), MI355, "AiterMxFp4A8W4Weights"),
    ],
)
def test_aiter_comes_first_with_weights_for_the_device(problem: MoEProblem, environment: Environment, prepared: str) -> None:
    report = plan(problem, environment)
    assert (report.runner, report.prepared_weights) == ("aiter", prepared)
    assert [(step.source, step.target) for step in report.steps if step.kind is StepKind.RUN] == [("AiterSinkInput", "SummedRowsOutput")]


@pytest.mark.parametrize(
    ("problem", "environment", "reason", "fragment"),
    [
        (weights("nvfp4"), HOPPER, RejectReason.DEVICE, "it needs an AMD GPU; this is H100"),
        (weights("bf16"), attrs.evolve(MI355, libraries={"torch": "2.13.0"}), RejectReason.LIBRARY_MISSING, "amd-aiter is not installed"),
        (weights("mxfp8"), MI300, RejectReason.WEIGHT_FORMAT, "weights are mxfp8"),
        (weights("fp8-tensor"), MI355, RejectReason.WEIGHT_FORMAT, "static=StaticScales(w2_input=...)"),
    ],
)
def test_aiter_is_not_chosen_and_says_why(problem: MoEProblem, environment: Environment, reason: RejectReason, fragment: str) -> None:
    (item,) = [item for item in plan(problem, environment).rejected if item.runner == "aiter"]
    assert item.reason is reason
    assert fragment in item.detail


def test_a_gpu_of_another_maker_loses_nothing_by_it() -> None:
    report = plan(weights("nvfp4"), HOPPER)
    assert (report.runner, [loss.preferred for loss in report.degradations]) == ("reference", ["triton"])


def test_dense_rows_are_rounded_to_what_the_kernels_multiply() -> None:
    bounds = [tolerance(plan(weights(name), MI355)) for name in ("bf16", "int8-channel", "fp8-channel", "mxfp4")]
    assert bounds == sorted(bounds)
    assert bounds[2] > 3 * 2.0**-4
    assert bounds[3] > 3 * 2.0**-2

"""Plans: what is chosen, what is not and why, bytes, degradations, JSON."""

import logging

import attrs
import pytest
import torch

from moe_typed import Bf16ExpertWeights, Bf16Rows, Fp8Block128ExpertWeights, Fp32Rows, GateUp, SiluAndMul, SoftmaxTopK, SwigluOai
from moe_typed.plan import (
    Environment,
    MoEProblem,
    PlanError,
    PlanReport,
    RejectReason,
    RunnerRequest,
    StepKind,
    Wire,
    build_layer,
    from_json,
    plan,
    planner,
    probe_environment,
    relative_error,
    to_json,
    tolerance,
)

CPU = Environment(device="cpu", device_name="test", capability=(0, 0), libraries={"torch": "2.13.0", "triton": "3.9.0"})
HOPPER = attrs.evolve(CPU, device="cuda", device_name="test", capability=(9, 0))
PROBLEM = MoEProblem(num_experts=8, top_k=2, hidden=256, inter=128, model="bf16", weights="bf16", activation="silu", rows=10)


def asking(
    *, wire: Wire = Wire.AUTO, runner: RunnerRequest = RunnerRequest.AUTO, weights: str = "bf16", model: str = "bf16", hidden: int = 256
) -> MoEProblem:
    return attrs.evolve(PROBLEM, wire=wire, runner=runner, weights=weights, model=model, hidden=hidden)


def names(report: PlanReport) -> list[str]:
    return [step.name for step in report.steps if step.kind is StepKind.CONVERSION]


@pytest.mark.parametrize(
    ("problem", "environment", "runner", "wire", "conversions"),
    [
        (asking(), CPU, "reference", "bf16", ["as is"]),
        (asking(), HOPPER, "triton", "bf16", ["as is"]),
        (asking(wire=Wire.MXFP8), CPU, "reference", "mxfp8", ["quantize_mxfp8", "upscale_bf16"]),
        (asking(wire=Wire.MXFP8), HOPPER, "triton", "mxfp8", ["quantize_mxfp8", "upscale_bf16"]),
        (asking(weights="mxfp8", wire=Wire.MXFP8), CPU, "reference", "mxfp8", ["quantize_mxfp8"]),
        (asking(weights="fp8-block128"), HOPPER, "triton", "fp8-block128", ["quantize_fp8_block128"]),
        (asking(weights="fp8-block128"), CPU, "reference", "bf16", ["as is"]),
        (asking(weights="mxfp8"), HOPPER, "triton", "bf16", ["as is"]),
        (asking(weights="mxfp8", wire=Wire.MXFP8), HOPPER, "triton", "mxfp8", ["quantize_mxfp8"]),
        (asking(weights="int4-awq"), HOPPER, "triton", "bf16", ["as is"]),
        (asking(weights="nvfp4"), HOPPER, "reference", "bf16", ["as is"]),
        (asking(model="fp32", weights="fp32", wire=Wire.BF16), CPU, "reference", "bf16", ["round_bf16"]),
        (asking(model="fp16", weights="fp16", wire=Wire.FP8_BLOCK128), CPU, "reference", "fp8-block128", ["quantize_fp8_block128", "upscale_fp16"]),
    ],
)
def test_the_first_way_there_is(problem: MoEProblem, environment: Environment, runner: str, wire: str, conversions: list[str]) -> None:
    report = plan(problem, environment)
    assert (report.runner, report.wire, names(report)) == (runner, wire, conversions)


def test_conversions_say_their_bytes() -> None:
    report = plan(asking(wire=Wire.MXFP8), CPU)
    bf16, mx = 10 * 256 * 2, 10 * 256 + 10 * 256 // 32
    assert [step.bytes_moved for step in report.steps if step.kind is StepKind.CONVERSION] == [bf16 + mx, mx + bf16]
    assert report.bytes_moved == 2 * (bf16 + mx)
    assert plan(asking(), CPU).bytes_moved == 0


@pytest.mark.parametrize(
    ("problem", "environment", "runner", "reason", "fragments"),
    [
        (asking(), CPU, "triton", RejectReason.DEVICE, ("CUDA", "cpu")),
        (asking(), attrs.evolve(HOPPER, libraries={"torch": "2.13.0"}), "triton", RejectReason.LIBRARY_MISSING, ("triton is not installed",)),
        (asking(weights="fp8-block128"), attrs.evolve(HOPPER, capability=(8, 0)), "triton", RejectReason.CAPABILITY, ("(8, 0)", "fp8")),
        (asking(weights="bf16"), attrs.evolve(HOPPER, capability=(7, 5)), "triton", RejectReason.CAPABILITY, ("(7, 5)", "below (8, 0)")),
        (asking(weights="nvfp4"), HOPPER, "triton", RejectReason.WEIGHT_FORMAT, ("nvfp4", "fp8-block128", "mxfp4")),
        (asking(weights="mxfp8"), attrs.evolve(HOPPER, capability=(8, 0)), "triton", RejectReason.CAPABILITY, ("(8, 0)", "fp8")),
        (asking(), HOPPER, "reference", RejectReason.NOT_NEEDED, ("triton",)),
    ],
)
def test_what_is_not_chosen_says_why(
    problem: MoEProblem, environment: Environment, runner: str, reason: RejectReason, fragments: tuple[str, ...]
) -> None:
    (item,) = [item for item in plan(problem, environment).rejected if item.runner == runner]
    assert item.reason is reason
    for fragment in fragments:
        assert fragment in item.detail


@pytest.mark.parametrize(
    ("problem", "environment", "reason"),
    [
        (asking(runner=RunnerRequest.TRITON), CPU, RejectReason.DEVICE),
        (asking(weights="int3"), CPU, RejectReason.WEIGHT_FORMAT),
        (asking(wire=Wire.MXFP8, hidden=100), CPU, RejectReason.DIVISIBILITY),
        (asking(weights="mxfp8", wire=Wire.MXFP8, hidden=48), CPU, RejectReason.DIVISIBILITY),
        (asking(weights="fp8-block128", wire=Wire.BF16, runner=RunnerRequest.TRITON), HOPPER, RejectReason.WIRE_FORMAT),
    ],
)
def test_a_request_is_honoured_or_refused(problem: MoEProblem, environment: Environment, reason: RejectReason) -> None:
    with pytest.raises(PlanError) as caught:
        plan(problem, environment)
    assert reason in [item.reason for item in caught.value.rejected]
    assert reason.explanation in str(caught.value)


def test_an_unknown_model_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="int8"):
        plan(asking(model="int8"), CPU)


def test_a_gpu_left_to_the_reference_is_recorded_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    planner.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "moe_typed.plan"):
        report = plan(asking(weights="nvfp4"), HOPPER)
        again = plan(asking(weights="nvfp4"), HOPPER)
    (loss,) = report.degradations
    assert (loss.subject, loss.preferred, loss.used) == ("runner", "triton", "reference")
    assert "nvfp4" in loss.detail
    assert again.degradations == report.degradations
    assert len(caplog.records) == 1
    assert plan(asking(weights="nvfp4", runner=RunnerRequest.REFERENCE), HOPPER).degradations == ()


def test_json_there_and_back() -> None:
    report = plan(asking(wire=Wire.MXFP8), HOPPER)
    assert from_json(to_json(report)) == report


@pytest.mark.parametrize(
    ("text", "fragment"), [("", "not a plan report"), ("[]", "not a plan report"), ('{"problem": 3, "x": 1}', "extra fields found (x)")]
)
def test_json_that_is_no_report_is_refused(text: str, fragment: str) -> None:
    with pytest.raises(ValueError, match="not a plan report") as caught:
        from_json(text)
    assert fragment in str(caught.value)


def bf16_weights() -> Bf16ExpertWeights[GateUp]:
    return Bf16ExpertWeights(torch.randn(8, 256, 256).mul(0.06).to(torch.bfloat16), torch.randn(8, 256, 128).mul(0.09).to(torch.bfloat16), GateUp)


@pytest.mark.parametrize("wire", list(Wire))
def test_a_built_layer_does_what_the_plan_says(wire: Wire) -> None:
    report = plan(asking(wire=wire), CPU)
    layer = build_layer(report, Bf16Rows, bf16_weights(), SiluAndMul())
    assert layer.dispatcher.payload.format.name == report.wire
    routing = SoftmaxTopK(2, renormalize=True).route(torch.randn(10, 8))
    output = layer(Bf16Rows(torch.randn(10, 256).to(torch.bfloat16)), routing)
    assert (output.dtype, tuple(output.shape)) == (torch.bfloat16, (10, 256))


def test_a_layer_is_built_of_what_the_plan_was_made_for() -> None:
    report = plan(asking(), CPU)
    with pytest.raises(ValueError, match="rows = bf16, but fp32"):
        build_layer(report, Fp32Rows, bf16_weights(), SiluAndMul())
    with pytest.raises(ValueError, match="activation = silu, but swiglu-oai"):
        build_layer(report, Bf16Rows, bf16_weights(), SwigluOai())
    fp8 = Fp8Block128ExpertWeights(
        torch.zeros(8, 256, 256).to(torch.float8_e4m3fn),
        torch.zeros(8, 256, 128).to(torch.float8_e4m3fn),
        torch.ones(8, 2, 2),
        torch.ones(8, 2, 1),
        GateUp,
    )
    with pytest.raises(ValueError, match="weights = bf16, but fp8-block128"):
        build_layer(report, Bf16Rows, fp8, SiluAndMul())


def test_tolerance_grows_with_coarser_formats() -> None:
    plans = [
        plan(problem, CPU)
        for problem in (asking(model="fp32", weights="fp32"), asking(model="fp16", weights="fp16"), asking(), asking(wire=Wire.MXFP8))
    ]
    bounds = [tolerance(report) for report in plans]
    assert bounds == sorted(bounds)
    assert bounds[0] < 2e-5
    assert bounds[-1] < 0.2


@pytest.mark.parametrize(
    ("got", "expected", "error"),
    [
        ([3.0, 4.0], [3.0, 4.0], 0.0),
        ([0.0, 5.0], [0.0, 4.0], 0.25),
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], float("inf")),
        ([float("nan")], [1.0], float("inf")),
    ],
)
def test_relative_error(got: list[float], expected: list[float], error: float) -> None:
    assert relative_error(torch.tensor(got), torch.tensor(expected)) == error


def test_the_environment_of_this_machine_is_probed_without_importing_what_it_reports() -> None:
    environment = probe_environment(torch.device("cpu"))
    assert environment.device == "cpu"
    assert environment.libraries["torch"] == torch.__version__.partition("+")[0] or environment.libraries["torch"] == torch.__version__

"""All-to-all backends: which runner works behind which, what each wire becomes for each kind of weights, and plans over them."""

import logging

import attrs
import pytest
import torch

from moe_typed import Bf16ExpertWeights, GateUp
from moe_typed.plan import (
    AiterFacts,
    Backend,
    Environment,
    MoEProblem,
    PlanError,
    RejectReason,
    RunnerRequest,
    StepKind,
    Wire,
    backends_of,
    build_layer,
    from_json,
    plan,
    planner,
    supports,
    to_json,
)
from moe_typed.plan.backends import RUNNER_INPUTS
from moe_typed.plan.ways import DENSE_MODELS, bridge
from moe_typed.runners import ReferenceRunner, SiluAndMul
from moe_typed.runners.acceptance import ACCEPTANCE, RunnerName
from moe_typed.runners.aiter.runner import AiterRunner
from moe_typed.runners.ascend import AscendRunner
from moe_typed.table import TRANSITIONS, Row

MODULES = {backend.module: "1.0" for backend in Backend if backend.module}
AITER = AiterFacts("9.0", quantizes_mxfp8=True, passes_mxfp8=True, passes_mxfp4=True, gfx="gfx950")
CPU = Environment(device="cpu", device_name="test", capability=(0, 0), libraries={"torch": "2.13.0", "triton": "3.9.0", **MODULES})
AMD = attrs.evolve(CPU, device="cuda", device_name="MI355X", gfx="gfx950", aiter=AITER, libraries={**CPU.libraries, "amd-aiter": "9.0"})
NPU = attrs.evolve(CPU, device="npu", device_name="Ascend910B")
PROBLEM = MoEProblem(num_experts=8, top_k=2, hidden=512, inter=256, model="bf16", weights="bf16", activation="silu", rows=10)


def asking(backend: Backend, *, wire: Wire = Wire.AUTO, weights: str = "bf16", runner: RunnerRequest = RunnerRequest.AUTO) -> MoEProblem:
    ranks = 4 if backend.sends else 1
    return attrs.evolve(PROBLEM, backend=backend, ranks=ranks, wire=wire, weights=weights, runner=runner)


class TestSupport:
    def test_the_inputs_are_those_of_the_runners(self) -> None:
        pytest.importorskip("triton")
        from moe_typed.runners.triton.runner import TritonRunner

        for runner in (ReferenceRunner, AiterRunner, AscendRunner, TritonRunner):
            assert RUNNER_INPUTS[RunnerName(runner.name)] == runner.inputs

    @pytest.mark.parametrize("runner", RunnerName)
    @pytest.mark.parametrize("backend", Backend)
    def test_the_answer_is_the_table_s(self, backend: Backend, runner: RunnerName) -> None:
        cells = [TRANSITIONS[backend.variant, runner_input] for runner_input in RUNNER_INPUTS[runner]]
        support = supports(backend, runner)
        if backend.on_npu and runner in (RunnerName.TRITON, RunnerName.AITER):
            assert not support
            assert support.reasons == (f"its rows are on an Ascend NPU, where the {runner.value} runner does not run",)
            return
        assert bool(support) is any(isinstance(cell, Row) for cell in cells)
        assert support.row is next((cell for cell in cells if isinstance(cell, Row)), None)
        assert len(support.reasons) == (0 if support else len(cells))

    def test_runners_of_gpus_and_of_npus_share_no_backend(self) -> None:
        on_npus = set(backends_of(RunnerName.ASCEND))
        assert on_npus == {backend for backend in Backend if backend.on_npu}
        assert not on_npus & {*backends_of(RunnerName.TRITON), *backends_of(RunnerName.AITER)}

    def test_every_variant_of_the_table_has_a_backend(self) -> None:
        assert {backend.variant for backend in Backend} == {variant for variant, _ in TRANSITIONS}

    def test_aiter_works_behind_all_that_it_should(self) -> None:
        needed = {Backend.STANDARD, Backend.DEEPEP_NORMAL, Backend.DEEPEP_LL, Backend.MORI_NORMAL, Backend.MORI_LL, Backend.MOONCAKE, Backend.NIXL}
        assert needed <= set(backends_of(RunnerName.AITER))


class TestDecisions:
    """The table of wires and weights for AITER: as it is, by a named conversion, or not at all."""

    AS_IS, UPSCALE = "", "upscale_bf16"

    @pytest.mark.parametrize(
        ("weights", "bf16", "fp8", "mxfp8", "mxfp4"),
        [
            ("AiterBf16Weights", AS_IS, UPSCALE, UPSCALE, UPSCALE),
            ("AiterFp8TensorWeights", AS_IS, UPSCALE, UPSCALE, UPSCALE),
            ("AiterFp8TokenWeights", AS_IS, UPSCALE, UPSCALE, UPSCALE),
            ("AiterInt8TokenWeights", AS_IS, UPSCALE, UPSCALE, UPSCALE),
            ("AiterFp8Block128Weights", AS_IS, AS_IS, UPSCALE, UPSCALE),
            ("AiterMxFp4A4W4Weights", AS_IS, UPSCALE, UPSCALE, AS_IS),
            ("AiterMxFp4A8W4Weights", AS_IS, UPSCALE, AS_IS, UPSCALE),
            ("AiterMxFp4A16W4Weights", AS_IS, UPSCALE, UPSCALE, UPSCALE),
            ("AiterMxFp8Weights", AS_IS, UPSCALE, AS_IS, UPSCALE),
        ],
    )
    def test_are_these(self, weights: str, bf16: str, fp8: str, mxfp8: str, mxfp4: str) -> None:
        (payloads,) = {row.payloads for row in ACCEPTANCE if row.prepared.__qualname__ == weights}
        for wire, expected in ((Wire.BF16, bf16), (Wire.FP8_BLOCK128, fp8), (Wire.MXFP8, mxfp8), (Wire.MXFP4, mxfp4)):
            conversions = bridge(Backend.MORI_NORMAL.carries[wire], payloads, DENSE_MODELS["bf16"])
            assert conversions is not None
            assert [conversion.name for conversion in conversions] == ([expected] if expected else []), wire

    def test_slabs_change_the_order_of_their_scales_where_that_is_enough(self) -> None:
        arrives = Backend.DEEPEP_LL.carries[Wire.FP8_BLOCK128]
        (payloads,) = {row.payloads for row in ACCEPTANCE if row.prepared.__qualname__ == "AiterFp8Block128Weights"}
        conversions = bridge(arrives, payloads, DENSE_MODELS["bf16"])
        assert conversions is not None
        assert [conversion.name for conversion in conversions] == ["slab_scales_to_row_major"]


class TestPlans:
    @pytest.mark.parametrize("backend", Backend)
    def test_every_backend_can_be_planned_for(self, backend: Backend) -> None:
        report = plan(asking(backend), NPU if backend.on_npu else AMD)
        assert (report.runner, report.dispatcher, report.wire) == ("ascend" if backend.on_npu else "aiter", backend.value, "bf16")
        transition = next(step for step in report.steps if step.kind is StepKind.TRANSITION)
        assert transition.source == f"{backend.variant.__qualname__}[Bf16Rows]"
        assert report.steps[-1].source == backend.variant.combine_input.__qualname__
        assert from_json(to_json(report)) == report

    def test_a_library_that_quantises_is_a_step_with_its_bytes(self) -> None:
        report = plan(asking(Backend.DEEPEP_LL, wire=Wire.FP8_BLOCK128, weights="fp8-block128"), AMD)
        names = [step.name for step in report.steps if step.kind is StepKind.CONVERSION]
        assert names == ["as is", "deepep-ll quantises", "slab_scales_to_row_major"]
        fp8 = 10 * 512 + 10 * 4 * 4
        assert [step.bytes_moved for step in report.steps if step.kind is StepKind.CONVERSION] == [0, 10 * 512 * 2 + fp8, 2 * fp8]

    @pytest.mark.parametrize("wire", [Wire.MXFP8, Wire.MXFP4])
    @pytest.mark.parametrize("backend", [Backend.DEEPEP_LL, Backend.MOONCAKE, Backend.NIXL])
    def test_a_wire_that_a_library_does_not_carry_is_refused(self, backend: Backend, wire: Wire) -> None:
        with pytest.raises(PlanError, match=f"{backend.value} carries bf16, fp8-block128; {wire.value} was asked for"):
            plan(asking(backend, wire=wire), CPU)

    def test_a_missing_library_is_refused_by_name(self) -> None:
        environment = attrs.evolve(CPU, libraries={"torch": "2.13.0"})
        with pytest.raises(PlanError, match=r"library that it needs is not installed \(mori") as caught:
            plan(asking(Backend.MORI_NORMAL), environment)
        assert {item.reason for item in caught.value.rejected} == {RejectReason.LIBRARY_MISSING}

    @pytest.mark.parametrize(
        ("facts", "lacks"),
        [(attrs.evolve(AITER, quantizes_mxfp8=False), "scale_type"), (attrs.evolve(AITER, passes_mxfp8=False), "drop their scales")],
    )
    def test_mxfp8_for_an_aiter_that_would_misread_it_is_sent_as_bf16_and_said_once(
        self, facts: AiterFacts, lacks: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        planner.warn_once.cache_clear()
        environment = attrs.evolve(AMD, aiter=facts)
        with caplog.at_level(logging.WARNING, "moe_typed.plan"):
            report = plan(asking(Backend.MORI_NORMAL, wire=Wire.MXFP8, weights="mxfp8"), environment)
            plan(asking(Backend.MORI_NORMAL, wire=Wire.MXFP8, weights="mxfp8"), environment)
        assert report.wire == "bf16"
        (loss,) = report.degradations
        assert (loss.subject, loss.preferred, loss.used) == ("wire", "mxfp8", "bf16")
        assert lacks in loss.detail
        assert len(caplog.records) == 1

    def test_mxfp8_goes_straight_through_an_aiter_that_takes_it(self) -> None:
        report = plan(asking(Backend.MORI_NORMAL, wire=Wire.MXFP8, weights="mxfp8"), AMD)
        assert [step.name for step in report.steps if step.kind is StepKind.CONVERSION] == ["quantize_mxfp8"]
        assert report.degradations == ()

    def test_a_layer_over_a_library_is_not_built_from_a_plan_alone(self) -> None:
        report = plan(asking(Backend.NIXL, runner=RunnerRequest.REFERENCE), CPU)
        weights = Bf16ExpertWeights(torch.zeros(2, 512, 512, dtype=torch.bfloat16), torch.zeros(2, 512, 256, dtype=torch.bfloat16), GateUp)
        with pytest.raises(ValueError, match="build_experts"):
            build_layer(report, DENSE_MODELS["bf16"].rows, weights, SiluAndMul())

    @pytest.mark.parametrize(("ranks", "backend", "text"), [(3, Backend.NIXL, "spread evenly over 3"), (2, Backend.STANDARD, "sends nothing")])
    def test_ranks_that_cannot_be(self, ranks: int, backend: Backend, text: str) -> None:
        with pytest.raises(ValueError, match=text):
            attrs.evolve(PROBLEM, ranks=ranks, backend=backend)


class TestOnTheNpu:
    NPU_BACKENDS = pytest.mark.parametrize("backend", [backend for backend in Backend if backend.on_npu])

    @NPU_BACKENDS
    @pytest.mark.parametrize(("wire", "weights", "arrives"), [(Wire.INT8, "int8-channel", "int8-token"), (Wire.MXFP8, "mxfp8", "mxfp8-pairs")])
    def test_a_wire_is_what_its_library_makes_of_bf16(self, backend: Backend, wire: Wire, weights: str, arrives: str) -> None:
        report = plan(asking(backend, wire=wire, weights=weights, runner=RunnerRequest.ASCEND), NPU)
        assert (report.runner, report.wire) == ("ascend", arrives)
        assert f"{backend.value} quantises" in [step.name for step in report.steps]

    def test_weights_are_prepared_for_the_dtype_of_the_model(self) -> None:
        names = [
            plan(attrs.evolve(asking(Backend.ASCEND_TP, weights="int8-channel"), model=model), NPU).prepared_weights for model in ("bf16", "fp16")
        ]
        assert names == ["AscendW8A8Weights", "AscendW8A8Fp16Weights"]

    @pytest.mark.parametrize("backend", [Backend.DEEPEP_NORMAL_NPU, Backend.DEEPEP_LL_NPU])
    @pytest.mark.parametrize("weights", ["int8-channel", "int4-awq"])
    def test_behind_a_library_that_combines_bf16_they_are_prepared_for_it(self, backend: Backend, weights: str) -> None:
        """Those for fp16 would refuse: they give no bf16 results."""
        report = plan(attrs.evolve(asking(backend, weights=weights, runner=RunnerRequest.ASCEND), model="fp16"), NPU)
        assert report.prepared_weights in ("AscendW8A8Weights", "AscendW4A16Weights")

    def test_fp16_weights_give_no_bf16_and_are_refused_behind_it(self) -> None:
        with pytest.raises(PlanError):
            plan(attrs.evolve(asking(Backend.DEEPEP_LL_NPU, weights="fp16", runner=RunnerRequest.ASCEND), model="fp16"), NPU)

    @NPU_BACKENDS
    def test_another_device_is_refused(self, backend: Backend) -> None:
        with pytest.raises(PlanError) as caught:
            plan(asking(backend, runner=RunnerRequest.ASCEND), CPU)
        (item,) = caught.value.rejected
        assert (item.runner, item.reason) == ("ascend", RejectReason.DEVICE)
        assert "this is cpu" in item.detail

    def test_the_missing_library_is_named(self) -> None:
        bare = attrs.evolve(NPU, libraries={"torch": "2.13.0", "deep_ep": "1.0"})
        for backend in (Backend.ASCEND_TP, Backend.DEEPEP_LL_NPU):
            with pytest.raises(PlanError, match="torch_npu") as caught:
                plan(asking(backend, runner=RunnerRequest.ASCEND), bare)
            assert [item.reason for item in caught.value.rejected] == [RejectReason.LIBRARY_MISSING]

    @pytest.mark.parametrize(("weights", "activation", "runs"), [("bf16", "gelu", True), ("mxfp8", "silu", True), ("mxfp8", "swiglu-oai", False)])
    def test_activations_are_the_runner_s_own(self, weights: str, activation: str, runs: bool) -> None:
        problem = attrs.evolve(asking(Backend.ASCEND_TP, weights=weights, runner=RunnerRequest.ASCEND), activation=activation)
        if runs:
            assert plan(problem, NPU).runner == "ascend"
            return
        with pytest.raises(PlanError, match="it does silu") as caught:
            plan(problem, NPU)
        assert caught.value.rejected[0].reason is RejectReason.ACTIVATION

    def test_a_runner_of_gpus_does_not_work_behind_it(self) -> None:
        report = plan(asking(Backend.ASCEND_TP), NPU)
        reasons = {item.runner: item.reason for item in report.rejected}
        assert reasons == {"triton": RejectReason.DEVICE, "aiter": RejectReason.DEVICE, "reference": RejectReason.NOT_NEEDED}
        assert not supports(Backend.STANDARD, RunnerName.ASCEND)
        assert set(backends_of(RunnerName.ASCEND)) == {backend for backend in Backend if backend.on_npu}

    def test_of_two_layouts_the_one_that_takes_the_wire_as_it_is(self) -> None:
        report = plan(asking(Backend.MORI_NORMAL, wire=Wire.MXFP8, weights="mxfp4"), AMD)
        assert report.prepared_weights == "AiterMxFp4A8W4Weights"
        assert [step.name for step in report.steps if step.kind is StepKind.CONVERSION] == ["quantize_mxfp8"]
        assert plan(asking(Backend.MORI_NORMAL, wire=Wire.MXFP4, weights="mxfp4"), AMD).prepared_weights == "AiterMxFp4A4W4Weights"

"""The facts that a wire format is: one test each, without a GPU."""

import itertools
import json
import logging

import pytest
import torch

from moe_typed import Bf16Rows, BoundaryError, Experts, GateUp, MxFp8ExpertWeights, StandardDispatcher, debug, from_topk, prepare_reference
from moe_typed.formats import (
    Conversion,
    Fp8Block128Rows,
    MxFp4Rows,
    MxFp8Rows,
    Payload,
    quantize_fp8_block128,
    quantize_mxfp4,
    quantize_mxfp8,
    upscale_bf16,
)
from moe_typed.plan import (
    AiterFacts,
    Environment,
    MoEProblem,
    PlanError,
    RunnerRequest,
    StepKind,
    Wire,
    from_json,
    plan,
    planner,
    to_json,
    wire_for_aiter,
)

WIRES: dict[Wire, type[Payload]] = {
    Wire.BF16: Bf16Rows,
    Wire.FP8_BLOCK128: Fp8Block128Rows,
    Wire.MXFP4: MxFp4Rows,
    Wire.MXFP8: MxFp8Rows,
}
CPU = Environment(device="cpu", device_name="test", capability=(0, 0), libraries={"torch": "2.13.0"})
E8, FN = torch.float8_e8m0fnu, torch.float8_e4m3fn


def problem(wire: Wire, weights: str, hidden: int = 7168) -> MoEProblem:
    return MoEProblem(
        num_experts=8,
        top_k=2,
        hidden=hidden,
        inter=2048,
        model="bf16",
        weights=weights,
        activation="silu",
        rows=112,
        wire=wire,
        runner=RunnerRequest.AUTO,
    )


def rows(count: int, hidden: int = 7168) -> Bf16Rows:
    return Bf16Rows(torch.randn(count, hidden, generator=torch.Generator().manual_seed(0)).bfloat16())


def test_1_the_four_wire_formats_are_four_classes() -> None:
    assert len({cls.format for cls in WIRES.values()}) == 4
    for one, other in itertools.permutations(WIRES.values(), 2):
        assert not issubclass(one, other)


def test_2_a_row_of_7168_has_224_scales() -> None:
    for quantize in (quantize_mxfp8, quantize_mxfp4):
        assert quantize.target.format.scale is not None
        assert quantize.target.format.scale.group == (1, 32)
        assert tuple(quantize.run(rows(3)).scale.shape) == (3, 224)
    assert tuple(quantize_fp8_block128.run(rows(3)).scale.shape) == (3, 56)


def test_3_a_scale_is_one_byte_of_e8m0() -> None:
    scale = quantize_mxfp8.run(rows(1)).scale
    assert (scale.dtype, scale.element_size()) == (E8, 1)


@pytest.mark.parametrize(
    ("wire", "size"), [(Wire.BF16, 14336), (Wire.FP8_BLOCK128, 7168 + 56 * 4), (Wire.MXFP8, 7168 + 224), (Wire.MXFP4, 3584 + 224)]
)
def test_4_buffers_are_exact(wire: Wire, size: int) -> None:
    sent = StandardDispatcher(conversion(wire)).dispatch(rows(112), from_topk(torch.zeros(112, 1, dtype=torch.int32), torch.ones(112, 1), 1)).payload
    assert type(sent) is WIRES[wire]
    assert sent.format.payload_bytes(112, 7168) == 112 * size
    assert sum(part.untyped_storage().nbytes() for part in vars(sent).values()) == 112 * size


def conversion(wire: Wire) -> Conversion[Bf16Rows, Payload]:
    same: Conversion[Bf16Rows, Payload] = Conversion("as is", (Bf16Rows,), Bf16Rows, lambda rows, _live=None: rows)
    known: dict[Wire, Conversion[Bf16Rows, Payload]] = {
        Wire.BF16: same,
        Wire.FP8_BLOCK128: quantize_fp8_block128,
        Wire.MXFP8: quantize_mxfp8,
        Wire.MXFP4: quantize_mxfp4,
    }
    return known[wire]


def test_5_an_empty_batch_has_the_width_of_any_other() -> None:
    with debug("strict"):
        empty = quantize_mxfp8.run(rows(0))
    assert (tuple(empty.scale.shape), empty.scale.dtype) == ((0, 224), E8)
    assert (tuple(empty.data.shape), empty.data.dtype) == ((0, 7168), FN)
    with debug("layout"), pytest.raises(BoundaryError, match="axis 1 is 56, expected hidden//32 = 224"):
        MxFp8Rows(empty.data, empty.scale.new_empty(0, 56))


@pytest.mark.parametrize(("setting", "wire"), [("bf16", Bf16Rows), ("fp8-block128", Fp8Block128Rows), ("mxfp8", MxFp8Rows), ("mxfp4", MxFp4Rows)])
def test_6_a_setting_is_a_format(setting: str, wire: type[Payload]) -> None:
    asked = Wire(setting)
    assert WIRES[asked] is wire
    assert plan(problem(asked, "bf16"), CPU).wire == wire.format.name == setting
    assert plan(problem(Wire("auto"), "mxfp8"), CPU).wire in plan(problem(Wire.AUTO, "mxfp8"), CPU).accepts
    with pytest.raises(ValueError, match="mxfp6"):
        Wire("mxfp6")
    if wire is not Bf16Rows:  # honoured or refused: never another one
        with pytest.raises(PlanError, match="hidden = 7176 is not a multiple of"):
            plan(problem(asked, "bf16", hidden=7176), CPU)


@pytest.mark.parametrize(
    ("weights", "upscaled"),
    [
        ("bf16", {Wire.FP8_BLOCK128, Wire.MXFP8, Wire.MXFP4}),
        ("fp8-block128", {Wire.MXFP8, Wire.MXFP4}),
        ("mxfp8", {Wire.FP8_BLOCK128, Wire.MXFP4}),
    ],
)
def test_7_a_wire_that_the_weights_do_not_take_is_upscaled(weights: str, upscaled: set[Wire]) -> None:
    for wire in WIRES:
        names = [step.name for step in plan(problem(wire, weights), CPU).steps if step.kind is StepKind.CONVERSION]
        assert ("upscale_bf16" in names) is (wire in upscaled)


def test_8_the_receiver_of_mxfp8_takes_it_straight() -> None:
    w13, w2 = torch.randn(1, 128, 64).to(FN), torch.randn(1, 64, 64).to(FN)
    one = torch.full((1, 128, 2), 127, dtype=torch.uint8).view(E8)
    experts = Experts(prepare_reference(MxFp8ExpertWeights(w13, w2, one, one[:, :64].contiguous(), GateUp)))
    given, routing = rows(3, 64), from_topk(torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), 1)
    assert experts.conversions == ()
    straight = StandardDispatcher(quantize_mxfp8).then(experts)(given, routing)
    assert torch.equal(straight, StandardDispatcher(quantize_mxfp8).then(experts.accepting(upscale_bf16))(given, routing))
    with pytest.raises(BoundaryError, match=r"payload is Fp8Block128Rows"):
        experts(StandardDispatcher(quantize_fp8_block128).dispatch(rows(3, 128), routing))  # type: ignore[arg-type]


def test_9_a_fallback_is_recorded_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    facts = AiterFacts("0.1.7", quantizes_mxfp8=False, passes_mxfp8=False)
    decision = wire_for_aiter(Wire.MXFP8, facts)
    assert decision.wire is Wire.BF16
    libraries = {"torch": "2.13.0", "amd-aiter": "0.1.7"}
    machine = Environment(device="cuda", device_name="test", capability=(9, 5), libraries=libraries, gfx="gfx950", aiter=facts)
    planner.warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, "moe_typed"):
        report = plan(problem(Wire.MXFP8, "mxfp8"), machine)
        plan(problem(Wire.MXFP8, "mxfp8"), machine)
    assert report.degradations == (decision.degradation,)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert from_json(to_json(report)).degradations == report.degradations
    assert json.loads(to_json(report))["wire"] == "bf16"

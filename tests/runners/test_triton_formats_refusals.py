"""What the Triton runner refuses of weights, rows and activations, and what its classes accept."""

from typing import ClassVar, final

import pytest
import torch
from triton import knobs
from typing_extensions import override

from moe_typed import BoundaryError, UnsupportedError, debug
from moe_typed.formats import (
    AnyDenseRows,
    Bf16Rows,
    Fp8TensorRows,
    Fp8TokenRows,
    Fp16Rows,
    Fp32Rows,
    GateUp,
    GateUpOrder,
    Int8TokenRows,
    MxFp8Rows,
    NvFp4ExpertWeights,
    Payload,
)
from moe_typed.runners import Activation, Relu2, SiluAndMul, SwigluOai, ThenNorm
from moe_typed.runners import triton as room
from moe_typed.runners.acceptance import ACCEPTANCE, RunnerName
from moe_typed.stages import FlatRowsInput
from tests.ops.support import on_cpu, on_cuda
from tests.runners.triton_formats_support import HIDDEN, ROWS, SCALED, make_runner, make_weights, prepare, rand
from tests.runners.triton_support import make_routing

SILU = SiluAndMul()
on_both = pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
DENSE: tuple[type[AnyDenseRows], ...] = (Bf16Rows, Fp16Rows, Fp32Rows)
ACCEPTS: dict[type, tuple[type[Payload], ...]] = {
    room.TritonFp8TensorWeights: (*DENSE, Fp8TensorRows, Fp8TokenRows),
    room.TritonFp8ChannelWeights: (*DENSE, Fp8TensorRows, Fp8TokenRows),
    room.TritonMxFp8Weights: (*DENSE, MxFp8Rows),
    room.TritonMxFp4Weights: (*DENSE, MxFp8Rows),
    room.TritonInt8ChannelWeights: (*DENSE, Int8TokenRows),
    room.TritonInt4Weights: DENSE,
    room.TritonBf16UngatedWeights: (Bf16Rows,),
    room.TritonFp16UngatedWeights: (Fp16Rows,),
    room.TritonFp32UngatedWeights: (Fp32Rows,),
    room.TritonBf16TransposedWeights: (Bf16Rows,),
    room.TritonFp16TransposedWeights: (Fp16Rows,),
    room.TritonFp32TransposedWeights: (Fp32Rows,),
}


def test_the_accept_sets() -> None:
    found = {row.prepared: row.payloads for row in ACCEPTANCE if row.runner is RunnerName.TRITON}
    assert {cls: found[cls] for cls in ACCEPTS} == ACCEPTS


@on_both
@pytest.mark.parametrize("fmt", SCALED)
def test_a_payload_outside_the_accept_set_is_refused(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 2)
    other = "int8-token" if fmt.startswith("fp8") else "fp8-token"
    runner_input = FlatRowsInput(ROWS[other](rand(1, 3, HIDDEN).to(device)), make_routing(torch.zeros(3, 1, dtype=torch.int64, device=device), 2))
    with pytest.raises(BoundaryError, match=r"but the Triton runner over .* weights takes Bf16Rows"):
        make_runner(weights, SILU).run(runner_input)


@on_both
@pytest.mark.parametrize("fmt", ["int8-channel", "int4-awq"])
def test_rows_of_another_width_are_refused(device: str, fmt: str) -> None:
    runner = make_runner(make_weights(fmt, device, 2), SILU)
    wide = FlatRowsInput(Fp32Rows(torch.zeros(3, 2 * HIDDEN, device=device)), make_routing(torch.zeros(3, 1, dtype=torch.int64, device=device), 2))
    with debug("layout"), pytest.raises(BoundaryError, match="hidden"):
        runner.run(wide)
    with debug("off"), pytest.raises(ValueError, match=f"of width {2 * HIDDEN}, but the weights take rows of width {HIDDEN}"):
        runner.run(wide)


@final
class Unknown(Activation):
    """Some activation of which the runner has not heard."""

    name: ClassVar[str] = "unknown"

    @override
    def takes(self, order: type[GateUpOrder]) -> bool:
        return True

    @override
    def activate(self, joined: torch.Tensor, order: type[GateUpOrder]) -> torch.Tensor:
        return joined


@on_both
@pytest.mark.parametrize("activation", [Unknown(), ThenNorm(Unknown(), torch.relu, torch.float32)], ids=["alone", "before a norm"])
def test_a_class_that_is_not_known_is_refused(device: str, activation: Activation) -> None:
    with pytest.raises(UnsupportedError, match="does not know the activation 'unknown'"):
        prepare(make_weights("fp32-ungated", device, 2)).runner(activation)


@on_both
def test_an_activation_of_another_order_is_refused(device: str) -> None:
    for fmt, activation in (("fp32-ungated", SILU), ("fp32-ungated", SwigluOai()), ("int8-channel", Relu2()), ("int4-gptq", Relu2())):
        with pytest.raises(UnsupportedError, match=f"the activation '{activation.name}' does not take rows in the order"):
            prepare(make_weights(fmt, device, 2)).runner(activation)


@on_both
@pytest.mark.parametrize("group", [16, 48])
def test_int4_groups_that_no_instruction_fits_into_are_refused(device: str, group: int) -> None:
    with pytest.raises(UnsupportedError, match=f"groups of {group} along the depth"):
        prepare(make_weights("int4-gptq", device, 2, hidden=2 * group, inter=2 * group, group=group))


def test_nvfp4_is_refused() -> None:
    data, scale = torch.zeros(1, 32, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.ones(1, 32, 1).to(torch.float8_e4m3fn)
    down, by = torch.zeros(1, 16, 8, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.ones(1, 16, 1).to(torch.float8_e4m3fn)
    weights = NvFp4ExpertWeights(data, down, scale, by, torch.ones(1, 2), torch.ones(1), GateUp)
    with pytest.raises(TypeError, match=r"but for nvfp4; got NvFp4ExpertWeights"):
        room.prepare_triton(weights)  # type: ignore[call-overload]


def test_cpu_weights_are_refused_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not knobs.runtime.interpret
    for fmt in ("int8-channel", "int4-awq"):
        with pytest.raises(UnsupportedError, match="the weights are on cpu, and Triton runs on GPUs"):
            prepare(make_weights(fmt, "cpu", 2))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu)])
def test_bf16_is_refused_by_the_interpreter(device: str) -> None:
    weights, routing = make_weights("int8-channel", device, 2), make_routing(torch.zeros(3, 1, dtype=torch.int64, device=device), 2)
    runner = prepare(weights).runner(SILU)
    for fmt in ("bf16", "int8-token"):
        with pytest.raises(UnsupportedError, match="interpreter multiplies bf16 wrongly"):
            runner.run(FlatRowsInput(ROWS[fmt](rand(1, 3, HIDDEN)), routing))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_fp8_is_refused_on_a_device_without_it(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def ampere(_: torch.device) -> tuple[int, int]:
        return 8, 0

    monkeypatch.setattr(torch.cuda, "get_device_capability", ampere)
    for fmt in ("fp8-tensor", "fp8-channel", "mxfp8"):
        with pytest.raises(UnsupportedError, match=r"need compute capability 8\.9 or later; cuda:0 has 8\.0"):
            prepare(make_weights(fmt, device, 2))
    runner = prepare(make_weights("mxfp4", device, 2)).runner(SILU)
    runner_input = FlatRowsInput(ROWS["mxfp8"](rand(1, 3, HIDDEN).to(device)), make_routing(torch.zeros(3, 1, dtype=torch.int64, device=device), 2))
    with pytest.raises(UnsupportedError, match=r"mxfp8 rows need compute capability 8\.9"):
        runner.run(runner_input)

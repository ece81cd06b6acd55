import re
import subprocess
import sys

import attrs
import pytest
import torch
from triton import knobs
from typing_extensions import override

from moe_typed import (
    Bf16Rows,
    BoundaryError,
    Experts,
    Fp8Block128Rows,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    StandardDispatchOutput,
    UnsupportedError,
    debug,
    quantize_fp8_block128,
)
from moe_typed.formats import GateUpOrder
from moe_typed.runners import Activation, GatedActivation, SwigluClamped, SwigluOai, SwigluStep, reference_experts
from moe_typed.runners.triton import prepare_triton
from moe_typed.runners.triton.activations import epilogue_of
from moe_typed.stages import FlatRowsInput
from tests.ops.support import on_cpu, on_cuda
from tests.runners.triton_support import HIDDEN, SILU, make_routing, make_runner, make_weights, randn, random_ids


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
def test_prepared_weights_are_refused(device: str) -> None:
    weights = make_weights("fp32", device, 2)
    assert isinstance(weights, Fp32ExpertWeights)
    with pytest.raises(TypeError, match=r"prepare_triton takes .*; got TritonFp32Weights"):
        prepare_triton(prepare_triton(weights))  # type: ignore[call-overload]


@pytest.mark.parametrize("fmt", ["bf16", "fp8-block128"])
def test_what_the_interpreter_gets_wrong_is_refused(fmt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(UnsupportedError, match=f"{fmt} weights need a GPU"):
        make_runner(make_weights(fmt, "cpu", 2, hidden=128, inter=128), SILU)


def test_cpu_weights_are_refused_where_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not knobs.runtime.interpret
    with pytest.raises(UnsupportedError, match="the weights are on cpu, and Triton runs on GPUs"):
        make_runner(make_weights("fp32", "cpu", 2), SILU)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize(
    ("fmt", "found", "needed"), [("fp8-block128", (8, 0), "8.9"), ("bf16", (7, 5), "8.0"), ("fp16", (7, 5), "8.0"), ("fp32", (7, 0), "8.0")]
)
def test_weights_are_refused_on_a_device_that_cannot_multiply_them(
    device: str, fmt: str, found: tuple[int, int], needed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = make_weights(fmt, device, 2)

    def older(_: torch.device) -> tuple[int, int]:
        return found

    monkeypatch.setattr(torch.cuda, "get_device_capability", older)
    with pytest.raises(UnsupportedError, match=re.escape(f"compute capability {needed} or later; cuda:0 has {found[0]}.{found[1]}")):
        make_runner(weights, SILU)


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
def test_unknown_activations_and_orders_are_refused(device: str, fmt: str) -> None:
    class Relu(GatedActivation):
        name = "relu"

        @override
        def apply(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
            return gate.relu() * up

    class Reversed(GateUpOrder):
        title = "reversed"

        @staticmethod
        @override
        def split(joined: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
            return GateUp.split(joined.flip(dim), dim)

        @staticmethod
        @override
        def join(gate: torch.Tensor, up: torch.Tensor, dim: int) -> torch.Tensor:
            return GateUp.join(gate, up, dim).flip(dim)

    with pytest.raises(UnsupportedError, match="does not know the activation 'relu'"):
        make_runner(make_weights(fmt, device, 2), Relu())
    with pytest.raises(UnsupportedError, match=r"does not know the gate/up order .*Reversed"):
        make_runner(make_weights(fmt, device, 2, Reversed), SILU)


@pytest.mark.parametrize("activation", [SwigluOai(alpha=1, limit=7), SwigluClamped(limit=7), SwigluStep(limit=7), SILU], ids=lambda one: one.name)
def test_kernels_are_told_floats_whatever_numbers_an_activation_has(activation: Activation) -> None:
    epilogue = epilogue_of(activation)
    assert [type(number) for number in epilogue[1:]] == [float] * 3  # to Triton, a whole number makes another variant of a kernel
    assert epilogue.limit == getattr(activation, "limit", float("inf"))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
def test_rows_that_do_not_fit_the_weights_are_refused(device: str) -> None:
    runner = make_runner(make_weights("fp32", device, 2), SILU)
    routing = make_routing(torch.zeros(3, 1, dtype=torch.int64, device=device), 2)
    wide = FlatRowsInput(Fp32Rows(torch.zeros(3, 128, device=device)), routing)
    with debug("layout"), pytest.raises(BoundaryError, match=f"has hidden = 128 inside, but hidden = {HIDDEN} here"):
        runner.run(wide)
    with debug("off"), pytest.raises(ValueError, match=f"of width 128, but the weights take .* of width {HIDDEN}"):
        runner.run(wide)
    with debug("off"), pytest.raises(ValueError, match=r"rows are torch\.float8_e4m3fn"):
        runner.run(FlatRowsInput(quantize_fp8_block128.run(Fp32Rows(torch.zeros(3, 128, device=device))), routing))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("activation", [SILU, SwigluStep(1.0)], ids=["tuned", "general"])
def test_routes_of_other_rows_are_refused_even_with_debug_off(device: str, activation: Activation) -> None:
    """The kernels would read beyond the payload, or beyond the router weights."""
    runner = make_runner(make_weights("fp32", device, 2), activation)
    routing = make_routing(torch.zeros(5, 1, dtype=torch.int64, device=device), 2)
    for run in (runner.run, runner.run_routes):
        with debug("off"), pytest.raises(ValueError, match="the payload has 3 rows, and the routes are those of 5"):
            run(FlatRowsInput(Fp32Rows(torch.zeros(3, HIDDEN, device=device)), routing))
        with debug("off"), pytest.raises(ValueError, match=r"there are \[5, 1\] routes, and router weights \[4, 1\]"):
            run(FlatRowsInput(Fp32Rows(torch.zeros(5, HIDDEN, device=device)), attrs.evolve(routing, topk_weights=routing.topk_weights[1:])))


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=on_cpu), pytest.param("cuda", marks=on_cuda)])
def test_experts_run_on_it_through_the_table(device: str) -> None:
    weights = make_weights("fp32", device, 4)
    assert isinstance(weights, Fp32ExpertWeights)
    experts = Experts(prepare_triton(weights))
    assert experts.accepts == (Fp32Rows,)
    payload, routing = Fp32Rows(randn(1, 5, HIDDEN).to(device)), make_routing(random_ids(5, 2, 4).to(device), 4)
    found = experts(StandardDispatchOutput(payload, routing)).hidden_states
    expected = reference_experts(payload.data, routing.topk_ids, routing.topk_weights, weights, SILU)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_the_accept_sets() -> None:
    from moe_typed.runners import triton as room

    prepared = (room.TritonBf16Weights, room.TritonFp16Weights, room.TritonFp32Weights, room.TritonFp8Block128Weights)
    assert [cls.accepts() for cls in prepared] == [(Bf16Rows,), (Fp16Rows,), (Fp32Rows,), (Fp8Block128Rows,)]


# ---- importing it ---------------------------------------------------------------------------------------------------------------


def python(source: str) -> str:
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_importing_the_package_does_not_import_triton() -> None:
    assert python("import sys, moe_typed; print('triton' in sys.modules)").strip() == "False"


def test_a_missing_triton_is_named_with_its_extra() -> None:
    source = (
        "import sys; sys.modules['triton'] = None; import torch; from moe_typed import *; from moe_typed.runners.triton import prepare_triton;"
        "prepare_triton(Fp32ExpertWeights(torch.zeros(1, 2, 1), torch.zeros(1, 1, 1), GateUp))"
    )
    assert "ImportError: the Triton runner needs Triton: pip install 'moe-typed[triton]'" in python(source)

"""Weights, payloads and routings for the tests of the Triton runner, and their comparison with the reference."""

from typing import TypeAlias

import pytest
import torch

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    DeviceCount,
    Fp8Block128ExpertWeights,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    LocalIds,
    Payload,
    Routing,
    Settled,
    SiluAndMul,
    quantize_fp8_block128,
)
from moe_typed.formats import GateUpOrder
from moe_typed.runners import Activation, reference_experts
from moe_typed.runners.triton import prepare_triton
from moe_typed.runners.triton.general import TritonGeneralRunner
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.runners.triton.weights import TritonExpertWeights
from moe_typed.stages import FlatRowsInput
from tests.ops.support import on_cpu, on_cuda

AnyTritonRunner: TypeAlias = TritonRunner | TritonGeneralRunner

NAN = float("nan")
SILU = SiluAndMul()
HIDDEN, INTER = (256, 128) if torch.cuda.is_available() else (64, 32)  # fp8 needs multiples of 128; the interpreter takes its time

# Per row, |found - reference| / |reference|: rounding of the results and of two steps between (bf16 keeps 8 bits, fp16 11 but the interpreter
# accumulates in it), and for fp8 that of the activations to e4m3 (4 bits).
TOLERANCE = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 1.5e-2, "fp8-block128": 8e-2}
DTYPE = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8-block128": torch.bfloat16}

_TARGETS = [("cpu", "fp32", on_cpu), ("cpu", "fp16", on_cpu)] + [("cuda", name, on_cuda) for name in TOLERANCE]
targets = pytest.mark.parametrize(("device", "fmt"), [pytest.param(device, name, marks=marks) for device, name, marks in _TARGETS])
one_target_a_device = pytest.mark.parametrize(
    ("device", "fmt"),
    [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda), pytest.param("cuda", "fp8-block128", marks=on_cuda)],
)


def randn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weights(
    fmt: str,
    device: str,
    experts: int,
    order: type[GateUpOrder] = GateUp,
    *,
    hidden: int = HIDDEN,
    inter: int = INTER,
    biased: bool = False,
) -> TritonExpertWeights:
    w13, w2 = randn(1, experts, 2 * inter, hidden) / hidden**0.5, randn(2, experts, hidden, inter) / inter**0.5
    b13, b2 = (randn(3, experts, 2 * inter).to(device), randn(4, experts, hidden).to(device)) if biased else (None, None)

    def bias(dtype: torch.dtype) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return None if b13 is None else b13.to(dtype), None if b2 is None else b2.to(dtype)

    w13, w2 = w13.to(device), w2.to(device)
    match fmt:
        case "fp32":
            return Fp32ExpertWeights(w13, w2, order, b13, b2)
        case "fp16":
            return Fp16ExpertWeights(w13.half(), w2.half(), order, *bias(torch.float16))
        case "bf16":
            return Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), order, *bias(torch.bfloat16))
        case _:
            s13 = (randn(5, experts, 2 * (inter // 128), hidden // 128).abs() + 0.5).to(device)
            s2 = (randn(6, experts, hidden // 128, inter // 128).abs() + 0.5).to(device)
            fp8 = torch.float8_e4m3fn
            return Fp8Block128ExpertWeights(w13.to(fp8), w2.to(fp8), s13, s2, order, *bias(torch.bfloat16))


def make_payload(fmt: str, data: torch.Tensor) -> Payload:
    match fmt:
        case "fp32":
            return Fp32Rows(data)
        case "fp16":
            return Fp16Rows(data.half())
        case "bf16":
            return Bf16Rows(data.bfloat16())
        case _:
            return quantize_fp8_block128.run(Fp32Rows(data))


def make_runner(weights: TritonExpertWeights, activation: Activation) -> AnyTritonRunner:
    match weights:
        case Bf16ExpertWeights():
            return prepare_triton(weights).runner(activation)
        case Fp16ExpertWeights():
            return prepare_triton(weights).runner(activation)
        case Fp32ExpertWeights():
            return prepare_triton(weights).runner(activation)
        case Fp8Block128ExpertWeights():
            return prepare_triton(weights).runner(activation)


def make_routing(ids: torch.Tensor, experts: int, live: int | DeviceCount | None = None) -> Routing[LocalIds]:
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(8)).to(ids.device) + 0.1
    return Routing(ids.to(torch.int32), weights, LocalIds, experts, Settled(), False, ids.shape[0] if live is None else live)


def random_ids(rows: int, k: int, experts: int) -> torch.Tensor:
    return torch.rand(rows, experts, generator=torch.Generator().manual_seed(rows)).argsort(1)[:, :k]


def row_norms(rows: torch.Tensor) -> torch.Tensor:
    return rows.square().sum(1).sqrt()


def check(
    payload: Payload, routing: Routing[LocalIds], weights: TritonExpertWeights, fmt: str, activation: Activation = SILU, live: int | None = None
) -> None:
    """Run, compare the live rows with the reference, and demand zeros elsewhere."""
    found = make_runner(weights, activation).run(FlatRowsInput(payload, routing)).hidden_states
    assert found.dtype == DTYPE[fmt]
    assert found.shape == payload.data.shape
    live = found.shape[0] if live is None else live
    expected = reference_experts(payload.dequantize()[:live], routing.topk_ids[:live], routing.topk_weights[:live], weights, activation)
    error, norm = row_norms(found[:live].float() - expected), row_norms(expected)
    assert bool((error <= TOLERANCE[fmt] * norm).all()), f"largest error of a row: {float((error / norm).nan_to_num().max()):.2e}"
    assert not bool(found[live:].any())


def check_that_a_graph_follows_the_live_count(runner: TritonRunner | TritonGeneralRunner, payload: Payload, ids: torch.Tensor, experts: int) -> None:
    """Capture a run, change the live count between replays, and compare each with a run outside the graph."""
    count = torch.tensor([payload.rows], dtype=torch.int32, device=ids.device)
    runner_input = FlatRowsInput(payload, make_routing(ids, experts, DeviceCount(count)))
    runner.run(runner_input)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = runner.run(runner_input).hidden_states
    for live in (payload.rows, 0, 5, payload.rows):
        count.fill_(live)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, runner.run(runner_input).hidden_states)
        assert not bool(replayed[live:].any())
        assert live == 0 or bool(replayed[:live].any(1).all())

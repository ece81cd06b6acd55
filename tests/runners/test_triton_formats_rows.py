"""The Triton runner over quantised weights by how many rows there are: few are not sorted, and weights for many are decoded once."""

from typing import Final

import pytest
import torch

from moe_typed import Bf16Rows, DeviceCount, GateUp, Interleaved, Routing
from moe_typed.formats import (
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    GateUpOrder,
    Int8ChannelExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
)
from moe_typed.ops.product_plans.spec import How
from moe_typed.ops.quantised_product.plan import choose_how
from moe_typed.ops.quantised_product.spec import Rows
from moe_typed.routing import LocalIds
from moe_typed.runners import Activation, GeluAndMul, SiluAndMul, SwigluOai
from moe_typed.runners.triton.general import TritonGeneralRunner
from moe_typed.stages import FlatRowsInput
from tests.ops.support import on_cpu, on_cuda
from tests.runners.triton_formats_support import HIDDEN, ROWS, check, errors, make_runner, make_weights, rand, requantising_reference
from tests.runners.triton_support import make_routing, random_ids, row_norms

SILU: Final = SiluAndMul()
NAN: Final = float("nan")
MANY: Final = 700  # routes of two experts: more than are multiplied by weights that are decoded in tiles
ONE_EXPERT_ALONE: Final = torch.ones(MANY, 1, dtype=torch.int32)

many_rows = pytest.mark.parametrize(
    ("device", "fmt", "rows_fmt"),
    [
        pytest.param("cuda", fmt, rows_fmt, marks=on_cuda)
        for fmt, rows_fmt in (
            ("int8-channel", "bf16"),
            ("fp8-tensor", "bf16"),
            ("fp8-channel", "bf16"),
            ("mxfp8", "bf16"),
            ("mxfp8", "mxfp8"),
            ("mxfp4", "bf16"),
            ("mxfp4", "mxfp8"),
            ("int4-awq-zeros", "bf16"),
            ("int4-compressed", "bf16"),
        )
    ],
)


def wide_runner(fmt: str, device: str, order: type[GateUpOrder] = GateUp, activation: Activation = SILU) -> TritonGeneralRunner:
    runner = make_runner(make_weights(fmt, device, 2, order, biased=True), activation)
    if runner.wide is None:
        pytest.skip("needs compute capability 9.x")
    return runner


def routing_of(ids: torch.Tensor, device: str, live: int | DeviceCount | None = None) -> Routing[LocalIds]:
    return make_routing(ids.to(device), 2, live)


# ---- some rows, which are sorted ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "fmt", "rows_fmt", "tolerance"),
    [
        # One rounding in many falls to the other side, and what is left is that of the result: 1e-3 in bfloat16.
        pytest.param("cpu", "int8-channel", "int8-token", 1e-4, marks=on_cpu),
        pytest.param("cpu", "mxfp8", "mxfp8", 1e-3, marks=on_cpu),
        pytest.param("cuda", "int8-channel", "int8-token", 5e-3, marks=on_cuda),
        pytest.param("cuda", "mxfp8", "mxfp8", 2e-2, marks=on_cuda),
        pytest.param("cuda", "mxfp4", "mxfp8", 2e-2, marks=on_cuda),
        pytest.param("cuda", "fp8-channel", "fp8-token", 3e-2, marks=on_cuda),
        pytest.param("cuda", "fp8-tensor", "fp8-tensor", 3e-2, marks=on_cuda),
    ],
)
def test_rows_between_the_products_are_quantised_as_the_payload_was(device: str, fmt: str, rows_fmt: str, tolerance: float) -> None:
    weights = make_weights(fmt, device, 3, biased=True)
    assert isinstance(weights, (Int8ChannelExpertWeights, MxFp8ExpertWeights, MxFp4ExpertWeights, Fp8ChannelExpertWeights, Fp8TensorExpertWeights))
    payload, routing = ROWS[rows_fmt](rand(9, 40, HIDDEN).to(device)), make_routing(random_ids(40, 2, 3).to(device), 3)
    runner = make_runner(weights, SILU)
    assert choose_how(Rows(torch.empty(1, HIDDEN)), runner.up, 80, wide=False) is How.SORTED
    found = runner.run(FlatRowsInput(payload, routing)).hidden_states
    expected = requantising_reference(payload, routing, weights, SILU, runner.out_dtype)
    assert float(errors(found, expected).max()) <= tolerance


# ---- many rows ------------------------------------------------------------------------------------------------------------------


@many_rows
@pytest.mark.parametrize("order", [GateUp, Interleaved])
def test_many_rows_match_the_reference(device: str, fmt: str, rows_fmt: str, order: type[GateUpOrder]) -> None:
    wide_runner(fmt, device, order)
    payload = ROWS[rows_fmt](rand(9, MANY, HIDDEN).to(device))
    check(payload, routing_of(random_ids(MANY, 1, 2), device), make_weights(fmt, device, 2, order, biased=True), rows_fmt, SILU)


@many_rows
@pytest.mark.parametrize("activation", [SwigluOai(), GeluAndMul()], ids=lambda activation: activation.name)
def test_activations_of_many_rows(device: str, fmt: str, rows_fmt: str, activation: Activation) -> None:
    runner = make_runner(make_weights(fmt, device, 2, biased=True), activation)
    assert runner.wide is None or not isinstance(activation, GeluAndMul)
    check(
        ROWS[rows_fmt](rand(9, MANY, HIDDEN).to(device)),
        routing_of(random_ids(MANY, 1, 2), device),
        make_weights(fmt, device, 2, biased=True),
        rows_fmt,
        activation,
    )


@many_rows
@pytest.mark.parametrize("live", [0, 3, MANY])
def test_live_rows_of_many(device: str, fmt: str, rows_fmt: str, live: int) -> None:
    wide_runner(fmt, device)
    data = rand(9, MANY, HIDDEN).to(device)
    data[live:] = NAN
    routing = routing_of(random_ids(MANY, 1, 2), device, DeviceCount(torch.tensor([live], dtype=torch.int32, device=device)))
    check(ROWS[rows_fmt](data), routing, make_weights(fmt, device, 2, biased=True), rows_fmt, SILU, live=live)


@many_rows
@pytest.mark.parametrize("ids", [ONE_EXPERT_ALONE, -ONE_EXPERT_ALONE], ids=["one expert", "none"])
def test_empty_experts_of_many_rows(device: str, fmt: str, rows_fmt: str, ids: torch.Tensor) -> None:
    wide_runner(fmt, device)
    check(ROWS[rows_fmt](rand(9, MANY, HIDDEN).to(device)), routing_of(ids, device), make_weights(fmt, device, 2, biased=True), rows_fmt, SILU)


@many_rows
def test_single_routes_of_many_rows(device: str, fmt: str, rows_fmt: str) -> None:
    runner = wide_runner(fmt, device)
    payload, routing = ROWS[rows_fmt](rand(9, MANY, HIDDEN).to(device)), routing_of(random_ids(MANY, 1, 2), device)
    routes = runner.run_routes(FlatRowsInput(payload, routing)).hidden_states.float()
    summed = runner.run(FlatRowsInput(payload, routing)).hidden_states.float()
    assert bool((row_norms(routes[:, 0] * routing.topk_weights - summed) <= 5e-3 * row_norms(summed)).all())


@many_rows
def test_a_cuda_graph_of_many_rows(device: str, fmt: str, rows_fmt: str) -> None:
    runner = wide_runner(fmt, device)
    count = torch.tensor([MANY], dtype=torch.int32, device=device)
    runner_input = FlatRowsInput(ROWS[rows_fmt](rand(9, MANY, HIDDEN).to(device)), routing_of(random_ids(MANY, 1, 2), device, DeviceCount(count)))
    runner.run(runner_input)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = runner.run(runner_input).hidden_states
    for live in (MANY, 5, MANY):
        count.fill_(live)
        graph.replay()
        replayed = captured.clone()
        assert torch.equal(replayed, runner.run(runner_input).hidden_states)
        assert not bool(replayed[live:].any())


@many_rows
def test_strided_rows_of_many(device: str, fmt: str, rows_fmt: str) -> None:
    if rows_fmt != "bf16":
        pytest.skip("quantised rows have no gaps")
    runner, routing = wide_runner(fmt, device), routing_of(random_ids(MANY, 1, 2), device)
    data = rand(9, MANY, HIDDEN + 3).to(device, torch.bfloat16)[:, :HIDDEN]
    apart, whole = (runner.run(FlatRowsInput(Bf16Rows(rows), routing)).hidden_states for rows in (data, data.contiguous()))
    assert torch.equal(apart, whole)

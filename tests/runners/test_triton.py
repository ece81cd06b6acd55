from collections.abc import Callable
from typing import cast

import pytest
import torch

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    DeviceCount,
    Fp8Block128ExpertWeights,
    Fp32Rows,
    GateUp,
    Interleaved,
    LocalIds,
    Payload,
    Routing,
    SiluAndMul,
    SwigluOai,
    UpGate,
    debug,
)
from moe_typed.formats import GateUpOrder
from moe_typed.runners import Activation, SwigluClamped
from moe_typed.stages import FlatRowsInput
from tests.ops.support import ints, on_cpu, on_cuda
from tests.runners.triton_support import (
    DTYPE,
    HIDDEN,
    NAN,
    SILU,
    TOLERANCE,
    check,
    check_that_a_graph_follows_the_live_count,
    make_payload,
    make_routing,
    make_runner,
    make_weights,
    one_target_a_device,
    randn,
    random_ids,
    targets,
)

# ---- what is computed -----------------------------------------------------------------------------------------------------------


@targets
@pytest.mark.parametrize("rows", [0, 1, 5, 64, 300])
def test_matches_the_reference(device: str, fmt: str, rows: int) -> None:
    weights = make_weights(fmt, device, 4)
    check(make_payload(fmt, randn(rows, rows, HIDDEN).to(device)), make_routing(random_ids(rows, 2, 4).to(device), 4), weights, fmt)


@targets
@pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved])
@pytest.mark.parametrize("activation", [SiluAndMul(), SwigluOai(), SwigluOai(alpha=1.0, limit=0.5), SwigluClamped(limit=0.5)])
@pytest.mark.parametrize("biased", [False, True])
def test_orders_activations_and_biases(device: str, fmt: str, order: type[GateUpOrder], activation: Activation, biased: bool) -> None:
    weights = make_weights(fmt, device, 3, order, biased=biased)
    check(make_payload(fmt, randn(9, 7, HIDDEN).to(device)), make_routing(random_ids(7, 2, 3).to(device), 3), weights, fmt, activation)


ROUTINGS = {
    "all rows to one expert": (4, torch.full((20, 1), 2)),
    "experts without rows": (7, torch.tensor([[1, 5], [5, 1], [1, 6]])),
    "routes to nowhere": (4, torch.tensor([[-1, 2], [-1, -1], [3, -1], [0, 1]])),
    "no route at all": (4, torch.full((5, 2), -1)),
    "the same expert twice": (4, torch.tensor([[1, 1], [2, 2], [0, 3]])),
    "every expert": (5, random_ids(9, 5, 5)),
    "one expert": (1, torch.zeros(5, 1, dtype=torch.int64)),
    "more experts than routes": (33, random_ids(3, 2, 33)),
    "no columns": (4, torch.zeros(3, 0, dtype=torch.int64)),
}


@one_target_a_device
@pytest.mark.parametrize(("experts", "ids"), ROUTINGS.values(), ids=ROUTINGS.keys())
def test_routings(device: str, fmt: str, experts: int, ids: torch.Tensor) -> None:
    weights = make_weights(fmt, device, experts, biased=True)
    check(make_payload(fmt, randn(4, ids.shape[0], HIDDEN).to(device)), make_routing(ids.to(device), experts), weights, fmt)


@one_target_a_device
def test_ids_beyond_the_experts_are_no_routes(device: str, fmt: str) -> None:
    ids = torch.tensor([[4, 2], [1000, 2**31 - 1], [3, -(2**31)], [0, 1]], device=device)
    with debug("off"):  # they raise in the values mode
        check(make_payload(fmt, randn(4, 4, HIDDEN).to(device)), make_routing(ids, 4), make_weights(fmt, device, 4, biased=True), fmt)


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
@pytest.mark.parametrize(("hidden", "inter"), [(72, 40), (200, 136), (33, 17)])
def test_widths_that_no_tile_divides(device: str, fmt: str, hidden: int, inter: int) -> None:
    weights = make_weights(fmt, device, 3, hidden=hidden, inter=inter, biased=True)
    check(make_payload(fmt, randn(5, 11, hidden).to(device)), make_routing(random_ids(11, 2, 3).to(device), 3), weights, fmt)


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cuda", name, marks=on_cuda) for name in TOLERANCE])
@pytest.mark.parametrize("rows", [1, 33, 1000])
def test_a_layer_of_a_real_size(device: str, fmt: str, rows: int) -> None:
    weights = make_weights(fmt, device, 16, hidden=2048, inter=768)
    check(make_payload(fmt, randn(6, rows, 2048).to(device)), make_routing(random_ids(rows, 4, 16).to(device), 16), weights, fmt)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_weights_with_more_than_2_to_31_entries(device: str) -> None:
    experts, hidden, inter = 9, 16384, 8192
    w13 = torch.empty(experts, 2 * inter, hidden, dtype=torch.bfloat16, device=device).normal_(std=hidden**-0.5)
    w2 = torch.empty(experts, hidden, inter, dtype=torch.bfloat16, device=device).normal_(std=inter**-0.5)
    assert w13.numel() > 2**31
    payload = make_payload("bf16", randn(1, 2, hidden).to(device))
    check(payload, make_routing(torch.tensor([[8], [0]], device=device), experts), Bf16ExpertWeights(w13, w2, GateUp), "bf16")


# ---- what must not leak ---------------------------------------------------------------------------------------------------------


@one_target_a_device
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("live", [0, 3, 8])
def test_rows_beyond_the_live_count_are_never_read(device: str, fmt: str, live: int, on_device: bool) -> None:
    weights = make_weights(fmt, device, 4, biased=True)
    data = randn(2, 8, HIDDEN).to(device)
    data[live:] = NAN
    count = DeviceCount(torch.tensor([live], dtype=torch.int32, device=device)) if on_device else live
    routing = make_routing(random_ids(8, 2, 4).to(device), 4, count)
    routing.topk_weights[live:] = NAN
    check(make_payload(fmt, data), routing, weights, fmt, live=live)


@one_target_a_device
def test_nan_in_one_row_stays_in_that_row(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 2)
    data = randn(2, 40, HIDDEN).to(device)
    routing = make_routing(random_ids(40, 1, 2).to(device), 2)
    clean = make_runner(weights, SILU).run(FlatRowsInput(make_payload(fmt, data), routing)).hidden_states
    data[7, 50] = NAN
    found = make_runner(weights, SILU).run(FlatRowsInput(make_payload(fmt, data), routing)).hidden_states
    assert bool(torch.isnan(found[7]).all())
    others = [row for row in range(40) if row != 7]
    assert torch.equal(found[others], clean[others])


@one_target_a_device
def test_nan_in_an_expert_stays_with_its_rows(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 3)
    (weights.w13_scale if isinstance(weights, Fp8Block128ExpertWeights) else weights.w13)[1] = NAN
    routing = make_routing(torch.tensor([[0], [1], [2]], device=device), 3)
    found = make_runner(weights, SILU).run(FlatRowsInput(make_payload(fmt, randn(2, 3, HIDDEN).to(device)), routing)).hidden_states
    assert ints(torch.isnan(found).any(1)) == [0, 1, 0]


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
def test_strided_rows(device: str, fmt: str) -> None:
    weights = make_weights(fmt, device, 3)
    routing = make_routing(random_ids(6, 2, 3).to(device), 3)
    wide = randn(3, 6, 300).to(device, DTYPE[fmt])
    transposed = randn(3, HIDDEN, 12).to(device, DTYPE[fmt]).T[::2]
    for data in (wide[:, :HIDDEN], transposed):
        check(Fp32Rows(data) if fmt == "fp32" else Bf16Rows(data), routing, weights, fmt)


@one_target_a_device
def test_two_runs_agree_to_the_bit(device: str, fmt: str) -> None:
    runner = make_runner(make_weights(fmt, device, 4), SILU)
    runner_input = FlatRowsInput(make_payload(fmt, randn(2, 64, HIDDEN).to(device)), make_routing(random_ids(64, 3, 4).to(device), 4))
    assert torch.equal(runner.run(runner_input).hidden_states, runner.run(runner_input).hidden_states)


# ---- compiled and captured ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "fmt", "backend"),
    [
        pytest.param("cpu", "fp32", "aot_eager", marks=on_cpu),
        pytest.param("cuda", "bf16", "inductor", marks=on_cuda),
        pytest.param("cuda", "fp8-block128", "inductor", marks=on_cuda),
    ],
)
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, while it compiles
def test_compiles_as_one_graph(device: str, fmt: str, backend: str) -> None:
    runner = make_runner(make_weights(fmt, device, 4), SILU)
    payload, routing = make_payload(fmt, randn(2, 8, HIDDEN).to(device)), make_routing(random_ids(8, 2, 4).to(device), 4)

    def layer(payload: Payload, routing: Routing[LocalIds]) -> torch.Tensor:
        return runner.run(FlatRowsInput(payload, routing)).hidden_states

    compiled = cast("Callable[[Payload, Routing[LocalIds]], torch.Tensor]", torch.compile(layer, fullgraph=True, backend=backend))  # pyright: ignore[reportUnknownMemberType]
    assert torch.equal(compiled(payload, routing), layer(payload, routing))


@pytest.mark.parametrize(("device", "fmt"), [pytest.param("cuda", "bf16", marks=on_cuda), pytest.param("cuda", "fp8-block128", marks=on_cuda)])
def test_a_cuda_graph_follows_the_live_count(device: str, fmt: str) -> None:
    payload = make_payload(fmt, randn(2, 16, HIDDEN).to(device))
    check_that_a_graph_follows_the_live_count(make_runner(make_weights(fmt, device, 4), SILU), payload, random_ids(16, 2, 4).to(device), 4)

"""The Triton runner over quantised weights and over experts without a gate, held to the reference."""

from collections.abc import Callable
from typing import cast

import pytest
import torch

from moe_typed import DeviceCount, GateUp, Interleaved, Payload, Routing, SwigluOai, UpGate, debug
from moe_typed.formats import Bf16Rows, Fp32Rows, GateUpOrder, Int8ChannelExpertWeights
from moe_typed.routing import LocalIds, weigh_input
from moe_typed.runners import (
    Activation,
    GeluAndMul,
    GeluTanhAndMul,
    OpaqueActivation,
    SiluAndMul,
    SwigluClamped,
    SwigluStep,
    ThenNorm,
    reference_experts,
)
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.stages import FlatRowsInput
from tests.ops.support import ints, on_cpu, on_cuda
from tests.runners import triton_support as tuned
from tests.runners.test_triton import ROUTINGS
from tests.runners.triton_formats_support import (
    HIDDEN,
    INTER,
    ROWS,
    TOLERANCE,
    check,
    default_activation,
    errors,
    every_format,
    every_pair,
    make_runner,
    make_weights,
    rand,
    requantising_reference,
    some_formats,
)
from tests.runners.triton_support import check_that_a_graph_follows_the_live_count, make_routing, random_ids, row_norms

NAN = float("nan")
SILU = SiluAndMul()
GATED = [SILU, SwigluOai(), SwigluOai(alpha=1.0, limit=0.5), SwigluStep(0.5), SwigluClamped(0.5), GeluAndMul(), GeluTanhAndMul()]
one_format = pytest.mark.parametrize(
    ("device", "fmt", "rows_fmt"),
    [
        pytest.param("cpu", "int8-channel", "fp32", marks=on_cpu),
        pytest.param("cuda", "int8-channel", "bf16", marks=on_cuda),
        pytest.param("cuda", "mxfp4", "mxfp8", marks=on_cuda),
    ],
)

# ---- what is computed -----------------------------------------------------------------------------------------------------------


@every_pair
@pytest.mark.parametrize("rows", [0, 1, 37])
def test_matches_the_reference(device: str, fmt: str, rows_fmt: str, rows: int) -> None:
    weights = make_weights(fmt, device, 4)
    payload = ROWS[rows_fmt](rand(rows, rows, HIDDEN).to(device))
    check(payload, make_routing(random_ids(rows, 2, 4).to(device), 4), weights, rows_fmt, default_activation(fmt))


@every_format
@pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved])
def test_orders_and_biases(device: str, fmt: str, rows_fmt: str, order: type[GateUpOrder]) -> None:
    weights = make_weights(fmt, device, 3, order, biased=True)
    payload = ROWS[rows_fmt](rand(9, 7, HIDDEN).to(device))
    check(payload, make_routing(random_ids(7, 2, 3).to(device), 3), weights, rows_fmt, default_activation(fmt))


@one_format
@pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved])
@pytest.mark.parametrize("activation", GATED, ids=lambda activation: activation.name)
def test_activations(device: str, fmt: str, rows_fmt: str, order: type[GateUpOrder], activation: Activation) -> None:
    weights = make_weights(fmt, device, 3, order, biased=True)
    payload = ROWS[rows_fmt](rand(9, 7, HIDDEN).to(device))
    check(payload, make_routing(random_ids(7, 2, 3).to(device), 3), weights, rows_fmt, activation)


def of_tanh(joined: torch.Tensor) -> torch.Tensor:
    """Stand for a function of rows that no kernel knows: it takes columns apart otherwise than any order."""
    first, last = joined[..., ::2], joined[..., 1::2].flip(-1)
    return torch.tanh(first) * last


def to_unit_length(results: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(results, dim=-1)


@one_format
@pytest.mark.parametrize("order", [GateUp, Interleaved])
@pytest.mark.parametrize("rows", [0, 7])
@pytest.mark.parametrize("normed", [False, True], ids=["", "normed"])
def test_functions_that_no_kernel_knows_are_called(device: str, fmt: str, rows_fmt: str, order: type[GateUpOrder], rows: int, normed: bool) -> None:
    weights = make_weights(fmt, device, 3, order, biased=True)
    activation: Activation = OpaqueActivation(of_tanh, order, torch.float32, "of tanh")
    payload = ROWS[rows_fmt](rand(9, rows, HIDDEN).to(device))
    ids = random_ids(rows, 2, 3).to(device)
    ids[:1, 1:] = -1  # the function also sees what stands where nothing was multiplied; it must not reach a result
    check(payload, make_routing(ids, 3), weights, rows_fmt, ThenNorm(activation, to_unit_length, torch.float32) if normed else activation)


@one_format
def test_a_norm_behind_an_activation_that_a_kernel_knows(device: str, fmt: str, rows_fmt: str) -> None:
    weights = make_weights(fmt, device, 3, biased=True)
    payload, routing = ROWS[rows_fmt](rand(9, 7, HIDDEN).to(device)), make_routing(random_ids(7, 2, 3).to(device), 3)
    check(payload, routing, weights, rows_fmt, ThenNorm(SILU, to_unit_length, torch.float32))


@pytest.mark.parametrize(
    ("device", "fmt"),
    [
        pytest.param("cpu", "fp32", marks=on_cpu),
        pytest.param("cuda", "bf16", marks=on_cuda),
        pytest.param("cuda", "fp8-block128", marks=on_cuda),
    ],
)
@pytest.mark.parametrize("activation", [SwigluStep(0.5), SwigluClamped(0.5), GeluAndMul(), GeluTanhAndMul()], ids=lambda activation: activation.name)
def test_weights_with_tuned_kernels_do_these_activations_too(device: str, fmt: str, activation: Activation) -> None:
    weights = tuned.make_weights(fmt, device, 3, biased=True)
    payload, routing = tuned.make_payload(fmt, rand(5, 9, tuned.HIDDEN).to(device)), make_routing(random_ids(9, 2, 3).to(device), 3)
    tuned.check(payload, routing, weights, fmt, activation)


@one_format
@pytest.mark.parametrize(("experts", "ids"), ROUTINGS.values(), ids=ROUTINGS.keys())
def test_routings(device: str, fmt: str, rows_fmt: str, experts: int, ids: torch.Tensor) -> None:
    weights = make_weights(fmt, device, experts, biased=True)
    check(ROWS[rows_fmt](rand(4, ids.shape[0], HIDDEN).to(device)), make_routing(ids.to(device), experts), weights, rows_fmt, SILU)


@one_format
def test_ids_beyond_the_experts_are_no_routes(device: str, fmt: str, rows_fmt: str) -> None:
    ids = torch.tensor([[4, 2], [1000, 2**31 - 1], [3, -(2**31)], [0, 1]], device=device)
    with debug("off"):  # they raise in the values mode
        check(ROWS[rows_fmt](rand(4, 4, HIDDEN).to(device)), make_routing(ids, 4), make_weights(fmt, device, 4), rows_fmt, SILU)


@pytest.mark.parametrize(("fmt", "group"), [("int4-awq-zeros", 128), ("int4-gptq", 64), ("int4-compressed", 32), ("int4-gptq-zeros", 96)])
@pytest.mark.parametrize(("device", "rows_fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
def test_groups_of_int4(device: str, fmt: str, group: int, rows_fmt: str) -> None:
    hidden, inter = 2 * group, group
    weights = make_weights(fmt, device, 2, hidden=hidden, inter=inter, group=group)
    check(ROWS[rows_fmt](rand(5, 6, hidden).to(device)), make_routing(random_ids(6, 1, 2).to(device), 2), weights, rows_fmt, SILU)


@pytest.mark.parametrize(("device", "rows_fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
@pytest.mark.parametrize(("fmt", "hidden", "inter"), [("int8-channel", 72, 40), ("int8-channel", 33, 17), ("mxfp4", 96, 160)])
def test_widths_that_no_tile_divides(device: str, rows_fmt: str, fmt: str, hidden: int, inter: int) -> None:
    weights = make_weights(fmt, device, 3, hidden=hidden, inter=inter, biased=True)
    check(ROWS[rows_fmt](rand(5, 11, hidden).to(device)), make_routing(random_ids(11, 2, 3).to(device), 3), weights, rows_fmt, SILU)


@pytest.mark.parametrize(("device", "rows_fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
def test_strided_rows(device: str, rows_fmt: str) -> None:
    weights, routing = make_weights("int8-channel", device, 3), make_routing(random_ids(6, 2, 3).to(device), 3)
    dtype = torch.float32 if rows_fmt == "fp32" else torch.bfloat16
    for data in (rand(3, 6, 300).to(device, dtype)[:, :HIDDEN], rand(3, HIDDEN, 12).to(device, dtype).T[::2]):
        check(Fp32Rows(data) if rows_fmt == "fp32" else Bf16Rows(data), routing, weights, rows_fmt, SILU)


@every_format
@pytest.mark.parametrize("rows", [33, 1000])
def test_a_layer_of_a_real_size(device: str, fmt: str, rows_fmt: str, rows: int) -> None:
    if device == "cpu":
        pytest.skip("the interpreter takes its time")
    weights = make_weights(fmt, device, 16, hidden=2048, inter=768, group=128)
    payload, routing = ROWS[rows_fmt](rand(6, rows, 2048).to(device)), make_routing(random_ids(rows, 4, 16).to(device), 16)
    if not isinstance(weights, Int8ChannelExpertWeights):
        check(payload, routing, weights, rows_fmt, default_activation(fmt))
        return
    # One step of int8 for the widest of 768 columns is more than the tolerance allows, so that the reference takes the same steps.
    found = make_runner(weights, SILU).run(FlatRowsInput(payload, routing)).hidden_states
    assert float(errors(found, requantising_reference(payload, routing, weights, SILU, torch.bfloat16)).max()) <= 5e-3


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_weights_with_more_than_2_to_31_entries(device: str) -> None:
    experts, hidden, inter = 9, 16384, 8192
    w13 = torch.randint(-127, 128, (experts, 2 * inter, hidden), dtype=torch.int8, device=device)
    w2 = torch.randint(-127, 128, (experts, hidden, inter), dtype=torch.int8, device=device)
    assert w13.numel() > 2**31
    s13 = torch.full((experts, 2 * inter), hidden**-0.5 / 64, device=device)
    weights = Int8ChannelExpertWeights(w13, w2, s13, torch.full((experts, hidden), inter**-0.5 / 64, device=device), GateUp)
    payload, routing = ROWS["int8-token"](rand(1, 2, hidden).to(device)), make_routing(torch.tensor([[8], [0]], device=device), experts)
    check(payload, routing, weights, "bf16", SILU)  # rows between the products: so few are not quantised


# ---- what must not leak ---------------------------------------------------------------------------------------------------------


@some_formats
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("live", [0, 3, 8])
def test_rows_beyond_the_live_count_do_not_matter(device: str, fmt: str, rows_fmt: str, live: int, on_device: bool) -> None:
    weights = make_weights(fmt, device, 4, biased=True)
    data = rand(2, 8, HIDDEN).to(device)
    data[live:] = NAN
    count = DeviceCount(torch.tensor([live], dtype=torch.int32, device=device)) if on_device else live
    routing = make_routing(random_ids(8, 2, 4).to(device), 4, count)
    routing.topk_weights[live:] = NAN
    check(ROWS[rows_fmt](data), routing, weights, rows_fmt, SILU, live=live)


@some_formats
def test_nan_in_one_row_stays_in_that_row(device: str, fmt: str, rows_fmt: str) -> None:
    if rows_fmt == "int8-token":
        pytest.skip("int8 has no NaN, and the scale that is one is refused where values are checked")
    weights, routing = make_weights(fmt, device, 2), make_routing(random_ids(40, 1, 2).to(device), 2)
    data = rand(2, 40, HIDDEN).to(device)
    runner = make_runner(weights, SILU)
    with debug("off"):
        clean = runner.run(FlatRowsInput(ROWS[rows_fmt](data), routing)).hidden_states
        data[7, 50] = NAN
        found = runner.run(FlatRowsInput(ROWS[rows_fmt](data), routing)).hidden_states
    assert bool(torch.isnan(found[7]).all())
    others = [row for row in range(40) if row != 7]
    assert torch.equal(found[others], clean[others])


@some_formats
def test_nan_in_an_expert_stays_with_its_rows(device: str, fmt: str, rows_fmt: str) -> None:
    weights = make_weights(fmt, device, 3, biased=True)
    assert weights.b13 is not None
    weights.b13[1] = NAN
    routing = make_routing(torch.tensor([[0], [1], [2]], device=device), 3)
    found = make_runner(weights, SILU).run(FlatRowsInput(ROWS[rows_fmt](rand(2, 3, HIDDEN).to(device)), routing)).hidden_states
    assert ints(torch.isnan(found).any(1)) in ([0, 1, 0], [0, 0, 0] if rows_fmt == "int8-token" else [0, 1, 0])


@some_formats
def test_two_runs_agree_to_the_bit(device: str, fmt: str, rows_fmt: str) -> None:
    runner = make_runner(make_weights(fmt, device, 4), SILU)
    runner_input = FlatRowsInput(ROWS[rows_fmt](rand(2, 64, HIDDEN).to(device)), make_routing(random_ids(64, 3, 4).to(device), 4))
    assert torch.equal(runner.run(runner_input).hidden_states, runner.run(runner_input).hidden_states)


# ---- router weights, and routes by themselves -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "rows_fmt"), [pytest.param("cpu", "fp32", marks=on_cpu), pytest.param("cuda", "bf16", marks=on_cuda)])
def test_the_router_weight_on_the_input(device: str, rows_fmt: str) -> None:
    weights = make_weights("int8-channel", device, 4)
    data, routing = rand(2, 9, HIDDEN).to(device), make_routing(torch.tensor([[2], [-1], [0]] * 3, device=device), 4)
    weighed, spent = weigh_input(Fp32Rows(data), routing) if rows_fmt == "fp32" else weigh_input(Bf16Rows(data.bfloat16()), routing)
    found = make_runner(weights, SILU).run(FlatRowsInput(weighed, spent)).hidden_states
    once = torch.ones_like(routing.topk_weights)
    expected = reference_experts(data * routing.topk_weights, routing.topk_ids, once, weights, SILU)
    assert bool((row_norms(found.float() - expected) <= TOLERANCE[rows_fmt] * row_norms(expected)).all())


@some_formats
def test_results_of_single_routes(device: str, fmt: str, rows_fmt: str) -> None:
    weights, ids = make_weights(fmt, device, 4, biased=True), torch.tensor([[0, 3], [-1, 1], [2, -1]], device=device)
    payload, routing = ROWS[rows_fmt](rand(2, 3, HIDDEN).to(device)), make_routing(ids, 4)
    found = make_runner(weights, SILU).run_routes(FlatRowsInput(payload, routing)).hidden_states
    assert found.shape == (3, 2, HIDDEN)
    for column in range(2):
        mine = routing.topk_ids[:, column : column + 1]
        expected = reference_experts(payload.dequantize(), mine, torch.ones_like(mine, dtype=torch.float32), weights, SILU)
        kept = mine[:, 0] >= 0
        error = row_norms(found[kept, column].float() - expected[kept])
        assert bool((error <= TOLERANCE[rows_fmt] * row_norms(expected[kept])).all())


@tuned.one_target_a_device
@pytest.mark.parametrize("rows", [0, 2, 70])
def test_results_of_single_routes_by_tuned_kernels(device: str, fmt: str, rows: int) -> None:
    weights, ids = tuned.make_weights(fmt, device, 4, biased=True), random_ids(rows, 2, 4).to(device)
    payload, routing = tuned.make_payload(fmt, rand(2, rows, tuned.HIDDEN).to(device)), make_routing(ids, 4)
    runner = tuned.make_runner(weights, SILU)
    assert isinstance(runner, TritonRunner)
    found = runner.run_routes(FlatRowsInput(payload, routing)).hidden_states.float()
    summed = (found * routing.topk_weights.unsqueeze(2)).sum(1)
    expected = reference_experts(payload.dequantize(), routing.topk_ids, routing.topk_weights, weights, SILU)
    assert bool((row_norms(summed - expected) <= tuned.TOLERANCE[fmt] * row_norms(expected)).all())


# ---- compiled and captured ------------------------------------------------------------------------------------------------------


@one_format
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")  # torch's own, while it compiles
def test_compiles_as_one_graph(device: str, fmt: str, rows_fmt: str) -> None:
    runner = make_runner(make_weights(fmt, device, 4), SILU)
    payload, routing = ROWS[rows_fmt](rand(2, 8, HIDDEN).to(device)), make_routing(random_ids(8, 2, 4).to(device), 4)

    def layer(payload: Payload, routing: Routing[LocalIds]) -> torch.Tensor:
        return runner.run(FlatRowsInput(payload, routing)).hidden_states

    backend = "inductor" if device == "cuda" else "aot_eager"
    compiled = cast("Callable[[Payload, Routing[LocalIds]], torch.Tensor]", torch.compile(layer, fullgraph=True, backend=backend))  # pyright: ignore[reportUnknownMemberType]
    assert torch.equal(compiled(payload, routing), layer(payload, routing))


@every_format
def test_a_cuda_graph_follows_the_live_count(device: str, fmt: str, rows_fmt: str) -> None:
    if device == "cpu":
        pytest.skip("there are no CUDA graphs on a CPU")
    runner = make_runner(make_weights(fmt, device, 4), default_activation(fmt))
    payload = ROWS[rows_fmt](rand(2, 16, HIDDEN).to(device))
    check_that_a_graph_follows_the_live_count(runner, payload, random_ids(16, 2, 4).to(device), 4)


def test_the_width_of_the_tests_holds_whole_groups() -> None:
    assert (HIDDEN % 32, INTER % 32) == (0, 0)

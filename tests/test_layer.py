"""The whole layer over the standard dispatcher: batches of every kind, wires, scaling, and ``torch.compile``."""

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    BoundaryError,
    DebugLevel,
    DeviceCount,
    Experts,
    Fp8Block128ExpertWeights,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    GroupedTopK,
    Interleaved,
    LogicalIds,
    MoELayer,
    MxFp8ExpertWeights,
    Payload,
    Pending,
    Routing,
    Settled,
    SiluAndMul,
    SoftmaxTopK,
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
    SwigluOai,
    UpGate,
    bf16_as_is,
    debug,
    fp16_as_is,
    fp32_as_is,
    from_topk,
    prepare_reference,
    quantize_fp8_block128,
    quantize_mxfp8,
    upscale_bf16,
    upscale_fp32,
)
from moe_typed.formats import GateUpOrder
from moe_typed.routing import RoutedScaling
from moe_typed.runners import GatedActivation

EXPERTS, HIDDEN, INTER = 4, 8, 6

Fp32Layer = MoELayer[Fp32Rows, Fp32Rows, StandardCombineInput]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(order: type[GateUpOrder] = GateUp, experts: int = EXPERTS) -> Fp32ExpertWeights[GateUpOrder]:
    w13 = order.join(random(experts, INTER, HIDDEN, seed=1), random(experts, INTER, HIDDEN, seed=2), 1)
    b13 = order.join(random(experts, INTER, seed=4), random(experts, INTER, seed=5), 1)
    return Fp32ExpertWeights(w13, random(experts, HIDDEN, INTER, seed=3), order, b13, random(experts, HIDDEN, seed=6))


def layer(w: Fp32ExpertWeights[GateUpOrder] | None = None, activation: GatedActivation | None = None) -> Fp32Layer:
    prepared = prepare_reference(weights() if w is None else w)
    return StandardDispatcher(fp32_as_is).then(Experts(prepared, activation or SiluAndMul()))


def one_expert(w: Fp32ExpertWeights[GateUpOrder], row: Tensor, expert: int, activation: GatedActivation) -> Tensor:
    """Return one expert's result for one row, in float64 and in the obvious way."""
    gate, up = w.order.split(w.w13[expert], 0)
    assert w.b13 is not None
    assert w.b2 is not None
    gate_bias, up_bias = w.order.split(w.b13[expert], 0)
    inner = activation.apply(gate.double() @ row.double() + gate_bias, up.double() @ row.double() + up_bias)
    return w.w2[expert].double() @ inner + w.b2[expert]


def loop(w: Fp32ExpertWeights[GateUpOrder], rows: Tensor, routing: Routing[LogicalIds], activation: GatedActivation | None = None) -> Tensor:
    live = routing.live if isinstance(routing.live, int) else int(routing.live.count)
    total = torch.zeros(rows.shape, dtype=torch.float64)
    for row in range(live):
        for expert, weight in zip(routing.topk_ids[row], routing.topk_weights[row], strict=True):
            if int(expert) >= 0:
                total[row] += float(weight) * one_expert(w, rows[row], int(expert), activation or SiluAndMul())
    return total


def given_routing(ids: list[list[int]], experts: int = EXPERTS, live: int | DeviceCount | None = None) -> Routing[LogicalIds, Settled]:
    topk_ids = torch.tensor(ids, dtype=torch.int32)
    topk_weights = torch.rand(topk_ids.shape, generator=torch.Generator().manual_seed(9))
    return Routing(topk_ids, topk_weights, LogicalIds, experts, Settled(), False, len(ids) if live is None else live)


def same(got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.fixture(params=[DebugLevel.OFF, DebugLevel.STRICT], ids=lambda level: str(level.name))
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    with debug(DebugLevel(request.param)):
        yield


# ---- batches -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("activation", [SiluAndMul(), SwigluOai()], ids=["silu", "oai"])
@pytest.mark.parametrize(
    "ids",
    [
        pytest.param([[0, 1], [2, 3], [3, 0], [1, 2]], id="plain"),
        pytest.param([[2, 0]], id="one row"),
        pytest.param([[1, 1], [1, 1], [1, 1]], id="all rows to one expert, its id twice"),
        pytest.param([[0, -1], [-1, -1], [-1, 3]], id="-1"),
        pytest.param([[-1, -1]], id="nothing but -1"),
        pytest.param([[3, 2, 1, 0], [0, 1, 2, 3]], id="every expert"),
        pytest.param([list[int](), list[int]()], id="no route"),
    ],
)
def test_against_the_loop(ids: list[list[int]], activation: GatedActivation) -> None:
    w, rows, routing = weights(), random(len(ids), HIDDEN), given_routing(ids)
    same(layer(w, activation)(Fp32Rows(rows), routing), loop(w, rows, routing, activation))


@pytest.mark.usefixtures("level")
def test_no_rows() -> None:
    empty = from_topk(torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2), EXPERTS)
    got = layer()(Fp32Rows(torch.empty(0, HIDDEN)), empty)
    assert (got.dtype, got.shape) == (torch.float32, (0, HIDDEN))


@pytest.mark.usefixtures("level")
def test_one_expert_alone() -> None:
    w, rows, routing = weights(experts=1), random(3, HIDDEN), given_routing([[0], [0], [-1]], experts=1)
    same(layer(w)(Fp32Rows(rows), routing), loop(w, rows, routing))


@pytest.mark.usefixtures("level")
def test_halves_of_a_batch_make_the_whole() -> None:
    rows, routing, run = random(4, HIDDEN), given_routing([[0, 1], [2, 3], [3, 0], [1, 2]]), layer()
    whole = run(Fp32Rows(rows), routing)
    for cut in range(5):
        halves = [
            run(Fp32Rows(rows[part]), from_topk(routing.topk_ids[part], routing.topk_weights[part], EXPERTS))
            for part in (slice(cut), slice(cut, None))
        ]
        torch.testing.assert_close(torch.cat(halves), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("live", [0, 2, 4])
@pytest.mark.parametrize("on", ["host", "device"])
def test_a_padded_tail_gives_zeros_whatever_is_in_it(live: int, on: str) -> None:
    w, rows, routing = weights(), random(4, HIDDEN), given_routing([[0, 1], [2, 3], [3, 0], [1, 2]])
    topk_ids, topk_weights = routing.topk_ids.clone(), routing.topk_weights.clone()
    expected = loop(w, rows, routing)
    expected[live:] = 0
    rows[live:], topk_weights[live:], topk_ids[live:] = math.nan, math.nan, 99
    counted = live if on == "host" else DeviceCount(torch.tensor([live], dtype=torch.int32))
    padded = Routing(topk_ids, topk_weights, LogicalIds, EXPERTS, Settled(), False, counted)
    got = layer(w)(Fp32Rows(rows), padded)
    same(got, expected)
    assert not got[live:].any()


@pytest.mark.usefixtures("level")
def test_a_nan_in_a_row_without_a_route_reaches_no_other() -> None:
    rows, routing = random(3, HIDDEN), given_routing([[0, 1], [-1, -1], [2, 3]])
    clean = layer()(Fp32Rows(rows), routing)
    rows[1] = math.nan
    assert torch.equal(layer()(Fp32Rows(rows), routing), clean)


@pytest.mark.usefixtures("level")
def test_the_rows_of_the_model_are_not_touched() -> None:
    rows, routing = random(2, HIDDEN), given_routing([[0, 1], [2, 3]])
    before = rows.clone(), routing.topk_ids.clone(), routing.topk_weights.clone()
    layer()(Fp32Rows(rows), routing)
    assert all(torch.equal(now, then) for now, then in zip((rows, routing.topk_ids, routing.topk_weights), before, strict=True))


# ---- formats -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("level")
def test_the_orders_of_gate_and_up_give_one_result() -> None:
    rows, routing = Fp32Rows(random(3, HIDDEN)), given_routing([[0, 1], [2, 3], [1, 1]])
    first, *others = (layer(weights(order))(rows, routing) for order in (GateUp, UpGate, Interleaved))
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("level")
def test_the_model_dtypes() -> None:
    w, rows, routing = weights(), random(3, HIDDEN), given_routing([[0, 1], [2, 3], [1, 0]])
    assert w.b13 is not None
    assert w.b2 is not None
    bf16 = Bf16ExpertWeights(w.w13.bfloat16(), w.w2.bfloat16(), GateUp, w.b13.bfloat16(), w.b2.bfloat16())
    fp16 = Fp16ExpertWeights(w.w13.half(), w.w2.half(), GateUp, w.b13.half(), w.b2.half())
    expected = loop(w, rows, routing)
    for got, dtype in (
        (StandardDispatcher(bf16_as_is).then(Experts(prepare_reference(bf16)))(Bf16Rows(rows.bfloat16()), routing), torch.bfloat16),
        (StandardDispatcher(fp16_as_is).then(Experts(prepare_reference(fp16)))(Fp16Rows(rows.half()), routing), torch.float16),
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, rtol=3e-2, atol=1e-1)


WIDE = 128


def block_weights() -> Fp8Block128ExpertWeights[GateUpOrder]:
    w13, w2 = random(2, 2 * WIDE, WIDE, seed=1).to(torch.float8_e4m3fn), random(2, WIDE, WIDE, seed=2).to(torch.float8_e4m3fn)
    return Fp8Block128ExpertWeights(w13, w2, random(2, 2, 1, seed=3).abs() / 16, random(2, 1, 1, seed=4).abs() / 16, GateUp)


def mx_weights() -> MxFp8ExpertWeights[GateUpOrder]:
    w = block_weights()
    w13_scale = torch.full((2, 2 * WIDE, WIDE // 32), 123, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    w2_scale = torch.full((2, WIDE, WIDE // 32), 122, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return MxFp8ExpertWeights(w.w13, w.w2, w13_scale, w2_scale, GateUp)


def wires() -> dict[str, tuple[Callable[[Bf16Rows, Routing[LogicalIds]], Tensor], Callable[[Bf16Rows], Payload]]]:
    """Return layers by their wire, and the rows that the experts of each come to see."""
    block, mx = Experts(prepare_reference(block_weights())), Experts(prepare_reference(mx_weights()))
    return {
        "bf16 to fp8 experts": (StandardDispatcher(bf16_as_is).then(block), lambda rows: rows),
        "fp8 to fp8 experts": (StandardDispatcher(quantize_fp8_block128).then(block), quantize_fp8_block128.run),
        "bf16, quantised at the experts": (StandardDispatcher(bf16_as_is).then(block.accepting(quantize_fp8_block128)), quantize_fp8_block128.run),
        "mxfp8, upscaled for fp8 experts": (
            StandardDispatcher(quantize_mxfp8).then(block.accepting(upscale_bf16)),
            lambda rows: upscale_bf16.run(quantize_mxfp8.run(rows)),
        ),
        "mxfp8 to mxfp8 experts": (StandardDispatcher(quantize_mxfp8).then(mx), quantize_mxfp8.run),
        "fp8, upscaled for mxfp8 experts": (
            StandardDispatcher(quantize_fp8_block128).then(mx.accepting(upscale_fp32)),
            lambda rows: upscale_fp32.run(quantize_fp8_block128.run(rows)),
        ),
    }


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("wire", list(wires()))
def test_a_wire_changes_the_rows_by_its_conversions_and_nothing_else(wire: str) -> None:
    run, seen = wires()[wire]
    rows = Bf16Rows(random(5, WIDE).bfloat16())
    routing = given_routing([[0, 1], [1, 0], [1, 1], [-1, 0], [0, 0]], experts=2)
    w = mx_weights() if "mxfp8 experts" in wire else block_weights()
    exact = seen(rows).dequantize()
    flat = Fp32ExpertWeights(
        torch.stack([w.dequantize_w13(expert) for expert in range(2)]), torch.stack([w.dequantize_w2(expert) for expert in range(2)]), GateUp
    )
    expected = StandardDispatcher(fp32_as_is).then(Experts(prepare_reference(flat)))(Fp32Rows(exact), routing)
    got = run(rows, routing)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, expected.bfloat16())


def loosely(function: Callable[..., object], *arguments: object) -> object:
    """Call a function past the checkers."""
    return function(*arguments)


def test_a_wire_that_the_experts_do_not_accept_is_refused_when_the_layer_is_made() -> None:
    dispatcher = StandardDispatcher(quantize_mxfp8)
    with pytest.raises(BoundaryError) as caught:
        loosely(dispatcher.then, Experts(prepare_reference(block_weights())))
    assert "payload is MxFp8Rows (mxfp8), but ReferenceFp8Block128Weights takes Bf16Rows | Fp16Rows | Fp32Rows | Fp8Block128Rows" in str(caught.value)
    assert caught.value.hint == "put a named conversion before the experts: experts.accepting(conversion)"


def test_a_conversion_to_what_the_experts_do_not_accept_is_refused_when_it_is_joined() -> None:
    experts = Experts(prepare_reference(block_weights()))
    with pytest.raises(BoundaryError, match=r"payload is MxFp8Rows \(mxfp8\), but ReferenceFp8Block128Weights takes"):
        loosely(experts.accepting, quantize_mxfp8)


def test_converted_experts_name_what_their_conversion_takes() -> None:
    converted = Experts(prepare_reference(block_weights())).accepting(upscale_bf16)
    with pytest.raises(BoundaryError, match=r"payload is Bf16Rows \(bf16\), but the conversion 'upscale_bf16' takes .*Fp8Block128Rows .*MxFp8Rows"):
        loosely(StandardDispatcher(bf16_as_is).then, converted)


def test_experts_refuse_weights_that_are_not_prepared() -> None:
    with pytest.raises(TypeError, match="weights that are prepared for a runner, as prepare_reference does; got Fp8Block128ExpertWeights"):
        loosely(Experts, block_weights())


def test_experts_refuse_a_payload_outside_their_accept_set_on_every_call() -> None:
    rows = quantize_mxfp8.run(Bf16Rows(random(1, WIDE).bfloat16()))
    dispatched = StandardDispatcher(quantize_mxfp8).dispatch(Bf16Rows(random(1, WIDE).bfloat16()), given_routing([[0]], experts=2))
    assert isinstance(dispatched.payload, type(rows))
    with pytest.raises(BoundaryError, match="payload is MxFp8Rows"):
        loosely(Experts(prepare_reference(block_weights())), dispatched)


def test_experts_as_a_function_are_the_layers_middle() -> None:
    rows, routing, w = Fp32Rows(random(2, HIDDEN)), given_routing([[0, 1], [2, 3]]), weights()
    dispatcher, experts = StandardDispatcher(fp32_as_is), Experts(prepare_reference(w))
    dispatched = dispatcher.dispatch(rows, routing)
    assert type(dispatched) is StandardDispatchOutput
    assert torch.equal(dispatcher.combine(experts(dispatched)), dispatcher.then(experts)(rows, routing))


# ---- scaling -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("level")
def test_a_pending_factor_is_applied_exactly_once() -> None:
    rows, settled = Fp32Rows(random(2, HIDDEN)), given_routing([[0, 1], [2, 3]])

    def scaled(scaling: RoutedScaling) -> Tensor:
        routing = Routing(settled.topk_ids, settled.topk_weights, LogicalIds, EXPERTS, scaling, False, 2)
        return layer()(rows, routing)

    assert torch.equal(scaled(Pending(2.5)), scaled(Settled()) * 2.5)
    assert torch.equal(scaled(Pending(1.0)), scaled(Settled()))


@pytest.mark.usefixtures("level")
def test_the_factor_of_a_selection_rule_reaches_the_result() -> None:
    rows, logits = Fp32Rows(random(3, HIDDEN)), random(3, EXPERTS, seed=8)
    one, twice = (
        layer()(rows, GroupedTopK(2, "sigmoid", 2, 1, "top2_sum", True, Pending(factor), torch.zeros(EXPERTS)).route(logits)) for factor in (1.0, 2.0)
    )
    assert torch.equal(twice, one * 2)


# ---- compile -----------------------------------------------------------------------------------------------------------------------


class Compile(Protocol):
    def __call__(self, model: Callable[..., object], /, *, backend: str, fullgraph: bool, dynamic: bool | None = None) -> Callable[..., object]: ...


COMPILE: Compile = vars(torch)["compile"]  # its own annotations are partial

compiles = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # inductor's own import


@pytest.fixture
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@compiles
@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("debug_level", [DebugLevel.OFF, DebugLevel.LAYOUT], ids=lambda level: str(level.name))
@pytest.mark.parametrize(
    ("backend", "wire"),
    [
        ("eager", "bf16 to fp8 experts"),
        ("eager", "mxfp8, upscaled for fp8 experts"),
        ("aot_eager", "fp8 to fp8 experts"),
        ("aot_eager", "mxfp8 to mxfp8 experts"),
        ("inductor", "fp8 to fp8 experts"),  # inductor has no e8m0 on CPU
    ],
)
def test_the_whole_layer_is_one_graph_for_any_number_of_rows(backend: str, wire: str, debug_level: DebugLevel) -> None:
    run, _ = wires()[wire]
    rule = SoftmaxTopK(2, renormalize=True)

    def step(hidden_states: Tensor, logits: Tensor) -> Tensor:
        return run(Bf16Rows(hidden_states), rule.route(logits))

    compiled = COMPILE(step, backend=backend, fullgraph=True, dynamic=True)
    with debug(debug_level):
        for rows in (3, 7, 2, 16):
            hidden_states, logits = random(rows, WIDE, seed=rows).bfloat16(), random(rows, 2, seed=rows)
            got = compiled(hidden_states, logits)
            assert isinstance(got, Tensor)
            torch.testing.assert_close(got, step(hidden_states, logits), rtol=2e-2, atol=2e-2)


@compiles
@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_a_compiled_layer_follows_the_switch(backend: str) -> None:
    run = layer()

    def step(hidden_states: Tensor, ids: Tensor, topk_weights: Tensor) -> Tensor:
        return run(Fp32Rows(hidden_states), from_topk(ids, topk_weights, EXPERTS))

    compiled = COMPILE(step, backend=backend, fullgraph=True)
    rows, good = random(2, HIDDEN), given_routing([[0, 1], [2, 3]])
    wide = good.topk_ids.long()  # an engine's remap table has widened the ids
    for _ in range(2):
        with debug("off"):
            assert isinstance(compiled(rows, wide, good.topk_weights), Tensor)
        with debug("layout"):
            assert isinstance(compiled(rows, good.topk_ids, good.topk_weights), Tensor)
            with pytest.raises(Exception, match="dtype is int64, expected int32"):
                compiled(rows, wide, good.topk_weights)


@compiles
@pytest.mark.usefixtures("_fresh")
def test_a_device_count_may_change_between_calls_of_one_graph() -> None:
    w, rows, routing = weights(), random(4, HIDDEN), given_routing([[0, 1], [2, 3], [3, 0], [1, 2]])
    run = layer(w)

    def step(hidden_states: Tensor, count: Tensor) -> Tensor:
        live = DeviceCount(count)
        return run(Fp32Rows(hidden_states), Routing(routing.topk_ids, routing.topk_weights, LogicalIds, EXPERTS, Settled(), False, live))

    compiled = COMPILE(step, backend="aot_eager", fullgraph=True)
    count = torch.tensor([4], dtype=torch.int32)
    whole = loop(w, rows, routing)
    for live in (4, 2, 0, 3):
        count.fill_(live)
        got = compiled(rows, count)
        assert isinstance(got, Tensor)
        same(got, torch.where(torch.arange(4).unsqueeze(1) < live, whole, 0.0))

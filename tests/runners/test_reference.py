"""The reference runner against a loop over routes in float64, and what it does with rows and routes that are none."""

import math
from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    BoundaryError,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    Interleaved,
    LocalIds,
    MxFp8ExpertWeights,
    MxFp8Rows,
    Payload,
    Routing,
    Settled,
    SiluAndMul,
    SwigluOai,
    UpGate,
    debug,
    prepare_reference,
    quantize_fp8_block128,
    quantize_mxfp8,
)
from moe_typed.formats import ExpertWeights, GateUpOrder
from moe_typed.runners import Activation, ReferenceRunner, reference_experts
from moe_typed.runners.reference import AnyReferenceWeights
from moe_typed.stages import FlatRowsInput
from tests.formats.weights.support import CASES

EXPERTS, HIDDEN, INTER = 4, 8, 6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights(order: type[GateUpOrder] = GateUp, *, biased: bool = False) -> Fp32ExpertWeights[GateUpOrder]:
    gate, up = random(EXPERTS, INTER, HIDDEN, seed=1), random(EXPERTS, INTER, HIDDEN, seed=2)
    b13 = order.join(random(EXPERTS, INTER, seed=4), random(EXPERTS, INTER, seed=5), 1) if biased else None
    return Fp32ExpertWeights(
        order.join(gate, up, 1), random(EXPERTS, HIDDEN, INTER, seed=3), order, b13, random(EXPERTS, HIDDEN, seed=6) if biased else None
    )


def routing(ids: Tensor, topk_weights: Tensor | None = None, experts: int = EXPERTS) -> Routing[LocalIds, Settled]:
    topk_weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(9)) if topk_weights is None else topk_weights
    return Routing(ids.to(torch.int32), topk_weights, LocalIds, experts, Settled(), True, ids.shape[0])


def activate(activation: Activation, gate: float, up: float) -> float:
    if isinstance(activation, SwigluOai):
        gate, up = min(gate, activation.limit), max(-activation.limit, min(up, activation.limit))
        return gate / (1 + math.exp(-activation.alpha * gate)) * (up + 1)
    return gate / (1 + math.exp(-gate)) * up


def loop(rows: Tensor, routes: Routing[LocalIds, Settled], w: ExpertWeights[GateUpOrder], activation: Activation) -> Tensor:
    """Return the sum over routes, one route after another, in float64."""
    total = torch.zeros(rows.shape, dtype=torch.float64)
    for row in range(rows.shape[0]):
        for slot in range(routes.topk_ids.shape[1]):
            expert = int(routes.topk_ids[row, slot])
            if not 0 <= expert < w.num_experts:
                continue
            joined = w.dequantize_w13(expert).double() @ rows[row].double()
            if w.b13 is not None:
                joined = joined + w.b13[expert].double()
            gate, up = w.order.split(joined, 0)
            inner = torch.tensor([activate(activation, float(g), float(u)) for g, u in zip(gate, up, strict=True)], dtype=torch.float64)
            result = w.dequantize_w2(expert).double() @ inner
            if w.b2 is not None:
                result = result + w.b2[expert].double()
            total[row] += float(routes.topk_weights[row, slot]) * result
    return total


def run(rows: Payload, routes: Routing[LocalIds, Settled], runner: ReferenceRunner) -> Tensor:
    with debug("strict"):
        return runner.run(FlatRowsInput(rows, routes)).hidden_states


ACTIVATIONS = pytest.mark.parametrize(
    "activation", [SiluAndMul(), SwigluOai(), SwigluOai(alpha=1.0, limit=0.5)], ids=["silu", "oai", "oai, tight limit"]
)
ORDERS = pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved])
IDS = [
    pytest.param([[0, 1], [3, 2], [1, 3]], id="plain"),
    pytest.param([[0, -1], [-1, -1], [3, 0]], id="-1 is no route"),
    pytest.param([[2, 2], [2, 2], [2, 2]], id="one expert, twice a row"),
    pytest.param([[0, 1, 2, 3]], id="every expert, one row"),
    pytest.param([[1]], id="one route"),
]


@ACTIVATIONS
@ORDERS
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("ids", IDS)
def test_against_the_loop(ids: list[list[int]], biased: bool, order: type[GateUpOrder], activation: Activation) -> None:
    w, routes = weights(order, biased=biased), routing(torch.tensor(ids))
    rows = random(len(ids), HIDDEN)
    got = run(Fp32Rows(rows), routes, prepare_reference(w).runner(activation))
    torch.testing.assert_close(got.double(), loop(rows, routes, w, activation), rtol=1e-5, atol=1e-5)


@ACTIVATIONS
def test_the_orders_differ_in_nothing_but_the_order(activation: Activation) -> None:
    rows, routes = Fp32Rows(random(3, HIDDEN)), routing(torch.tensor([[0, 1], [3, 2], [1, 3]]))
    results = [run(rows, routes, prepare_reference(weights(order, biased=True)).runner(activation)) for order in (GateUp, UpGate, Interleaved)]
    torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(results[2], results[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cls", [Bf16ExpertWeights, Fp16ExpertWeights, Fp32ExpertWeights])
@pytest.mark.parametrize("rows_cls", [Bf16Rows, Fp16Rows, Fp32Rows])
def test_results_come_in_the_dtype_of_dense_weights(
    cls: type[Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Fp32ExpertWeights[GateUpOrder]],
    rows_cls: type[Bf16Rows | Fp16Rows | Fp32Rows],
) -> None:
    exact, dtype = weights(), cls.format.data_dtype
    w = cls(exact.w13.to(dtype), exact.w2.to(dtype), GateUp)
    rows, routes = rows_cls(random(2, HIDDEN).to(rows_cls.format.data_dtype)), routing(torch.tensor([[0], [3]]))
    got = run(rows, routes, prepare_reference(w).runner(SiluAndMul()))
    assert got.dtype == dtype
    expected = reference_experts(rows.dequantize(), routes.topk_ids, routes.topk_weights, w, SiluAndMul())
    assert torch.equal(got, expected.to(dtype))  # rounded once, at the end


def block_weights() -> Fp8Block128ExpertWeights[GateUpOrder]:
    w13, w2 = random(2, 256, 128, seed=1).to(torch.float8_e4m3fn), random(2, 128, 128, seed=2).to(torch.float8_e4m3fn)
    return Fp8Block128ExpertWeights(w13, w2, random(2, 2, 1, seed=3).abs(), random(2, 1, 1, seed=4).abs(), GateUp)


def mx_weights() -> MxFp8ExpertWeights[GateUpOrder]:
    def scale(*shape: int) -> Tensor:
        return torch.randint(120, 130, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(5)).view(torch.float8_e8m0fnu)

    w13, w2 = random(2, 128, 64, seed=1).to(torch.float8_e4m3fn), random(2, 64, 64, seed=2).to(torch.float8_e4m3fn)
    return MxFp8ExpertWeights(w13, w2, scale(2, 128, 2), scale(2, 64, 2), GateUp)


ROUTES = torch.tensor([[0, 1], [1, -1], [1, 0]])


@pytest.mark.parametrize("wire", ["dense", "quantised"])
def test_block_weights_take_dense_rows_and_rows_of_their_own_format(wire: str) -> None:
    w, dense = block_weights(), Bf16Rows(random(3, 128).bfloat16())
    rows: Bf16Rows | Fp8Block128Rows = dense if wire == "dense" else quantize_fp8_block128.run(dense)
    routes = routing(ROUTES, experts=2)
    got = run(rows, routes, prepare_reference(w).runner(SiluAndMul()))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), loop(rows.dequantize(), routes, w, SiluAndMul()), rtol=2.0**-7, atol=1e-2)


@pytest.mark.parametrize("wire", ["dense", "quantised"])
def test_mxfp8_weights_take_dense_rows_and_rows_of_their_own_format(wire: str) -> None:
    w, dense = mx_weights(), Bf16Rows(random(3, 64).bfloat16())
    rows: Bf16Rows | MxFp8Rows = dense if wire == "dense" else quantize_mxfp8.run(dense)
    routes = routing(ROUTES, experts=2)
    got = run(rows, routes, prepare_reference(w).runner(SiluAndMul()))
    torch.testing.assert_close(got.double(), loop(rows.dequantize(), routes, w, SiluAndMul()), rtol=2.0**-7, atol=1e-2)


def test_no_rows_give_no_rows_in_the_right_dtype() -> None:
    empty = routing(torch.empty(0, 2, dtype=torch.int32), experts=2)
    got = run(Bf16Rows(torch.empty(0, 128, dtype=torch.bfloat16)), empty, prepare_reference(block_weights()).runner(SiluAndMul()))
    assert (got.dtype, got.shape) == (torch.bfloat16, (0, 128))


def test_a_row_without_a_route_is_zero_and_keeps_its_nan_to_itself() -> None:
    rows = random(3, HIDDEN)
    runner = prepare_reference(weights()).runner(SiluAndMul())
    routes = routing(torch.tensor([[0, 1], [-1, -1], [2, 3]]))
    clean = run(Fp32Rows(rows), routes, runner)
    dirty = rows.clone()
    dirty[1] = torch.tensor([math.nan, math.inf] * 4)
    got = run(Fp32Rows(dirty), routes, runner)
    assert not got[1].any()
    assert torch.equal(got, clean)


def test_a_nan_in_one_expert_reaches_its_own_rows_alone() -> None:
    w = weights()
    routes = routing(torch.tensor([[0, 1], [2, 1], [3, 0]]))
    clean = run(Fp32Rows(random(3, HIDDEN)), routes, prepare_reference(w).runner(SiluAndMul()))
    w.w2[0] = math.nan
    got = run(Fp32Rows(random(3, HIDDEN)), routes, prepare_reference(w).runner(SiluAndMul()))
    assert torch.equal(got[1], clean[1])
    assert bool(got[0].isnan().all())
    assert bool(got[2].isnan().all())


def test_the_input_is_not_touched() -> None:
    rows = random(3, HIDDEN)
    before = rows.clone()
    run(Fp32Rows(rows), routing(torch.tensor([[0], [1], [2]])), prepare_reference(weights()).runner(SiluAndMul()))
    assert torch.equal(rows, before)


@pytest.mark.parametrize("w", [weights(), block_weights(), mx_weights()], ids=["dense", "fp8 block 128", "mxfp8"])
def test_weights_are_prepared_once_and_without_a_copy(
    w: Fp32ExpertWeights[GateUpOrder] | Fp8Block128ExpertWeights[GateUpOrder] | MxFp8ExpertWeights[GateUpOrder],
) -> None:
    def prepare_again(prepare: Callable[..., object]) -> object:
        return prepare(prepared)

    prepared = prepare_reference(w)
    assert prepared.weights is w
    with pytest.raises(TypeError, match=f"takes expert weights in checkpoint layout; got {type(prepared).__qualname__}"):
        prepare_again(prepare_reference)


def test_the_accept_sets() -> None:
    assert prepare_reference(weights()).accepts() == (Bf16Rows, Fp16Rows, Fp32Rows)
    assert prepare_reference(block_weights()).accepts() == (Bf16Rows, Fp16Rows, Fp32Rows, Fp8Block128Rows)
    assert prepare_reference(mx_weights()).accepts() == (Bf16Rows, Fp16Rows, Fp32Rows, MxFp8Rows)


def test_input_and_routing_must_have_the_same_rows() -> None:
    with debug("layout"), pytest.raises(BoundaryError, match="routing: has rows = 2 inside, but rows = 3 here"):
        FlatRowsInput(Fp32Rows(random(3, HIDDEN)), routing(torch.tensor([[0], [1]])))


@pytest.mark.parametrize(
    ("hidden", "experts", "reason"),
    [
        (HIDDEN + 1, EXPERTS, f"has hidden = {HIDDEN + 1} inside, but hidden = {HIDDEN} here"),
        (HIDDEN, EXPERTS + 1, f"has experts = {EXPERTS + 1} inside, but experts = {EXPERTS} here"),
        (HIDDEN, EXPERTS - 1, f"has experts = {EXPERTS - 1} inside, but experts = {EXPERTS} here"),
    ],
)
def test_rows_must_fit_the_weights(hidden: int, experts: int, reason: str) -> None:
    with debug("layout"), pytest.raises(BoundaryError, match=reason):
        run(Fp32Rows(random(1, hidden)), routing(torch.tensor([[0]]), experts=experts), prepare_reference(weights()).runner(SiluAndMul()))


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 2.0, 1 / (1 + math.exp(-1.702)) * 3),
        (100.0, 0.0, 7 / (1 + math.exp(-1.702 * 7))),
        (0.0, 5.0, 0.0),
        (1.0, -100.0, -6 / (1 + math.exp(-1.702))),
    ],
)
def test_the_gpt_oss_activation(gate: float, up: float, expected: float) -> None:
    assert float(SwigluOai().apply(torch.tensor(gate), torch.tensor(up))) == pytest.approx(expected, rel=1e-5)


@ORDERS
@pytest.mark.parametrize("name", CASES)
def test_every_class_of_weights_has_a_reference(name: str, order: type[GateUpOrder]) -> None:
    case = CASES[name]
    made = case.build(order, 2 * case.unit if case.unit > 1 else 6, bias=True)
    # Over a union of classes no overload is the one; which it is, the tests of accept-sets say.
    prepared = cast("Callable[[object], AnyReferenceWeights]", prepare_reference)(made.weights)
    ids = torch.tensor([[0, 1], [1, -1], [-1, -1]])
    rows, routes = random(3, case.hidden), routing(ids, experts=made.weights.num_experts)
    w13, w2 = (matrix.float().contiguous() for matrix in (made.w13, made.w2))
    exact = Fp32ExpertWeights(w13, w2, order, _float(made.weights.b13), _float(made.weights.b2))
    expected = loop(rows, routes, exact, SiluAndMul())
    got = run(Fp32Rows(rows), routes, prepared.runner(SiluAndMul()))
    scale = float(expected.abs().max())
    torch.testing.assert_close(got.double() / scale, expected / scale, rtol=0, atol=2.0**-8)  # most results are rounded to bf16
    assert prepared.accepts()[:3] == (Bf16Rows, Fp16Rows, Fp32Rows)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()

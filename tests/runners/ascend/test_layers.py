"""Layers of every scheme, dispatch and activation on the strict emulation, against a float32 layer on the dequantised weights."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, Experts, GateUp, Interleaved, LogicalIds, Routing, SiluAndMul, UpGate, debug, upscale_bf16
from moe_typed.dispatchers import AscendTPDispatcher, as_int8, as_they_are
from moe_typed.formats import GateUpOrder, MxFp4ExpertWeights
from moe_typed.runners import Activation
from moe_typed.runners.ascend import prepare_ascend_mxfp4
from moe_typed.stages import OneRank, PartialResult
from tests.emulation.ascend.extension import EmulatedAscendExtensionOps
from tests.emulation.ascend.misuse import Device
from tests.runners.ascend.support import ACTIVATIONS, HIDDEN, SCHEMES, Scheme, Weights, emulated, error, expected, experts_of, randn, routing, wire

every_scheme = pytest.mark.parametrize("name", SCHEMES)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.name)


def run(scheme: Scheme, wire_name: str, activation: Activation, tokens: int, k: int, order: type[GateUpOrder] = GateUp, **options: Any) -> float:
    """Return the error of one layer, which must be of the model's dtype."""
    ops = emulated(scheme.device)
    weights = scheme.weights(order)
    rows = scheme.rows(randn(3, tokens, HIDDEN).to(scheme.rows.format.data_dtype))
    routes = routing(tokens, k, **options)
    extension = EmulatedAscendExtensionOps() if wire_name.endswith("+extension") else None
    dispatcher = AscendTPDispatcher(wire(wire_name.removesuffix("+extension"), scheme.rows, ops))
    with debug("strict"):
        result = dispatcher.then(experts_of(weights, ops, activation, extension))(rows, routes)
    assert isinstance(result, PartialResult)
    output = result.completed(OneRank())
    assert (output.dtype, output.shape) == (scheme.rows.format.data_dtype, rows.data.shape)
    return error(output, expected(rows.data, routes, weights, activation))


CELLS = [(name, wire_name, SiluAndMul()) for name, scheme in SCHEMES.items() for wire_name in scheme.wires] + [
    (name, scheme.wires[-1], activation) for name, scheme in SCHEMES.items() if not scheme.only_silu for activation in ACTIVATIONS[1:]
]


@pytest.mark.parametrize(("name", "wire_name", "activation"), CELLS)
def test_a_layer_is_the_reference_s(name: str, wire_name: str, activation: Activation) -> None:
    """With more than one token and more than one route a token, since the two orders of index agree otherwise; two experts have no rows."""
    worse = 1.0 if isinstance(activation, SiluAndMul) else 1.4  # the figures are of silu
    assert 0 < run(SCHEMES[name], wire_name, activation, 33, 3) < worse * SCHEMES[name].error


@pytest.mark.parametrize("name", ["bf16", "w8a8", "w4a4"])
@every_activation
def test_the_sorted_activations_do_as_well(name: str, activation: Activation) -> None:
    assert 0 < run(SCHEMES[name], "v2+extension", activation, 33, 3) < 1.2 * SCHEMES[name].error


def test_one_expert_of_which_the_count_is_the_end() -> None:
    """The documents rule out counts of length 1, so that it is given as cumulative."""
    for name in ("bf16", "w8a8", "w4a8"):
        ops, weights = emulated(), SCHEMES[name].weights(experts=1)
        rows, routes = Bf16Rows(randn(3, 9, HIDDEN).bfloat16()), routing(9, 1, experts=1, idle=0)
        output = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(experts_of(weights, ops))(rows, routes).hidden_states
        assert 0 < error(output, expected(rows.data, routes, weights, SiluAndMul())) < 1.2 * SCHEMES[name].error


def test_a_conversion_stands_between_the_wire_and_the_experts() -> None:
    ops, weights, rows = emulated(), SCHEMES["bf16"].weights(), Bf16Rows(randn(3, 9, HIDDEN).bfloat16())
    experts = experts_of(weights, ops).accepting(upscale_bf16)
    with debug("strict"):
        output = AscendTPDispatcher(as_int8(Bf16Rows, ops)).then(experts)(rows, routing(9, 2)).hidden_states
    assert 0 < error(output, expected(rows.data, routing(9, 2), weights, SiluAndMul())) < 0.02


def rounding_layer(rows: Tensor, routes: Routing[LogicalIds], weights: Weights, largest: int) -> Tensor:
    """Return the layer in float64 with the rows of both products rounded to integers -largest..largest, and nothing else."""

    def rounded(part: Tensor) -> Tensor:
        scale = part.abs().amax(1, keepdim=True) / largest
        return (part / scale).round() * scale

    out = torch.zeros(rows.shape, dtype=torch.float64)
    for expert in range(routes.num_experts):
        token, slot = (routes.topk_ids == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = GateUp.split(rounded(rows[token].double()) @ weights.dequantize_w13(expert).double().T, 1)
            found = rounded(gate * gate.sigmoid() * up) @ weights.dequantize_w2(expert).double().T
            out.index_add_(0, token, routes.topk_weights[token, slot].double().unsqueeze(1) * found)
    return out


@pytest.mark.parametrize(("name", "largest", "most"), [("w8a8", 127, 0.012), ("w4a8", 127, 0.012), ("w4a4", 7, 0.06), ("w4a4 packed", 7, 0.06)])
@pytest.mark.parametrize("hidden", [128, 512])
def test_what_a_scheme_costs_is_the_rounding_of_its_rows(name: str, largest: int, most: float, hidden: int) -> None:
    """How much that is depends on the data, and grows with the widths, as amax does; what comes on top is bf16's, and of values near a half."""
    scheme, ops = SCHEMES[name], emulated()
    weights = scheme.weights(hidden=hidden, inter=hidden // 2)
    rows, routes = Bf16Rows(randn(3, 33, hidden).bfloat16()), routing(33, 3)
    output = AscendTPDispatcher(wire(scheme.wires[-1], Bf16Rows, ops)).then(experts_of(weights, ops))(rows, routes).hidden_states
    assert 0 < error(output, rounding_layer(rows.data, routes, weights, largest)) < most


@every_scheme
@pytest.mark.parametrize("order", [UpGate, Interleaved])
def test_gate_and_up_may_lie_in_any_order(name: str, order: type[GateUpOrder]) -> None:
    assert 0 < run(SCHEMES[name], SCHEMES[name].wires[0], SiluAndMul(), 17, 2, order) < 1.2 * SCHEMES[name].error


@every_scheme
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 3), (7, 1)])
def test_few_tokens_and_routes(name: str, tokens: int, k: int) -> None:
    assert run(SCHEMES[name], SCHEMES[name].wires[-1], SiluAndMul(), tokens, k) < 1.5 * SCHEMES[name].error


@every_scheme
def test_padding_rows_are_zero_and_spoil_nothing(name: str) -> None:
    assert run(SCHEMES[name], SCHEMES[name].wires[-1], SiluAndMul(), 9, 2, live=5) < 1.5 * SCHEMES[name].error


def test_padding_may_hold_anything() -> None:
    ops = emulated()
    rows = randn(3, 6, HIDDEN).bfloat16()
    rows[4:] = torch.nan
    weights = SCHEMES["bf16"].weights()
    layer = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(experts_of(weights, ops))
    output = layer(Bf16Rows(rows), routing(6, 2, live=4)).hidden_states
    assert bool((output[4:] == 0).all())
    assert error(output[:4], expected(rows[:4], routing(6, 2).head(4), weights, SiluAndMul())) < 0.006


@every_scheme
def test_no_rows_call_no_operator(name: str) -> None:
    scheme, ops = SCHEMES[name], emulated(SCHEMES[name].device)
    experts = experts_of(scheme.weights(), ops)
    for wire_name in scheme.wires:
        with debug("strict"):
            layer = AscendTPDispatcher(wire(wire_name, scheme.rows, ops)).then(experts)
            output = layer(scheme.rows(torch.empty(0, HIDDEN, dtype=scheme.rows.format.data_dtype)), routing(0, 2)).hidden_states
        assert (output.shape, output.dtype) == ((0, HIDDEN), scheme.rows.format.data_dtype)


@pytest.mark.parametrize("activation", [SiluAndMul(), ACTIVATIONS[1]], ids=lambda activation: activation.name)
def test_mxfp4_rows_of_mxfp4_weights(activation: Activation) -> None:
    """Both are rounded to eight levels either side of zero."""
    weights, ops = SCHEMES["mxfp4"].weights(), emulated(Device.A5)
    assert isinstance(weights, MxFp4ExpertWeights)
    rows, routes = Bf16Rows(randn(3, 33, HIDDEN).bfloat16()), routing(33, 3)
    with debug("strict"):
        experts = Experts(prepare_ascend_mxfp4(weights, ops), activation)
        output = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(experts)(rows, routes).hidden_states
    assert 0 < error(output, expected(rows.data, routes, weights, activation)) < 0.25

"""What each activation computes, by a formula of its own."""

import math
import re

import pytest
import torch

from moe_typed import GateUp, Interleaved, SiluAndMul, SwigluOai, UpGate
from moe_typed.formats import GateUpOrder, Ungated
from moe_typed.runners import (
    ALL_ACTIVATIONS,
    GatedActivation,
    GeluTanhAndMul,
    OpaqueActivation,
    Relu2,
    SwigluClamped,
    ThenNorm,
)
from moe_typed.runners.activations import Activation

PAIRS = [(-9.0, 2.0), (-0.3, -8.0), (0.0, 1.0), (0.7, 0.25), (9.0, 9.0)]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def gelu_tanh(x: float) -> float:
    return x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(("gate", "up"), PAIRS)
def test_gated_formulas(gate: float, up: float) -> None:
    limit = 1.5
    low, clipped = min(gate, limit), max(-limit, min(up, limit))
    expected: dict[GatedActivation, float] = {
        GeluTanhAndMul(): gelu_tanh(gate) * up,
        SwigluClamped(limit=limit): low * sigmoid(low) * clipped,
        SwigluOai(alpha=2.0, limit=limit): low * sigmoid(2.0 * low) * (clipped + 1),
    }
    for activation, value in expected.items():
        assert float(activation.apply(torch.tensor(gate), torch.tensor(up))) == pytest.approx(value, rel=1e-5, abs=1e-6)


def test_a_gated_activation_finds_gate_and_up_in_any_order() -> None:
    gate, up = torch.tensor(PAIRS).T.unbind(0)
    orders: tuple[type[GateUpOrder], ...] = (GateUp, UpGate, Interleaved)
    for order in orders:
        assert SiluAndMul().takes(order)
        torch.testing.assert_close(SiluAndMul().activate(order.join(gate, up, -1), order), torch.nn.functional.silu(gate) * up)
    assert not SiluAndMul().takes(Ungated)


def test_relu2() -> None:
    rows = torch.tensor([-2.0, 0.0, 3.0])
    assert torch.equal(Relu2().activate(rows, Ungated), torch.tensor([0.0, 0.0, 9.0]))
    assert Relu2().takes(Ungated)
    assert not Relu2().takes(GateUp)


def test_an_opaque_function_is_called_as_it_is_in_the_dtype_of_the_model() -> None:
    seen: list[torch.Tensor] = []

    def function(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return rows[..., ::2]

    activation = OpaqueActivation(function, Interleaved, torch.bfloat16, "mine")
    rows = torch.tensor([[1.001, 2.0, 3.0, 4.0]])
    result = activation.activate(rows, Interleaved)
    assert seen[0].dtype is torch.bfloat16
    assert result.dtype is torch.float32
    assert torch.equal(result, torch.tensor([[1.0, 3.0]]))
    assert activation.takes(Interleaved)
    assert not activation.takes(GateUp)


def test_then_norm_is_applied_to_results_alone() -> None:
    activation: Activation = ThenNorm(Relu2(), lambda rows: rows * 2, torch.float32)
    rows = torch.tensor([[3.0]])
    assert torch.equal(activation.activate(rows, Ungated), rows * rows)
    assert torch.equal(activation.finish(rows), rows * 2)
    assert Relu2().finish(rows) is rows


@pytest.mark.parametrize("made", [(1, 2), (4, 2), (6,), (3, 1, 2)])
def test_a_function_that_does_not_make_a_row_of_each_row_is_refused(made: tuple[int, ...]) -> None:
    activation = OpaqueActivation(lambda rows: rows.new_zeros(made), GateUp, torch.float32, "mine")
    with pytest.raises(ValueError, match=re.escape(f"the activation 'mine' made {list(made)} of rows [3, 4]")):
        activation.activate(torch.zeros(3, 4), GateUp)


@pytest.mark.parametrize("made", [(1, 4), (3, 2), (12,)])
def test_a_norm_that_changes_the_shape_is_refused(made: tuple[int, ...]) -> None:
    activation = ThenNorm(Relu2(), lambda rows: rows.new_zeros(made), torch.float32)
    with pytest.raises(ValueError, match=re.escape(f"the norm behind 'relu2' made {list(made)} of rows [3, 4]")):
        activation.finish(torch.zeros(3, 4))


def test_every_activation_is_listed() -> None:
    direct = {*Activation.__subclasses__(), *GatedActivation.__subclasses__()} - {GatedActivation}
    found = {cls for cls in direct if cls.__module__.startswith("moe_typed.")}
    assert {cls.name for cls in found} == set(ALL_ACTIVATIONS)

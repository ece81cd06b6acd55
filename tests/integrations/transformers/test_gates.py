"""What is read from a function is its formula; what has another formula is called as it is."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from moe_typed import GateUp, Interleaved, SiluAndMul, SwigluOai, UpGate
from moe_typed.formats import GateUpOrder, Ungated
from moe_typed.integrations.transformers.gates import recognise
from moe_typed.runners import GatedActivation, GeluAndMul, GeluTanhAndMul, Relu2, SwigluClamped, SwigluStep

ORDERS: tuple[type[GateUpOrder], ...] = (GateUp, UpGate, Interleaved)
GATED: tuple[GatedActivation, ...] = (SiluAndMul(), GeluAndMul(), GeluTanhAndMul(), SwigluOai(1.5, 3.0), SwigluClamped(2.5), SwigluStep(4.0))


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("activation", GATED, ids=lambda activation: activation.name)
def test_each_activation_is_recognised_in_each_order(activation: GatedActivation, order: type[GateUpOrder]) -> None:
    assert recognise(lambda rows: activation.activate(rows, order), gated=True) == (activation, order)


def halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    inter = rows.shape[-1] // 2
    return rows[..., :inter], rows[..., inter:]


def written_otherwise(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return up.float() * (torch.sigmoid(gate) * gate)


def pairs(rows: Tensor) -> Tensor:
    gate, up = rows[..., ::2], rows[..., 1::2]
    gate, up = gate.clamp(min=None, max=7.0), up.clamp(min=-7.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.25))


@pytest.mark.parametrize(
    ("function", "expected"), [(written_otherwise, (SiluAndMul(), GateUp)), (pairs, (SwigluOai(1.25, 7.0), Interleaved))], ids=["silu", "oai"]
)
def test_a_formula_may_be_written_in_another_way(function: Callable[[Tensor], Tensor], expected: tuple[GatedActivation, type[GateUpOrder]]) -> None:
    assert recognise(function, gated=True) == expected


def mixed(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.silu(gate) * up + 1e-30


def other_limit(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.silu(gate.clamp(max=2.0)) * up.clamp(-3.0, 3.0)


def whole_row(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.silu(gate - gate.mean(-1, keepdim=True)) * up


def by_value(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.silu(gate) * up if bool(gate.max() > 5) else gate * up


def dropping(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.dropout(functional.silu(gate), 0.5) * up


def swapped_within(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.silu(gate) * up.flip(-1)


def written_over(rows: Tensor) -> Tensor:
    rows[..., 1:3].mul_(2)  # a part of what is read as the gate
    gate, up = halves(rows)
    return functional.silu(gate) * up


def detached(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.silu(gate) * up.detach()


def captured(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    return functional.silu(gate) * up * torch.tensor(1.0)


def added_thrice(rows: Tensor) -> Tensor:
    gate, up = halves(rows)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.25) * torch.add(up, 1, alpha=3)


OTHERS = (added_thrice, mixed, other_limit, whole_row, by_value, dropping, swapped_within, halves, written_over, detached, captured)


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_nothing_is_taken_for_what_it_is_not(function: Callable[[Tensor], Tensor]) -> None:
    """All but one differ from a known formula where few inputs would show it."""
    assert recognise(function, gated=True) is None


def test_without_a_gate() -> None:
    assert recognise(lambda rows: functional.relu(rows) ** 2, gated=False) == (Relu2(), Ungated)
    assert recognise(lambda rows: torch.square(functional.relu(rows)), gated=False) == (Relu2(), Ungated)
    assert recognise(functional.silu, gated=False) is None

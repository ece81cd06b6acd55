"""The orders of gate and up rows."""

import pytest
import torch
from torch import Tensor

from moe_typed import GateUp, Interleaved, UpGate
from moe_typed.formats import GateUpOrder

ORDERS = pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved])


def numbers(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


@pytest.mark.parametrize(
    ("order", "gate", "up"),
    [(GateUp, [0, 1, 2], [3, 4, 5]), (UpGate, [3, 4, 5], [0, 1, 2]), (Interleaved, [0, 2, 4], [1, 3, 5])],
)
def test_what_each_order_means(order: type[GateUpOrder], gate: list[int], up: list[int]) -> None:
    got_gate, got_up = order.split(torch.arange(6), 0)
    assert torch.equal(got_gate, torch.tensor(gate))
    assert torch.equal(got_up, torch.tensor(up))


@ORDERS
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize(
    "joined",
    [
        pytest.param(numbers(4, 6, 8), id="contiguous"),
        pytest.param(numbers(6, 8, 4).permute(2, 0, 1), id="permuted"),
        pytest.param(numbers(4, 6, 8).transpose(0, 2), id="transposed"),
        pytest.param(numbers(8, 12, 16)[::2, ::2, ::2], id="sliced"),
        pytest.param(numbers(4, 1, 8).expand(4, 6, 8), id="expanded"),
        pytest.param(numbers(0, 6, 8), id="empty"),
    ],
)
def test_join_undoes_split(order: type[GateUpOrder], dim: int, joined: Tensor) -> None:
    gate, up = order.split(joined, dim)
    assert gate.shape == up.shape
    assert gate.shape[dim] * 2 == joined.shape[dim]
    again = order.join(gate, up, dim)
    assert torch.equal(again, joined)
    assert again.is_contiguous()


@ORDERS
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_split_undoes_join(order: type[GateUpOrder], dim: int) -> None:
    gate, up = numbers(3, 5), -numbers(3, 5)
    got_gate, got_up = order.split(order.join(gate, up, dim), dim)
    assert torch.equal(got_gate, gate)
    assert torch.equal(got_up, up)


@ORDERS
def test_split_returns_views(order: type[GateUpOrder]) -> None:
    joined = numbers(4, 6)
    for half in order.split(joined, 1):
        half.zero_()
    assert not joined.any()


@pytest.mark.parametrize("first", [GateUp, UpGate, Interleaved])
@pytest.mark.parametrize("second", [GateUp, UpGate, Interleaved])
def test_re_ordering_there_and_back_is_exact(first: type[GateUpOrder], second: type[GateUpOrder]) -> None:
    joined = numbers(2, 8, 3)
    there = second.join(*first.split(joined, 1), 1)
    assert torch.equal(there, joined) is (first is second)
    assert torch.equal(first.join(*second.split(there, 1), 1), joined)

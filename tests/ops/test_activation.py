import pytest
import torch

from moe_typed.ops.activation.reference import activate, activate_fp8
from moe_typed.ops.activation.spec import Gate, Split
from tests.ops.support import floats, ints

SILU = Gate(1.0, float("inf"), 0.0)
OAI = Gate(1.702, 7.0, 1.0)
INTER = 256


def joined(slots: int = 64) -> torch.Tensor:
    return torch.randn(slots, 2 * INTER, generator=torch.Generator().manual_seed(7)) * 5


@pytest.mark.parametrize("split", [Split(INTER, 0, 1), Split(0, 1, 2)], ids=["up-gate", "interleaved"])
@pytest.mark.parametrize("gate", [SILU, OAI], ids=["silu", "swiglu-oai"])
def test_an_order_says_only_where_gate_and_up_lie(split: Split, gate: Gate) -> None:
    rows = joined()
    ordered = torch.empty_like(rows)
    column = torch.arange(INTER) * split.step
    ordered[:, split.gate + column], ordered[:, split.up + column] = rows[:, :INTER], rows[:, INTER:]
    assert torch.equal(activate(ordered, split, gate), activate(rows, Split(0, INTER, 1), gate))


def test_silu_without_a_limit() -> None:
    rows = joined()
    expected = torch.nn.functional.silu(rows[:, :INTER]) * rows[:, INTER:]
    torch.testing.assert_close(activate(rows, Split(0, INTER, 1), SILU), expected)


def test_fp8_groups_of_zeros_and_groups_with_nan_or_infinity() -> None:
    rows = joined()
    rows[0] = 0
    rows[1, 3] = float("nan")
    rows[2, 200] = float("inf")
    data, scale = activate_fp8(rows, Split(0, INTER, 1), SILU)
    assert floats(scale[0]) == [1.0, 1.0]
    assert not bool(data[0].float().any())
    assert ints(torch.isnan(scale).flatten().nonzero().squeeze(1)) == [1 * 2 + 0, 2 * 2 + 1]

import pytest
import torch

from moe_typed.ops.activation import reference
from moe_typed.ops.activation.spec import Gate, Split
from moe_typed.ops.activation.triton import activate, activate_fp8
from tests.ops.support import devices, dtypes, floats, ints, on_cuda

SILU = Gate(1.0, float("inf"), 0.0)
OAI = Gate(1.702, 7.0, 1.0)
INTER = 256
SPLITS = {"gate-up": Split(0, INTER, 1), "up-gate": Split(INTER, 0, 1), "interleaved": Split(0, 1, 2)}

splits = pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS.keys())
gates = pytest.mark.parametrize("gate", [SILU, OAI], ids=["silu", "swiglu-oai"])


def joined(device: str, dtype: torch.dtype, slots: int = 64, inter: int = INTER) -> torch.Tensor:
    return (torch.randn(slots, 2 * inter, generator=torch.Generator().manual_seed(7)) * 5).to(device, dtype)


def every_block(device: str, blocks: int = 2) -> torch.Tensor:
    return torch.zeros(blocks, dtype=torch.int32, device=device)


@dtypes("float32", "float16", "bfloat16")
@splits
@gates
def test_matches_the_reference(device: str, dtype: torch.dtype, split: Split, gate: Gate) -> None:
    rows = joined(device, dtype)
    found = activate(rows, every_block(device), split, gate)
    assert found.dtype == dtype
    torch.testing.assert_close(found, reference.activate(rows, split, gate).to(dtype))


@devices
def test_a_width_that_is_no_multiple_of_the_tile(device: str) -> None:
    rows = joined(device, torch.float32, inter=40)
    torch.testing.assert_close(activate(rows, every_block(device), Split(0, 40, 1), SILU), reference.activate(rows, Split(0, 40, 1), SILU))


@devices
def test_nan_stays_nan_past_the_limit(device: str) -> None:
    rows = joined(device, torch.float32)
    rows[3, 5] = rows[4, INTER + 6] = float("nan")
    found = activate(rows, every_block(device), SPLITS["gate-up"], OAI)
    assert ints(torch.isnan(found).flatten().nonzero().squeeze(1)) == [3 * INTER + 5, 4 * INTER + 6]


@devices
def test_blocks_without_an_expert_are_not_touched(device: str) -> None:
    rows = joined(device, torch.float32)
    rows[32:] = float("nan")
    found = activate(rows, torch.tensor([0, -1], dtype=torch.int32, device=device), SPLITS["gate-up"], SILU)
    assert not bool(torch.isnan(found[:32]).any())


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@splits
@gates
def test_fp8_matches_the_reference(device: str, split: Split, gate: Gate) -> None:
    rows = joined(device, torch.bfloat16)
    data, scale = activate_fp8(rows, every_block(device), split, gate)
    expected_data, expected_scale = reference.activate_fp8(rows, split, gate)
    torch.testing.assert_close(scale, expected_scale)
    # One e4m3 step (1/8) at most where the quotient lies next to a tie, and nearly everywhere none.
    torch.testing.assert_close(data.float(), expected_data.float(), rtol=0.126, atol=2**-9)
    assert float((data.float() != expected_data.float()).float().mean()) < 0.001


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_fp8_groups_of_zeros_and_groups_with_nan_or_infinity(device: str) -> None:
    rows = joined(device, torch.bfloat16)
    rows[0] = 0
    rows[1, 3] = float("nan")
    rows[2, 200] = float("inf")
    data, scale = activate_fp8(rows, every_block(device), SPLITS["gate-up"], SILU)
    assert floats(scale[0]) == [1.0, 1.0]
    assert not bool(data[0].float().any())
    assert ints(torch.isnan(scale).flatten().nonzero().squeeze(1)) == [1 * 2 + 0, 2 * 2 + 1]


@devices
def test_no_slots(device: str) -> None:
    assert activate(joined(device, torch.float32, 0), every_block(device, 0), SPLITS["gate-up"], SILU).shape == (0, INTER)

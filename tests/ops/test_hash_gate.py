import math
from collections.abc import Callable
from typing import TypeAlias, get_args

import pytest
import torch
from torch import Tensor

from moe_typed.ops.hash_gate import reference
from moe_typed.ops.hash_gate import triton as fast
from moe_typed.ops.scores import Score
from tests.ops.support import WEIGHT_RTOL, devices, floats, in_one_graph, ints, on_cuda

# The interpreter computes infinities that the kernel throws away, and numpy warns of each.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
Gate: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
IMPLEMENTATIONS = pytest.mark.parametrize("gate", [reference.hash_gate, fast.hash_gate], ids=["reference", "triton"])


def problem(rows: int, experts: int, k: int, device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    logits = torch.randn(rows, experts, generator=generator) * 3
    table = torch.rand(50, experts, generator=generator).argsort(1)[:, :k].to(torch.int32)
    tokens = torch.randint(0, 50, (rows,), generator=generator)
    return logits.to(dtype).to(device), table.to(device), tokens.to(device)


def _score(z: float, total: float, score: Score) -> float:
    if score == "softmax":
        return math.exp(z) / total
    return 1 / (1 + math.exp(-z)) if score == "sigmoid" else math.sqrt(math.log1p(math.exp(z)))


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("tokens_dtype", [torch.int32, torch.int64])
def test_the_table_chooses_and_the_logits_weigh(device: str, gate: Gate, score: Score, renormalize: bool, tokens_dtype: torch.dtype) -> None:
    logits, table, tokens = problem(13, 60, 6, device)
    ids, weights = gate(logits, table, tokens.to(tokens_dtype), score, renormalize, 2.5)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row, token in enumerate(ints(tokens)):
        assert torch.equal(ids[row], table[token])
        z = floats(logits[row])
        total = sum(math.exp(value) for value in z)
        expected = [_score(z[e], total, score) for e in ints(ids[row])]
        scale = 2.5 / sum(expected) if renormalize else 2.5
        torch.testing.assert_close(weights[row].cpu(), torch.tensor([value * scale for value in expected]), rtol=2 * WEIGHT_RTOL, atol=0)


@devices
@pytest.mark.parametrize("score", get_args(Score))
@pytest.mark.parametrize(("rows", "experts", "k"), [(1, 1, 1), (3, 8, 8), (9, 256, 6), (66, 384, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_agrees_with_the_reference(device: str, score: Score, rows: int, experts: int, k: int, dtype: torch.dtype) -> None:
    logits, table, tokens = problem(rows, experts, k, device, dtype)
    ids, weights = fast.hash_gate(logits, table, tokens, score, True, 1.0)
    expected_ids, expected_weights = reference.hash_gate(logits, table, tokens, score, True, 1.0)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=WEIGHT_RTOL, atol=0)


@devices
@IMPLEMENTATIONS
def test_a_token_that_the_table_does_not_hold_goes_nowhere(device: str, gate: Gate) -> None:
    logits, table, tokens = problem(6, 16, 2, device)
    expected = gate(logits, table, tokens, "softmax", True, 1.0)
    tokens[1], tokens[4] = -1, table.shape[0]
    ids, weights = gate(logits, table, tokens, "softmax", True, 1.0)
    for row in (1, 4):
        assert ints(ids[row]) == [-1, -1]
        assert not bool(weights[row].any())
    for row in (0, 2, 3, 5):
        assert torch.equal(ids[row], expected[0][row])
        assert torch.equal(weights[row], expected[1][row])


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("count", [0, 4, 7])
def test_padded_rows_go_nowhere_whatever_their_token_is(device: str, gate: Gate, count: int) -> None:
    logits, table, tokens = problem(6, 16, 2, device)
    expected = gate(logits, table, tokens, "sigmoid", True, 1.0)
    tokens[count:] = 2**40
    ids, weights = gate(logits, table, tokens, "sigmoid", True, 1.0, torch.tensor([count], dtype=torch.int32, device=device))
    assert torch.equal(ids[:count], expected[0][:count])
    assert torch.equal(weights[:count], expected[1][:count])
    assert bool((ids[count:] == -1).all())
    assert bool((weights[count:] == 0).all())


@devices
def test_inputs_may_have_strides(device: str) -> None:
    logits, table, tokens = problem(12, 32, 6, device)
    arguments = logits[::2, ::2], table[:, 1:4] % 16, tokens[1::2]
    for got, expected in zip(fast.hash_gate(*arguments, "softmax", False, 1.0), reference.hash_gate(*arguments, "softmax", False, 1.0), strict=True):
        torch.testing.assert_close(got, expected, rtol=WEIGHT_RTOL, atol=0)


def test_without_rows_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_hash", None)
    ids, weights = fast.hash_gate(torch.empty(0, 8), torch.zeros(5, 2, dtype=torch.int32), torch.empty(0, dtype=torch.int64), "sigmoid", True, 1.0)
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 2), torch.int32, (0, 2), torch.float32)


@devices
@IMPLEMENTATIONS
def test_both_trace_into_one_graph(device: str, gate: Gate) -> None:
    logits, table, tokens = problem(6, 16, 2, device)
    traced = in_one_graph(gate)(logits, table, tokens, "softmax", True, 1.0)
    for got, expected in zip(traced, reference.hash_gate(logits, table, tokens, "softmax", True, 1.0), strict=True):
        torch.testing.assert_close(got, expected, rtol=WEIGHT_RTOL, atol=0)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_a_captured_graph_follows_the_live_count(device: str) -> None:
    logits, table, tokens = problem(64, 128, 6, device)
    live = torch.tensor([64], dtype=torch.int32, device=device)
    fast.hash_gate(logits, table, tokens, "sqrt_softplus", True, 1.5, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights = fast.hash_gate(logits, table, tokens, "sqrt_softplus", True, 1.5, live)
    for count in (64, 10, 0):
        live.fill_(count)
        graph.replay()
        expected_ids, expected_weights = reference.hash_gate(logits, table, tokens, "sqrt_softplus", True, 1.5, live)
        assert torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights, rtol=WEIGHT_RTOL, atol=0)

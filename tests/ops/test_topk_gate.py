"""The kernel of the top-k gate against its reference, and how it is launched."""

from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import pytest
import torch
from torch import Tensor

from moe_typed.ops.topk_gate import reference
from moe_typed.ops.topk_gate import triton as fast
from moe_typed.ops.topk_gate.spec import GateRule, GateScore
from tests.ops.support import WEIGHT_RTOL, devices, in_one_graph, on_cuda

# The interpreter computes infinities that the kernel throws away, and numpy warns of each.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCORES: tuple[GateScore, ...] = ("softmax", "sigmoid", "sqrt_softplus", "selected_softmax")
GROUP_SCORES: tuple[Literal["max", "top2_sum"], ...] = ("max", "top2_sum")
Gate: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
DEEPSEEK = GateRule(8, "sigmoid", renormalize=True, factor=2.5, num_groups=8, topk_group=4, group_score="top2_sum")

IMPLEMENTATIONS = pytest.mark.parametrize("gate", [reference.topk_gate, fast.topk_gate])


# ---- the kernel against the reference -----------------------------------------------------------------------------------------------


def assert_agrees(logits: Tensor, rule: GateRule, bias: Tensor | None = None, live: Tensor | None = None) -> None:
    """Compare ids bit by bit and weights to their last bits. Where scores are ranked, rounding may swap neighbours in one row of 200."""
    ids, weights = fast.topk_gate(logits, rule, bias, live)
    expected_ids, expected_weights = reference.topk_gate(logits, rule, bias, live)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    same = (ids == expected_ids).all(1)
    allowed = 0 if rule.ranks_logits(bias is not None) else logits.shape[0] // 200
    assert int((~same).sum()) <= allowed
    torch.testing.assert_close(weights[same], expected_weights[same], rtol=WEIGHT_RTOL, atol=1e-30, equal_nan=True)


def random_logits(rows: int, experts: int, device: str, dtype: torch.dtype = torch.float32, *, ties: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + experts)
    logits = torch.randn(rows, experts, generator=generator) * 3
    return (logits.round() if ties else logits).to(dtype).to(device)


def random_bias(experts: int, device: str) -> Tensor:
    return torch.randn(experts, generator=torch.Generator().manual_seed(experts)).to(device)


SHAPES = [(1, 1), (2, 8), (8, 8), (4, 60), (6, 64), (6, 72), (8, 128), (8, 160), (8, 256), (9, 264), (16, 384), (32, 512), (72, 72)]


@devices
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("k", "experts"), SHAPES)
def test_every_shape_and_score(device: str, k: int, experts: int, score: GateScore, biased: bool) -> None:
    rows = 3 if device == "cpu" else 300
    bias = random_bias(experts, device) if biased else None
    for renormalize in (False, True) if device == "cuda" else (True,):
        rule = GateRule(k, score, renormalize, 2.5)
        assert_agrees(random_logits(rows, experts, device, ties=renormalize), rule, bias)


@devices
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("ties", [False, True])
def test_every_dtype_with_and_without_ties(device: str, dtype: torch.dtype, ties: bool) -> None:
    logits = random_logits(7 if device == "cpu" else 5000, 64, device, dtype, ties=ties)
    assert_agrees(logits, GateRule(6, "softmax"))
    assert_agrees(logits, GateRule(6, "sigmoid"), random_bias(64, device))
    assert_agrees(logits, GateRule(6, "softmax", num_groups=8, topk_group=3))


@devices
@pytest.mark.parametrize("group_score", GROUP_SCORES)
@pytest.mark.parametrize(("experts", "num_groups", "topk_group", "k"), [(256, 8, 4, 8), (264, 8, 3, 8), (12, 4, 2, 3), (60, 12, 5, 6), (6, 6, 3, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_groups(device: str, experts: int, num_groups: int, topk_group: int, k: int, group_score: Literal["max", "top2_sum"], biased: bool) -> None:
    rows = 3 if device == "cpu" else 300
    bias = random_bias(experts, device) if biased else None
    for score in SCORES if device == "cuda" else SCORES[1:2]:
        rule = GateRule(k, score, True, 2.5, num_groups, topk_group, group_score)
        assert_agrees(random_logits(rows, experts, device), rule, bias)
        assert_agrees(random_logits(rows, experts, device, ties=True), rule, bias)


@pytest.mark.parametrize("rows", [1, 2, 64, 512, 513, 4096, 16384, 16385])
@pytest.mark.parametrize("experts", [128, 256])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_every_tile(device: str, rows: int, experts: int) -> None:
    assert_agrees(random_logits(rows, experts, device), GateRule(8, "softmax", True))
    assert_agrees(random_logits(rows, experts, device, torch.bfloat16), GateRule(8, "sigmoid"))


@devices
def test_k_may_be_every_expert(device: str) -> None:
    logits = random_logits(2, 128 if device == "cpu" else 512, device, ties=True)
    assert_agrees(logits, GateRule(logits.shape[1], "softmax"))


# ---- rows, strides, launches --------------------------------------------------------------------------------------------------------


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("count", [0, 3, 5, 9])
def test_rows_beyond_the_live_count_go_nowhere(device: str, gate: Gate, count: int) -> None:
    logits = random_logits(5, 16, device)
    live = torch.tensor([count], dtype=torch.int32, device=device)
    ids, weights = gate(logits, DEEPSEEK._replace(num_groups=4, topk_group=2, top_k=3), random_bias(16, device), live)
    all_ids, all_weights = gate(logits, DEEPSEEK._replace(num_groups=4, topk_group=2, top_k=3), random_bias(16, device))
    assert torch.equal(ids[:count], all_ids[:count])
    assert torch.equal(weights[:count], all_weights[:count])
    assert bool((ids[count:] == -1).all())
    assert bool((weights[count:] == 0).all())


@devices
def test_rows_and_columns_may_have_strides(device: str) -> None:
    wide = random_logits(4, 40, device)
    for logits in (wide[:, :24], wide[::2, 5:21], wide.t().contiguous().t(), wide[:, ::2]):
        assert_agrees(logits, GateRule(4, "softmax", True))


def test_without_rows_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_gate", None)
    ids, weights = fast.topk_gate(torch.empty(0, 8), GateRule(2, "softmax"))
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 2), torch.int32, (0, 2), torch.float32)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("rule", "parts"),
    [
        (GateRule(9, "softmax"), ("top_k is 9", "8 of the 8 experts")),
        (GateRule(0, "softmax"), ("top_k is 0",)),
        (GateRule(5, "softmax", num_groups=4, topk_group=2), ("top_k is 5", "4 of the 8 experts")),
        (GateRule(1, "softmax", num_groups=3), ("8 experts", "3 equal groups")),
        (GateRule(1, "softmax", num_groups=4, topk_group=5), ("4 equal groups", "5 stay")),
        (GateRule(1, "softmax", num_groups=4, topk_group=0), ("0 stay",)),
    ],
)
def test_rules_that_do_not_fit_are_refused(gate: Gate, rule: GateRule, parts: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=parts[0]) as error:
        gate(torch.zeros(2, 8), rule)
    for part in parts:
        assert part in str(error.value)


@devices
def test_both_trace_into_one_graph(device: str) -> None:
    logits, live = random_logits(4, 16, device), torch.tensor([3], dtype=torch.int32, device=device)
    rule = GateRule(3, "softmax", True)
    for gate in (reference.topk_gate, fast.topk_gate):
        for got, expected in zip(in_one_graph(gate)(logits, rule, None, live), reference.topk_gate(logits, rule, None, live), strict=True):
            torch.testing.assert_close(got, expected, rtol=WEIGHT_RTOL, atol=0)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_a_captured_graph_follows_the_live_count(device: str) -> None:
    logits, live = random_logits(64, 128, device), torch.tensor([64], dtype=torch.int32, device=device)
    fast.topk_gate(logits, DEEPSEEK, random_bias(128, device), live)
    graph, bias = torch.cuda.CUDAGraph(), random_bias(128, device)
    with torch.cuda.graph(graph):
        ids, weights = fast.topk_gate(logits, DEEPSEEK, bias, live)
    for count in (64, 10, 0, 33):
        live.fill_(count)
        graph.replay()
        assert bool((ids[:count] >= 0).all())
        assert bool((ids[count:] == -1).all())
        assert bool((weights[count:] == 0).all())


def test_the_scores_of_the_kernel_are_the_scores_of_the_rule() -> None:
    assert set(fast.SCORES) == set(SCORES)
    assert set(SCORES) == {name for part in get_args(GateScore) for name in get_args(part)}

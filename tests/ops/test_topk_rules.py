"""What the rules of the top-k gate say: the reference against an oracle, and both implementations on single rows."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_typed.ops.scores import Score
from moe_typed.ops.topk_gate import reference
from moe_typed.ops.topk_gate import triton as fast
from moe_typed.ops.topk_gate.spec import GateRule, GateScore
from tests.ops.support import WEIGHT_RTOL, devices, floats, int_rows, ints

# The interpreter computes infinities that the kernel throws away, and numpy warns of each.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCORES: tuple[GateScore, ...] = ("softmax", "sigmoid", "sqrt_softplus", "selected_softmax")
GROUP_SCORES: tuple[Literal["max", "top2_sum"], ...] = ("max", "top2_sum")
Gate: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
LLAMA4 = GateRule(1, "sigmoid")

# ---- the oracle: one row at a time, in Python's floats ------------------------------------------------------------------------------


def _score(row: list[float], e: int, kind: str) -> float:
    z = row[e]
    if kind == "softmax":
        peak = max(row)
        return math.exp(z - peak) / sum(math.exp(other - peak) for other in row)
    if kind == "sigmoid":
        return 1 / (1 + math.exp(-z))
    return math.sqrt(z if z > 20 else math.log1p(math.exp(z)))


def naive(row: list[float], rule: GateRule, bias: list[float] | None) -> tuple[list[int], list[float], float]:
    """Return ids, weights, and the smallest difference that decided between values which are not equal by construction."""
    experts = range(len(row))
    by_logit = rule.score == "selected_softmax" or (bias is None and (rule.num_groups == 1 or rule.group_score == "max"))
    values = [row[e] if by_logit else _score(row, e, rule.score) for e in experts]
    values = [v if bias is None else v + bias[e] for e, v in enumerate(values)]
    per_group = len(row) // rule.num_groups

    def of_group(g: int) -> float:
        ordered = sorted(values[g * per_group : (g + 1) * per_group], reverse=True)
        return ordered[0] if rule.group_score == "max" else sum(ordered[:2])

    groups = sorted(range(rule.num_groups), key=lambda g: -of_group(g))  # sorted is stable: the lowest first among equals
    candidates = [e for e in experts if e // per_group in groups[: rule.topk_group]]
    order = sorted(candidates, key=lambda e: -values[e])
    ids = order[: rule.top_k]

    near = [values[a] - values[b] for a, b in pairwise(order[: rule.top_k + 1])]
    if rule.num_groups > 1:
        near += [of_group(a) - of_group(b) for a, b in pairwise(groups)]
    if rule.score == "selected_softmax":
        weights = [_score([row[e] for e in ids], i, "softmax") for i in range(rule.top_k)]
    else:
        weights = [_score(row, e, rule.score) for e in ids]
    total = sum(weights) + 1e-20 if rule.renormalize else 1.0
    return ids, [w / total * rule.factor for w in weights], min((gap for gap in near if gap), default=1.0)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Tensor, GateRule, Tensor | None]:
    num_groups = draw(st.sampled_from([1, 1, 2, 4, 8]))
    per_group = draw(st.sampled_from([1, 2, 3, 8, 9, 16, 32]))
    topk_group = draw(st.integers(1, num_groups))
    candidates = topk_group * per_group
    top_k = draw(st.one_of(st.integers(1, min(candidates, 12)), st.just(candidates)))
    rule = GateRule(
        top_k,
        draw(st.sampled_from(SCORES)),
        draw(st.booleans()),
        draw(st.sampled_from([1.0, 2.5])),
        num_groups,
        topk_group,
        draw(st.sampled_from(GROUP_SCORES)),
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    logits = torch.randn(3, num_groups * per_group, generator=generator) * draw(st.sampled_from([1.0, 5.0]))
    if draw(st.booleans()):
        logits = logits.round()  # many ties
    bias = torch.randn(logits.shape[1], generator=generator) if draw(st.booleans()) else None
    return logits, rule, bias


@given(problems())
@settings(max_examples=300, deadline=None)
def test_the_reference_does_what_the_definition_says(problem: tuple[Tensor, GateRule, Tensor | None]) -> None:
    logits, rule, bias = problem
    ids, weights = reference.topk_gate(logits, rule, bias)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    for row in range(logits.shape[0]):
        expected, expected_weights, gap = naive(floats(logits[row]), rule, None if bias is None else floats(bias))
        if gap > 1e-5:  # else float32 may decide otherwise
            assert ints(ids[row]) == expected
            torch.testing.assert_close(weights[row], torch.tensor(expected_weights), rtol=2e-5, atol=0)


# ---- what the definition says of single rows ----------------------------------------------------------------------------------------


IMPLEMENTATIONS = pytest.mark.parametrize("gate", [reference.topk_gate, fast.topk_gate])


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_ties_go_to_the_lowest_id_and_the_zeros_are_equal(device: str, gate: Gate, dtype: torch.dtype) -> None:
    logits = torch.tensor([[-0.0, 0.0, -0.0, 1.0, 1.0, -1.0], [2.0] * 6], dtype=dtype, device=device)
    assert int_rows(gate(logits, GateRule(5, "softmax"))[0]) == [[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]]
    assert int_rows(gate(logits, GateRule(5, "sigmoid"), torch.zeros(6, device=device))[0]) == [[3, 4, 0, 1, 2], [0, 1, 2, 3, 4]]


@devices
@IMPLEMENTATIONS
def test_the_logits_decide_where_scores_round_to_equals(device: str, gate: Gate) -> None:
    logits = torch.tensor([[30.0, 40.0, -200.0, -190.0]], device=device)
    for score in get_args(Score):
        assert int_rows(gate(logits, GateRule(4, score))[0]) == [[1, 0, 3, 2]]


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("score", SCORES)
def test_a_bad_row_hurts_no_other(device: str, gate: Gate, score: GateScore) -> None:
    nan, inf = math.nan, math.inf
    good = [0.5, 2.0, 1.0, -1.0]
    logits = torch.tensor([good, [nan] * 4, [inf, -inf, nan, inf], [-inf] * 4, [nan, 2.0, 1.0, -1.0], good], device=device)
    for bias in (None, torch.tensor([0.0, 0.0, 0.0, 5.0], device=device)):
        rule = GateRule(2, score)
        ids, weights = gate(logits, rule, bias)
        alone_ids, alone_weights = gate(logits[:1], rule, bias)
        assert ints(ids[0]) == ints(ids[5]) == ints(alone_ids[0])
        torch.testing.assert_close(weights[[0, 5]], alone_weights.expand(2, -1))
        assert all(len(set(row)) == 2 and set(row) <= {0, 1, 2, 3} for row in int_rows(ids))
        assert bool(weights[1].isnan().all())
        assert bool(weights[4].isfinite().all())
        assert 0 not in ints(ids[4])


@devices
@IMPLEMENTATIONS
def test_a_nan_that_must_be_chosen_comes_last_and_weighs_nan(device: str, gate: Gate) -> None:
    logits = torch.tensor([[1.0, math.nan, 2.0]], device=device)
    ids, weights = gate(logits, GateRule(3, "sigmoid"))
    assert int_rows(ids) == [[2, 0, 1]]
    assert ints(weights[0].isnan()) == [0, 0, 1]


@devices
@IMPLEMENTATIONS
def test_the_bias_chooses_and_never_weighs(device: str, gate: Gate) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], device=device)
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0], device=device)
    for rule, expected in [(GateRule(2, "sigmoid"), torch.sigmoid(logits)), (GateRule(2, "softmax"), torch.softmax(logits, 1))]:
        ids, weights = gate(logits, rule, bias)
        assert int_rows(ids) == [[3, 1]]
        torch.testing.assert_close(weights, expected[:, [3, 1]])


@devices
@IMPLEMENTATIONS
def test_a_maximum_that_occurs_twice_counts_twice(device: str, gate: Gate) -> None:
    z = torch.tensor([0.7, 0.7, 0.1, 0.9, 0.4, 0.1], device=device)  # twice 0.7 beats 0.9 + 0.4
    rule = GateRule(2, "sigmoid", num_groups=2, topk_group=1, group_score="top2_sum")
    assert int_rows(gate(torch.logit(z)[None], rule)[0]) == [[0, 1]]
    assert int_rows(gate(torch.logit(z)[None], rule._replace(group_score="max"))[0]) == [[3, 4]]


@devices
@IMPLEMENTATIONS
def test_experts_of_dropped_groups_are_out_even_against_minus_infinity(device: str, gate: Gate) -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.5, 0.4]], device=device)
    assert int_rows(gate(logits, GateRule(2, "softmax", num_groups=2, topk_group=1))[0]) == [[0, 1]]


@devices
@IMPLEMENTATIONS
def test_llama4_weighs_the_largest_logit_by_its_sigmoid(device: str, gate: Gate) -> None:
    ids, weights = gate(torch.tensor([[-1.0, 40.0, 30.0, 41.0]], device=device), LLAMA4)
    assert (int_rows(ids), floats(weights[0])) == ([[3]], [1.0])


@devices
def test_weights_are_exact_at_large_logits(device: str) -> None:
    logits = torch.linspace(-80, 80, 64, device=device).view(2, 32)
    for score in get_args(Score):
        _, weights = fast.topk_gate(logits, GateRule(32, score))
        _, exact = reference.topk_gate(logits.double(), GateRule(32, score))
        torch.testing.assert_close(weights, exact, rtol=WEIGHT_RTOL, atol=1e-36)

"""Scored, grouped and hash rules against loops in plain Python; factors, NaN, live rows, refusals."""

import math
from collections.abc import Callable

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import BoundaryError, DeviceCount, GroupedTopK, LogicalIds, Pending, Routing, ScoredTopK, Settled, TopKSoftmax, debug
from moe_typed.ops.scores import Score
from moe_typed.routing import HashTopK, RoutedScaling, Selection
from moe_typed.routing.topk import GroupScore
from tests.routing.support import NAN, count, distinct, ids, random, vector

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
SCORES = pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
RENORMALIZE = pytest.mark.parametrize("renormalize", [True, False], ids=["renormalised", "as-is"])


def a_bias(experts: int, seed: int = 1) -> Tensor:
    return torch.randn(experts, generator=torch.Generator().manual_seed(seed))


def numbers(row: Tensor) -> list[float]:
    return [float(value) for value in row]


def scores_of(kind: Score, row: list[float]) -> list[float]:
    if kind == "sigmoid":
        return [1 / (1 + math.exp(-value)) for value in row]
    if kind == "sqrt_softplus":
        return [math.sqrt(max(value, 0.0) + math.log1p(math.exp(-abs(value)))) for value in row]
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def best(values: list[float], k: int) -> list[int]:
    """Return the k best places, the lower one first among equals."""
    return sorted(range(len(values)), key=lambda place: (-values[place], place))[:k]


@attrs.frozen(eq=False)
class Loop:
    """A rule as a loop over one row."""

    k: int
    score: Score
    renormalize: bool
    factor: float = 1.0
    bias: Tensor | None = None
    groups: int = 1
    kept: int = 1
    group_score: GroupScore = "max"

    def weigh(self, row: Tensor, chosen: list[int]) -> list[float]:
        scores = scores_of(self.score, numbers(row))
        total = math.fsum(scores[expert] for expert in chosen) if self.renormalize else 1.0
        return [scores[expert] / total * self.factor for expert in chosen]

    def choose(self, row: Tensor) -> list[int]:
        scores = scores_of(self.score, numbers(row))
        biased = scores if self.bias is None else [score + shift for score, shift in zip(scores, numbers(self.bias), strict=True)]
        size = len(scores) // self.groups
        members = [sorted(biased[group * size : (group + 1) * size], reverse=True) for group in range(self.groups)]
        stay = best([sum(values[:2]) if self.group_score == "top2_sum" else values[0] for values in members], self.kept)
        return best([value if expert // size in stay else -math.inf for expert, value in enumerate(biased)], self.k)

    def check(self, routing: Routing[LogicalIds], given: Tensor) -> None:
        chosen = [self.choose(row) for row in given]
        assert torch.equal(routing.topk_ids, ids(*chosen))
        expected = torch.tensor([self.weigh(row, experts) for row, experts in zip(given, chosen, strict=True)])
        torch.testing.assert_close(routing.topk_weights, expected, rtol=1e-5, atol=1e-8)


@DTYPES
@SCORES
@RENORMALIZE
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize(("experts", "k"), [(7, 7), (60, 4), (264, 8), (512, 32)])
def test_scored(experts: int, k: int, biased: bool, renormalize: bool, score: Score, dtype: torch.dtype) -> None:
    given, bias = distinct(4, experts).to(dtype), a_bias(experts) if biased else None
    with debug("strict"):
        routing = ScoredTopK(k, score, renormalize, Settled(), bias).route(given)
    Loop(k, score, renormalize, bias=bias).check(routing, given.float())
    assert (routing.space, routing.num_experts, routing.renormalized, routing.live) == (LogicalIds, experts, renormalize, 4)


@DTYPES
@SCORES
@pytest.mark.parametrize("biased", [False, True], ids=["", "biased"])
@pytest.mark.parametrize("group_score", ["max", "top2_sum"])
@pytest.mark.parametrize(("experts", "k", "groups", "kept"), [(160, 6, 8, 3), (264, 8, 8, 4), (60, 9, 12, 5), (6, 3, 6, 3)])
def test_grouped(experts: int, k: int, groups: int, kept: int, group_score: GroupScore, biased: bool, score: Score, dtype: torch.dtype) -> None:
    given, bias = distinct(4, experts).to(dtype), a_bias(experts) if biased else None
    with debug("strict"):
        routing = GroupedTopK(k, score, groups, kept, group_score, True, Settled(), bias).route(given)
    Loop(k, score, True, 1.0, bias, groups, kept, group_score).check(routing, given.float())


@DTYPES
@SCORES
@RENORMALIZE
@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
def test_hashed(token_dtype: torch.dtype, renormalize: bool, score: Score, dtype: torch.dtype) -> None:
    given, table, tokens = distinct(5, 60).to(dtype), random(9, 4, 60, lowest=0), torch.tensor([8, 0, 3, 3, 7], dtype=token_dtype)
    with debug("strict"):
        routing = HashTopK(table, score, renormalize, Pending(2.5)).route(given, tokens)
    assert torch.equal(routing.topk_ids, table[tokens])
    loop = Loop(4, score, renormalize)
    expected = [loop.weigh(row, [int(expert) for expert in table[token]]) for row, token in zip(given.float(), tokens, strict=True)]
    torch.testing.assert_close(routing.topk_weights, torch.tensor(expected), rtol=1e-5, atol=1e-8)
    assert (routing.space, routing.num_experts, routing.renormalized, routing.live) == (LogicalIds, 60, renormalize, 5)


def test_a_logit_far_out_has_a_score_all_the_same() -> None:
    given = torch.tensor([[1e30, 90.0, 0.0, -1e30]])
    weights = ScoredTopK(4, "sqrt_softplus", False, Settled()).route(given).topk_weights
    torch.testing.assert_close(weights, torch.tensor([[1e15, math.sqrt(90), math.sqrt(math.log(2)), 0.0]]), rtol=1e-6, atol=0)
    assert torch.equal(ScoredTopK(4, "sigmoid", False, Settled()).route(given).topk_weights, torch.tensor([[1.0, 1.0, 0.5, 0.0]]))


# ---- the factor ----------------------------------------------------------------------------------------------------------------------


def scored(scaling: RoutedScaling) -> Routing[LogicalIds]:
    return ScoredTopK(4, "sigmoid", True, scaling).route(distinct(3, 12))


def grouped(scaling: RoutedScaling) -> Routing[LogicalIds]:
    return GroupedTopK(4, "sigmoid", 4, 2, "top2_sum", False, scaling, a_bias(12)).route(distinct(3, 12))


def hashed(scaling: RoutedScaling) -> Routing[LogicalIds]:
    return HashTopK(random(5, 4, 12, lowest=0), "sqrt_softplus", True, scaling).route(distinct(3, 12), vector(0, 4, 2))


@pytest.mark.parametrize("route", [scored, grouped, hashed])
def test_a_settled_factor_is_in_the_weights_and_a_pending_one_is_not(route: Callable[[RoutedScaling], Routing[LogicalIds]]) -> None:
    settled, pending = Settled(2.5), Pending(2.5)
    plain, folded, later = route(Settled()), route(settled), route(pending)
    assert (folded.scaling, later.scaling) == (settled, pending)
    assert torch.equal(folded.topk_weights, plain.topk_weights * 2.5)
    assert torch.equal(later.topk_weights, plain.topk_weights)
    assert torch.equal(folded.topk_ids, plain.topk_ids)


# ---- ties and NaN ----------------------------------------------------------------------------------------------------------------------

PLAIN: list[Selection[RoutedScaling]] = [
    ScoredTopK(3, "softmax", False, Settled()),
    ScoredTopK(3, "sigmoid", True, Settled()),
    ScoredTopK(3, "sqrt_softplus", False, Settled()),
    ScoredTopK(3, "sigmoid", False, Settled(), torch.zeros(8)),
    GroupedTopK(3, "softmax", 4, 2, "max", False, Settled()),
    GroupedTopK(3, "sigmoid", 4, 2, "top2_sum", True, Settled(), torch.zeros(8)),
    TopKSoftmax(3),
]
RULES = pytest.mark.parametrize("rule", PLAIN, ids=lambda rule: f"{type(rule).__name__}-{rule.gate.rule.score}-{rule.gate.bias is not None}")


@DTYPES
@RULES
def test_the_lowest_id_goes_first_among_equals(rule: Selection[RoutedScaling], dtype: torch.dtype) -> None:
    tied = torch.tensor([[0.0] * 8, [0.0, -0.0, 0.0, -0.0] * 2, [1.0, 1.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0]], dtype=dtype)
    assert torch.equal(rule.route(tied).topk_ids, ids([0, 1, 2], [0, 1, 2], [2, 3, 4]))


def test_equals_that_a_bias_makes_go_by_id_too() -> None:
    given, bias = torch.tensor([[0.0, 0.0, 0.0, 0.0]]), torch.tensor([0.25, 0.5, 0.5, 0.25])
    assert torch.equal(ScoredTopK(3, "sigmoid", False, Settled(), bias).route(given).topk_ids, ids([1, 2, 0]))


def test_two_equal_scores_count_twice_in_their_group() -> None:
    given = torch.logit(torch.tensor([[0.5, 0.5, 0.75, 0.125]]))  # 1.0 beats 0.875; counted once, it would not
    assert torch.equal(GroupedTopK(2, "sigmoid", 2, 1, "top2_sum", False, Settled()).route(given).topk_ids, ids([0, 1]))
    assert torch.equal(GroupedTopK(2, "sigmoid", 2, 1, "max", False, Settled()).route(given).topk_ids, ids([2, 3]))


@RULES
def test_a_nan_ranks_last_and_stays_in_its_row(rule: Selection[RoutedScaling]) -> None:
    given = distinct(4, 8)
    given[1, 5] = given[2] = NAN
    with debug("layout"):
        routing, without = rule.route(given), rule.route(given.nan_to_num(nan=-math.inf))
    others = torch.tensor([0, 1, 3])
    assert torch.equal(routing.topk_ids[others], without.topk_ids[others])
    torch.testing.assert_close(routing.topk_weights[others], without.topk_weights[others], rtol=1e-6, atol=0)
    assert bool((routing.topk_ids[1] != 5).all())
    assert torch.equal(routing.topk_ids[2], vector(0, 1, 2))
    assert bool(routing.topk_weights[2].isnan().all())


def test_a_nan_that_is_chosen_shows() -> None:
    given = torch.tensor([[0.0, NAN, 1.0], [0.0, 1.0, 2.0]])
    with debug("off"):
        routing = ScoredTopK(3, "sigmoid", False, Settled()).route(given)
    assert torch.equal(routing.topk_ids, ids([2, 0, 1], [2, 1, 0]))
    assert torch.equal(routing.topk_weights.isnan(), torch.tensor([[False, False, True], [False, False, False]]))
    with debug("values"), pytest.raises(BoundaryError, match="holds an infinity or a NaN"):
        ScoredTopK(3, "sigmoid", False, Settled()).route(given)


# ---- live rows -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("number", [0, 1, 3, 4])
@RULES
def test_padding_rows_go_nowhere_whatever_their_logits(rule: Selection[RoutedScaling], number: int, on_device: bool) -> None:
    given = distinct(4, 8)
    whole = rule.route(given)
    given[number:] = NAN
    with debug("strict"):
        routing = rule.route(given, DeviceCount(count(number)) if on_device else number)
    assert torch.equal(routing.topk_ids[:number], whole.topk_ids[:number])
    assert torch.equal(routing.topk_weights[:number], whole.topk_weights[:number])
    assert bool((routing.topk_ids[number:] == -1).all())
    assert bool((routing.topk_weights[number:] == 0).all())


@pytest.mark.parametrize("live", [2, DeviceCount(count(2))], ids=["host", "device"])
def test_padding_rows_of_a_hash_rule_have_no_token(live: int | DeviceCount) -> None:
    rule, given = HashTopK(random(5, 2, 8, lowest=0), "sigmoid", True, Settled()), distinct(4, 8)
    with debug("strict"):
        routing = rule.route(given, vector(4, 1, 99, -99), live)
    alone = rule.route(given[:2], vector(4, 1))
    assert torch.equal(routing.topk_ids, torch.cat((alone.topk_ids, ids([-1, -1], [-1, -1]))))
    assert torch.equal(routing.topk_weights, torch.cat((alone.topk_weights, torch.zeros(2, 2))))
    assert routing.live is live


# ---- refused -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), r"token ids must be int32 or int64 \(2,\); got torch.int64 \[3\]"),
        (torch.zeros(2, 1, dtype=torch.int64), r"token ids must be int32 or int64 \(2,\); got torch.int64 \[2, 1\]"),
        (torch.zeros(2), r"token ids must be int32 or int64 \(2,\); got torch.float32 \[2\]"),
    ],
)
def test_other_token_ids_are_refused(tokens: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HashTopK(random(5, 2, 8, lowest=0), "sigmoid", True, Settled()).route(distinct(2, 8), tokens)


def test_hash_logits_that_are_no_floating_matrix_are_refused() -> None:
    for wrong in (torch.zeros(2), torch.zeros(2, 8, dtype=torch.int32)):
        with pytest.raises(ValueError, match="router logits must be a floating matrix"):
            HashTopK(random(5, 2, 8, lowest=0), "sigmoid", True, Settled()).route(wrong, vector(0, 0))


def test_a_bias_over_other_experts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the correction bias is over \[7\] experts, but the router logits have 8"):
        ScoredTopK(2, "sigmoid", True, Settled(), a_bias(7)).route(distinct(1, 8))


def test_a_table_of_the_default_integer_dtype_raises() -> None:
    with debug("layout"), pytest.raises(BoundaryError, match="int64") as raised:
        HashTopK(torch.zeros(5, 2, dtype=torch.int64), "sigmoid", True, Settled())
    assert (raised.value.boundary, raised.value.field) == ("HashTopK", "table")


def test_a_table_over_more_experts_than_there_are_raises() -> None:
    """Scores of such an expert do not exist."""
    with pytest.raises((IndexError, RuntimeError)):
        HashTopK(ids([0, 8]), "sigmoid", True, Settled()).route(distinct(1, 8), vector(0))

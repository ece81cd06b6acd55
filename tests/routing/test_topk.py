"""Selection rules against loops in plain Python, and against the routers that transformers publishes for the same models."""

import importlib
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor

from moe_typed import DeviceCount, GroupedTopK, LogicalIds, Pending, Routing, ScoredTopK, Settled, SoftmaxTopK, TopKSoftmax, debug
from moe_typed.routing import HashTopK, RoutedScaling, Selection
from tests.routing.support import distinct


def logits(rows: int, experts: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)) * 3


def numbers(row: Tensor) -> list[float]:
    return [float(value) for value in row]


def best(scores: list[float], k: int) -> list[int]:
    """Return the k best places, the lower one first among equals."""
    return sorted(range(len(scores)), key=lambda place: (-scores[place], place))[:k]


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(value - max(row)) for value in row]
    return [power / sum(powers) for power in powers]


def check(routing: Routing[LogicalIds], expected: list[tuple[list[int], list[float]]]) -> None:
    assert routing.topk_ids.dtype == torch.int32
    assert routing.topk_weights.dtype == torch.float32
    for row, (ids, weights) in enumerate(expected):
        assert [int(expert) for expert in routing.topk_ids[row]] == ids
        assert numbers(routing.topk_weights[row]) == pytest.approx(weights, rel=1e-5, abs=1e-7)


# ---- loops -------------------------------------------------------------------------------------------------------------------------


def deepseek(top_k: int, groups: int, kept: int, experts: int = 4) -> GroupedTopK[Pending]:
    return GroupedTopK(top_k, "sigmoid", groups, kept, "top2_sum", renormalize=True, scaling=Pending(1.0), bias=torch.zeros(experts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 8), (5, 1), (1, 1)])
def test_softmax_then_topk(experts: int, k: int, renormalize: bool, dtype: torch.dtype) -> None:
    given = logits(6, experts).to(dtype)
    expected: list[tuple[list[int], list[float]]] = []
    for row in given:
        probabilities = softmax(numbers(row))
        ids = best(probabilities, k)
        total = sum(probabilities[expert] for expert in ids) if renormalize else 1.0
        expected.append((ids, [probabilities[expert] / total for expert in ids]))
    with debug("strict"):
        routing = SoftmaxTopK(k, renormalize).route(given)
    check(routing, expected)
    assert (routing.space, routing.num_experts, routing.renormalized, routing.live) == (LogicalIds, experts, renormalize, 6)
    assert isinstance(routing.scaling, Settled)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 8), (5, 1), (1, 1)])
def test_topk_then_softmax(experts: int, k: int) -> None:
    given = logits(6, experts)
    expected: list[tuple[list[int], list[float]]] = []
    for row in given:
        ids = best(numbers(row), k)
        expected.append((ids, softmax([float(row[expert]) for expert in ids])))
    with debug("strict"):
        routing = TopKSoftmax(k).route(given)
    check(routing, expected)
    assert routing.renormalized
    assert isinstance(routing.scaling, Settled)


def grouped_loop(row: Tensor, bias: Tensor, *, k: int, groups: int, kept: int, renormalize: bool) -> tuple[list[int], list[float]]:
    scores = [1 / (1 + math.exp(-value)) for value in numbers(row)]
    biased = [score + float(shift) for score, shift in zip(scores, bias, strict=True)]
    size = len(scores) // groups
    group_scores = [sum(sorted(biased[group * size : (group + 1) * size])[-2:]) for group in range(groups)]
    allowed = best(group_scores, kept)
    inside = [value if expert // size in allowed else -math.inf for expert, value in enumerate(biased)]
    ids = best(inside, k)
    total = sum(scores[expert] for expert in ids) + 1e-20 if renormalize else 1.0
    return ids, [scores[expert] / total for expert in ids]


GROUPED = pytest.mark.parametrize(
    ("experts", "k", "groups", "kept"), [(16, 4, 4, 2), (16, 8, 4, 2), (8, 2, 1, 1), (8, 3, 8, 4), (4, 4, 2, 2), (1, 1, 1, 1)]
)


@GROUPED
@pytest.mark.parametrize("shift", [0.0, -3.0, 3.0])
@pytest.mark.parametrize("renormalize", [True, False])
def test_grouped_sigmoid(experts: int, k: int, groups: int, kept: int, shift: float, renormalize: bool) -> None:
    given = logits(12, experts)
    bias = logits(1, experts, seed=1)[0] / 3 + shift
    expected = [grouped_loop(row, bias, k=k, groups=groups, kept=kept, renormalize=renormalize) for row in given]
    with debug("strict"):
        routing = GroupedTopK(k, "sigmoid", groups, kept, "top2_sum", renormalize, Pending(2.5), bias).route(given)
    check(routing, expected)
    assert isinstance(routing.scaling, Pending)
    assert routing.scaling.factor == 2.5


# ---- published routers -----------------------------------------------------------------------------------------------------------------


def published(module: str, name: str, **config: object) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return (weights, ids) of a router of transformers whose logits are its first input."""
    pytest.importorskip("transformers")
    router_class = vars(importlib.import_module(f"transformers.models.{module}.modeling_{module}"))[name]
    router = cast("torch.nn.Module", router_class(SimpleNamespace(**config)))
    for key, parameter in [*router.named_parameters(), *router.named_buffers()]:
        if key == "weight":
            torch.nn.init.eye_(parameter)

    def route(given: Tensor, *more: Tensor) -> tuple[Tensor, Tensor]:
        for parameter in router.parameters():
            parameter.data = parameter.data.to(given.dtype)
        for key, buffer in (("bias", "e_score_correction_bias"), ("table", "tid2eid")):
            if key in config:
                router.get_buffer(buffer).copy_(cast("Tensor", config[key]))
        with torch.no_grad():
            _, weights, ids = router(given, *more)
        return weights, ids

    return route


def same_routes(routing: Routing[LogicalIds, RoutedScaling], weights: Tensor, ids: Tensor, factor: float = 1.0, rtol: float = 1e-5) -> None:
    """Compare routes by expert: some published routers leave their order open."""
    mine, theirs = routing.topk_ids.long().argsort(1), ids.argsort(1)
    assert torch.equal(routing.topk_ids.long().gather(1, mine), ids.gather(1, theirs))
    torch.testing.assert_close(routing.topk_weights.gather(1, mine) * factor, weights.gather(1, theirs).float(), rtol=rtol, atol=1e-7)


def many(experts: int, k: int) -> dict[str, int]:
    return {"num_experts": experts, "num_local_experts": experts, "hidden_size": experts, "num_experts_per_tok": k}


SIZES = many(16, 4)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("module", "name", "rule", "config"),
    [
        ("mixtral", "MixtralTopKRouter", SoftmaxTopK(4, renormalize=True), {}),
        ("qwen2_moe", "Qwen2MoeTopKRouter", SoftmaxTopK(4, renormalize=False), {"norm_topk_prob": False}),
        ("qwen3_moe", "Qwen3MoeTopKRouter", SoftmaxTopK(4, renormalize=True), {"norm_topk_prob": True}),
        ("olmoe", "OlmoeTopKRouter", SoftmaxTopK(4, renormalize=False), {"norm_topk_prob": False}),
        ("gpt_oss", "GptOssTopKRouter", TopKSoftmax(4), {}),
    ],
    ids=["mixtral", "qwen2-moe", "qwen3-moe", "olmoe", "gpt-oss"],
)
def test_published_softmax_routers(module: str, name: str, rule: Selection[Settled], config: dict[str, object], seed: int) -> None:
    given = logits(32, 16, seed)
    weights, ids = published(module, name, **SIZES, **config)(given)
    routing = rule.route(given)
    assert torch.equal(routing.topk_ids.long(), ids)
    same_routes(routing, weights, ids)
    for dtype, rounding in ((torch.bfloat16, 2**-8), (torch.float16, 2**-11)):  # some weigh in the dtype of the logits
        given = distinct(32, 16, seed).to(dtype)
        same_routes(rule.route(given), *published(module, name, **SIZES, **config)(given), rtol=3 * rounding)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shift", [0.0, -5.0])  # all biased scores below zero: experts of dropped groups must still be out
@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (8, 4), (1, 1)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_the_published_deepseek_v3_router(groups: int, kept: int, shift: float, renormalize: bool, seed: int) -> None:
    given = logits(32, 16, seed)
    bias = logits(1, 16, seed + 10)[0] / 3 + shift
    route = published(
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        **SIZES,
        routed_scaling_factor=2.5,
        n_group=groups,
        topk_group=kept,
        norm_topk_prob=renormalize,
        bias=bias,
    )
    weights, ids = route(given)
    same_routes(GroupedTopK(4, "sigmoid", groups, kept, "top2_sum", renormalize, Pending(2.5), bias).route(given), weights, ids, factor=2.5)


@DTYPES
@pytest.mark.parametrize(("module", "name"), [("deepseek_v3", "DeepseekV3TopkRouter"), ("glm4_moe", "Glm4MoeTopkRouter")])
def test_published_grouped_routers_with_a_folded_factor(module: str, name: str, dtype: torch.dtype) -> None:
    given, bias = distinct(32, 96).to(dtype), logits(1, 96, 1)[0] / 3
    groups = {"n_group": 8, "topk_group": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
    weights, ids = published(module, name, **many(96, 12), **groups, bias=bias)(given)
    same_routes(GroupedTopK(12, "sigmoid", 8, 3, "top2_sum", True, Settled(2.5), bias).route(given), weights, ids)


@DTYPES
def test_the_published_deepseek_v2_router(dtype: torch.dtype) -> None:
    given = distinct(32, 160).to(dtype)
    config = {**many(160, 6), "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0}
    weights, ids = published("deepseek_v2", "DeepseekV2TopkRouter", **config, topk_method="group_limited_greedy")(given)
    same_routes(GroupedTopK(6, "softmax", 8, 3, "max", False, Settled(16.0)).route(given), weights, ids)
    weights, ids = published("deepseek_v2", "DeepseekV2TopkRouter", **config, topk_method="greedy")(given)
    same_routes(ScoredTopK(6, "softmax", False, Settled(16.0)).route(given), weights, ids)


def test_the_published_deepseek_v4_routers() -> None:
    given, bias = distinct(32, 384), logits(1, 384, 1)[0] / 3
    config = {**many(384, 6), "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5}
    weights, ids = published("deepseek_v4", "DeepseekV4TopKRouter", **config, bias=bias)(given)
    same_routes(ScoredTopK(6, "sqrt_softplus", True, Settled(1.5), bias).route(given), weights, ids)

    table = torch.stack([torch.randperm(384, generator=torch.Generator().manual_seed(token))[:6] for token in range(50)])
    tokens = torch.arange(32) * 7 % 50
    weights, ids = published("deepseek_v4", "DeepseekV4HashRouter", **config, vocab_size=50, table=table)(given, tokens)
    same_routes(HashTopK(table.to(torch.int32), "sqrt_softplus", True, Settled(1.5)).route(given, tokens), weights, ids)


@DTYPES
def test_the_published_llama_4_router(dtype: torch.dtype) -> None:
    pytest.importorskip("transformers")
    router_class = vars(importlib.import_module("transformers.models.llama4.modeling_llama4"))["Llama4Router"]
    router = cast("torch.nn.Linear", router_class(SimpleNamespace(**many(16, 1))))
    torch.nn.init.eye_(router.weight)
    given = distinct(32, 16).to(dtype)
    with torch.no_grad():
        scores, _ = cast("tuple[Tensor, Tensor]", router.to(dtype)(given))
    routing = ScoredTopK(1, "sigmoid", False, Settled()).route(given)
    found = torch.zeros(32, 16).scatter(1, routing.topk_ids.long(), routing.topk_weights)
    assert torch.equal(found.to(dtype), scores)


# ---- ties, sizes, refusals -----------------------------------------------------------------------------------------------------------


RULES = [
    pytest.param(SoftmaxTopK(2, renormalize=True), id="softmax"),
    pytest.param(TopKSoftmax(2), id="topk"),
    pytest.param(GroupedTopK(2, "sigmoid", 2, 1, "top2_sum", True, Pending(1.0), torch.zeros(6)), id="grouped"),
]


@pytest.mark.parametrize("rule", RULES)
def test_ties_go_to_the_lowest_id(rule: Selection[RoutedScaling]) -> None:
    assert torch.equal(rule.route(torch.zeros(3, 6)).topk_ids, torch.tensor([[0, 1]] * 3, dtype=torch.int32))
    given = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 2.0]])
    assert [int(expert) for expert in rule.route(given).topk_ids[0]] == ([3, 5] if isinstance(rule, GroupedTopK) else [1, 3])


def test_ties_among_many_equal_scores() -> None:
    scores = torch.zeros(4, 4096)
    scores[:, 4000] = 1
    assert torch.equal(TopKSoftmax(3).route(scores).topk_ids, torch.tensor([[4000, 0, 1]] * 4, dtype=torch.int32))


@pytest.mark.parametrize("rule", RULES)
def test_no_rows(rule: Selection[RoutedScaling]) -> None:
    with debug("strict"):
        routing = rule.route(torch.zeros(0, 6))
    assert routing.topk_ids.shape == routing.topk_weights.shape == (0, 2)
    assert routing.live == 0


def test_weights_of_a_renormalised_row_sum_to_one_and_a_row_of_zeros_divides_by_no_zero() -> None:
    rule = GroupedTopK(2, "sigmoid", 1, 1, "top2_sum", True, Pending(1.0), torch.zeros(4))
    weights = rule.route(torch.tensor([[-1e30] * 4, [1.0, 2.0, 3.0, 4.0]])).topk_weights
    assert torch.equal(weights[0], torch.zeros(2))
    assert float(weights[1].sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("live", [2, 0, DeviceCount(torch.tensor([2], dtype=torch.int32))], ids=["host", "none", "device"])
def test_the_live_count_travels_with_the_routing(live: int | DeviceCount) -> None:
    assert SoftmaxTopK(1, renormalize=True).route(logits(4, 3), live).live is live


@pytest.mark.parametrize(
    ("rule", "shape", "message"),
    [
        (SoftmaxTopK(3, renormalize=True), (2, 2), "top_k is 3, but 2 of the 2 experts can be chosen"),
        (TopKSoftmax(0), (2, 2), "top_k is 0, but 2 of the 2 experts can be chosen"),
        (TopKSoftmax(1), (2,), r"must be a floating matrix \(rows, experts\); got torch.float32 \[2\]"),
        (
            deepseek(1, 3, 1),
            (2, 4),
            "4 experts do not fall into 3 equal groups of which 1 stay",
        ),
        (
            deepseek(1, 2, 3),
            (2, 4),
            "4 experts do not fall into 2 equal groups of which 3 stay",
        ),
        (
            deepseek(1, 2, 0),
            (2, 4),
            "4 experts do not fall into 2 equal groups of which 0 stay",
        ),
        (
            deepseek(1, 2, 1, experts=5),
            (2, 4),
            r"the correction bias is over \[5\] experts, but the router logits have 4",
        ),
        (deepseek(3, 2, 1), (2, 4), "top_k is 3, but 2 of the 4 experts can be chosen"),
    ],
)
def test_refused(rule: Selection[RoutedScaling], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rule.route(torch.zeros(shape))


def test_logits_of_whole_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a floating matrix \(rows, experts\); got torch.int64 \[2, 3\]"):
        TopKSoftmax(1).route(torch.zeros(2, 3, dtype=torch.int64))

"""The kernels of routing against the functions without them: through the routings, in graphs of both kinds."""

from collections.abc import Callable
from typing import TypeAlias, cast

import pytest
import torch
from torch import Tensor

from moe_typed import DeviceCount, GroupedTopK, LocalSinkIds, LogicalIds, Pending, Routing, ScoredTopK, Settled, SoftmaxTopK, TopKSoftmax, debug
from moe_typed.routing import (
    HashTopK,
    Ids,
    PhysicalIds,
    RankSharedSlots,
    RoutedScaling,
    Selection,
    SharedSlots,
    append_rank_shared,
    append_shared,
    fused,
    in_order,
    localize,
    mask_padded,
)
from tests.ops.support import WEIGHT_RTOL, devices, dtypes, in_one_graph, on_cuda
from tests.routing.support import count, random, same

# The interpreter computes infinities that the kernel throws away, and numpy warns of each.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ROWS = (0, 1, 64, 4096) if torch.cuda.is_available() else (0, 1, 5)
Rule: TypeAlias = Callable[[Tensor], Selection[RoutedScaling]]
Path: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


RULES: dict[str, tuple[int, Rule]] = {
    "mixtral": (8, lambda _: SoftmaxTopK(2, renormalize=True)),
    "olmoe": (64, lambda _: SoftmaxTopK(8, renormalize=False)),
    "gpt-oss": (128, lambda _: TopKSoftmax(4)),
    "llama-4": (16, lambda _: ScoredTopK(1, "sigmoid", False, Settled())),
    "softmax-with-bias": (60, lambda bias: ScoredTopK(4, "softmax", True, Pending(2.5), bias)),
    "deepseek-v2": (160, lambda _: GroupedTopK(6, "softmax", 8, 3, "max", False, Settled(16.0))),
    "deepseek-v3": (256, lambda bias: GroupedTopK(8, "sigmoid", 8, 4, "top2_sum", True, Pending(2.5), bias)),
    "deepseek-v4": (384, lambda bias: ScoredTopK(6, "sqrt_softplus", True, Settled(1.5), bias)),
    "many": (512, lambda bias: ScoredTopK(32, "sigmoid", True, Settled(2.5), bias)),
}
NAMES = pytest.mark.parametrize("name", RULES)
LIVE = pytest.mark.parametrize("live", ["all", "host", "device"])


def limit(live: str, rows: int, device: str) -> int | DeviceCount | None:
    return {"all": None, "host": rows // 2, "device": DeviceCount(count(rows // 2).to(device))}[live]


def decided(rule: Selection[RoutedScaling], logits: Tensor) -> Tensor:
    """Return which rows do not hang on how a score is rounded: no two sums of score and bias, or of two scores, lie within that of each other."""
    told, _, bias = rule.gate
    if told.ranks_logits(bias is not None):
        return torch.ones(logits.shape[0], dtype=torch.bool, device=logits.device)
    z = logits.double()
    scores = torch.softmax(z, 1) if told.score == "softmax" else torch.sigmoid(z)
    if told.score == "sqrt_softplus":
        scores = torch.nn.functional.softplus(z).sqrt()
    value = scores if bias is None else scores + bias
    best = value.view(logits.shape[0], told.num_groups, logits.shape[1] // told.num_groups).topk(2, 2).values.sum(2)
    return ~(_is_close(value) | (_is_close(best) if told.num_groups > 1 else False))


def _is_close(value: Tensor) -> Tensor:
    ordered = value.sort(1).values
    return (ordered.diff(dim=1) < 1e-6).any(1)


@NAMES
@LIVE
@dtypes("float32", "float16", "bfloat16")
def test_a_fused_rule_is_the_rule(device: str, dtype: torch.dtype, live: str, name: str) -> None:
    experts, make = RULES[name]
    rule = make(randn(experts, seed=1).to(device))
    for rows in ROWS:
        logits = (3 * randn(rows, experts, seed=rows)).to(dtype).to(device)
        counted = limit(live, rows, device)
        with debug("strict"):
            expected, found = rule.route(logits, counted), fused.FusedRouter(rule).route(logits, counted)
        clear = decided(rule, logits)
        assert int(clear.sum()) >= rows // 2
        assert torch.equal(found.topk_ids[clear], expected.topk_ids[clear])
        torch.testing.assert_close(found.topk_weights[clear], expected.topk_weights[clear], rtol=WEIGHT_RTOL, atol=1e-8)
        assert (repr(found.scaling), found.renormalized, found.live) == (repr(expected.scaling), expected.renormalized, expected.live)
        assert (found.space, found.num_experts, found.num_shared) == (LogicalIds, experts, 0)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("token_dtype", [torch.int32, torch.int64])
@LIVE
@dtypes("float32", "float16", "bfloat16")
def test_a_fused_hash_rule_is_the_rule(device: str, dtype: torch.dtype, live: str, token_dtype: torch.dtype, score: str) -> None:
    table = random(100, 6, 384, lowest=0).to(device)
    rule = HashTopK(table, "softmax" if score == "softmax" else "sigmoid" if score == "sigmoid" else "sqrt_softplus", True, Settled(1.5))
    for rows in ROWS:
        logits = (3 * randn(rows, 384, seed=rows)).to(dtype).to(device)
        tokens = (torch.arange(rows) * 7 % 100).to(token_dtype).to(device)
        counted = limit(live, rows, device)
        with debug("strict"):
            expected, found = rule.route(logits, tokens, counted), fused.FusedHashRouter(rule).route(logits, tokens, counted)
        assert torch.equal(found.topk_ids, expected.topk_ids)
        torch.testing.assert_close(found.topk_weights, expected.topk_weights, rtol=WEIGHT_RTOL, atol=1e-8)
        assert (found.scaling, found.live, found.num_experts) == (rule.scaling, expected.live, 384)


def routed(rows: int, k: int, experts: int, device: str, live: int | DeviceCount | None = None) -> Routing[LogicalIds, Pending]:
    topk_ids, weights = random(rows, k, experts).to(device), torch.rand(rows, k, generator=torch.Generator().manual_seed(0)).to(device)
    return Routing(topk_ids, weights, LogicalIds, experts, Pending(2.5), True, rows if live is None else live)


@LIVE
@devices
@pytest.mark.parametrize(
    ("k", "experts", "ep_size", "ep_rank", "shared"), [(8, 256, 8, 7, 1), (7, 264, 8, 3, 1), (16, 128, 4, 2, 2), (2, 8, 2, 0, 0)]
)
def test_fused_columns_are_the_columns(device: str, k: int, experts: int, ep_size: int, ep_rank: int, shared: int, live: str) -> None:
    own, everywhere = RankSharedSlots(shared, experts // ep_size, ep_rank, ep_size, Pending(2.5)), SharedSlots(shared, Pending(2.5))
    for rows in ROWS:
        routing = routed(rows, k, experts, device, limit(live, rows, device))
        placed = in_order(routing)
        with debug("strict"):
            pairs = (
                (fused.append_shared(routing, everywhere), append_shared(routing, everywhere), routing),
                (fused.append_rank_shared(placed, own), append_rank_shared(placed, own), placed),
            )
        for found, expected, given in pairs:
            same(found, expected.topk_ids, expected.topk_weights)
            assert (found.space, found.num_experts, found.live) == (expected.space, expected.num_experts, expected.live)
            assert (found.num_shared, found.first_shared) == (expected.num_shared, expected.first_shared)
            assert (found is given) == (shared == 0)


@devices
@pytest.mark.parametrize("live", [None, 0, 3])
@pytest.mark.parametrize(("first", "here"), [(0, 8), (2, 3)])
def test_fused_localize_is_localize(device: str, live: int | None, first: int, here: int) -> None:
    ids = torch.randint(-1, 8, (5, 2), generator=torch.Generator().manual_seed(1), dtype=torch.int32).to(device)
    routing = Routing(ids, torch.rand(5, 2).to(device), LogicalIds, 8, Settled(), True, 5 if live is None else live)
    found, expected = fused.localize(routing, first, here), localize(routing, first, here)
    assert torch.equal(found.topk_ids, expected.topk_ids)
    assert torch.equal(found.topk_weights, expected.topk_weights)
    assert (found.space, found.num_experts, found.live) == (expected.space, expected.num_experts, expected.live)


def test_fused_columns_are_refused_as_the_columns_are() -> None:
    routing, other = routed(1, 2, 4, "cpu"), cast("RoutedScaling", Settled())
    with pytest.raises(ValueError, match="the slots were made for routings that are Settled"):
        fused.append_shared(cast("Routing[LogicalIds]", routing), SharedSlots(1, other))
    with pytest.raises(ValueError, match="with 3 routed experts each, but the routing is over 4"):
        fused.append_rank_shared(in_order(routing), RankSharedSlots(1, 3, 0, 2, Pending(2.5)))
    with pytest.raises(ValueError, match="have no sentinel"):
        fused.mask_padded(routing.moved(routing.topk_ids, routing.topk_weights, PhysicalIds, 4), count(1))


@LIVE
@devices
@pytest.mark.parametrize("count_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("space", [LogicalIds, LocalSinkIds])
def test_a_fused_mask_is_the_mask(device: str, space: type[Ids], count_dtype: torch.dtype, live: str) -> None:
    for rows in ROWS:
        given = routed(rows, 5, 16, device, limit(live, rows, device))
        routing = given.moved(given.topk_ids.clamp(min=0), given.topk_weights, space, 16)
        for number in {0, rows // 3, rows}:
            counted = count(number, count_dtype).to(device)
            with debug("strict"):
                found, expected = fused.mask_padded(routing, counted), mask_padded(routing, counted)
            same(found, expected.topk_ids, expected.topk_weights)
            assert isinstance(found.live, DeviceCount)
            assert isinstance(expected.live, DeviceCount)
            assert torch.equal(found.live.count, expected.live.count)


# ---- graphs ----------------------------------------------------------------------------------------------------------------------------

SLOTS = RankSharedSlots(1, 16, 3, 4, Pending(2.5))


def with_kernels(logits: Tensor, bias: Tensor, live: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    rule = GroupedTopK(6, "sigmoid", 8, 4, "top2_sum", True, Pending(2.5), bias)
    placed = in_order(fused.FusedRouter(rule).route(logits, DeviceCount(live)))
    routing = fused.mask_padded(fused.append_rank_shared(placed, SLOTS), masked)
    return routing.topk_ids, routing.topk_weights


def without_kernels(logits: Tensor, bias: Tensor, live: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    rule = GroupedTopK(6, "sigmoid", 8, 4, "top2_sum", True, Pending(2.5), bias)
    routing = mask_padded(append_rank_shared(in_order(rule.route(logits, DeviceCount(live))), SLOTS), masked)
    return routing.topk_ids, routing.topk_weights


def check(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=WEIGHT_RTOL, atol=1e-8)


@devices
@pytest.mark.parametrize("path", [with_kernels, without_kernels])
@pytest.mark.parametrize("level", ["off", "layout"])
def test_from_logits_to_slots_in_one_graph(device: str, path: Path, level: str) -> None:
    logits, bias = randn(9, 64).to(device), randn(64, seed=1).to(device)
    live, masked = count(7).to(device), count(5, torch.int64).to(device)
    traced = in_one_graph(path)
    with debug("layout" if level == "layout" else "off"):
        for number in (5, 9, 0):
            masked.fill_(number)
            check(traced(logits, bias, live, masked), without_kernels(logits, bias, live, masked))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("path", [with_kernels, without_kernels])
@pytest.mark.parametrize("rows", [1, 64, 4096])
def test_a_captured_graph_follows_both_counts(device: str, path: Path, rows: int) -> None:
    logits, bias = randn(rows, 64).to(device), randn(64, seed=1).to(device)
    live, masked = count(rows).to(device), count(rows, torch.int64).to(device)
    path(logits, bias, live, masked)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = path(logits, bias, live, masked)
    for one, other in ((rows, rows), (rows // 2, rows), (rows, rows // 3), (0, rows), (rows, 0)):
        live.fill_(one)
        masked.fill_(other)
        graph.replay()
        assert torch.equal((found[0] >= 0).any(1), torch.arange(rows, device=device) < min(one, other))
        clear = decided(GroupedTopK(6, "sigmoid", 8, 4, "top2_sum", True, Pending(2.5), bias), logits)
        expected = without_kernels(logits, bias, live, masked)
        check((found[0][clear], found[1][clear]), (expected[0][clear], expected[1][clear]))

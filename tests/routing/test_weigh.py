"""The router weight on the input: Llama 4's layer."""

import math

import pytest
import torch
from torch import Tensor

from moe_typed import (
    Bf16Rows,
    DeviceCount,
    Experts,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    LocalSinkIds,
    ScoredTopK,
    Settled,
    StandardDispatcher,
    debug,
    fp32_as_is,
    localize,
    prepare_reference,
)
from moe_typed.routing import to_sink, weigh_input
from tests.routing.support import NAN, count, floats, ids, logical, same

RULE = ScoredTopK(1, "sigmoid", False, Settled())


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_llama_4_weighs_what_its_experts_see() -> None:
    hidden, inter, experts, rows = 6, 5, 4, 7
    w13, w2 = randn(experts, 2 * inter, hidden, seed=1), randn(experts, hidden, inter, seed=2)
    data, logits = randn(rows, hidden, seed=3), randn(rows, experts, seed=4)

    expected = torch.empty(rows, hidden, dtype=torch.float64)
    for row in range(rows):
        values = [float(value) for value in logits[row]]
        expert = values.index(max(values))
        given = data[row].double() / (1 + math.exp(-max(values)))
        gate, up = (w13[expert].double() @ given).chunk(2)
        expected[row] = w2[expert].double() @ (gate / (1 + torch.exp(-gate)) * up)

    layer = StandardDispatcher(fp32_as_is).then(Experts(prepare_reference(Fp32ExpertWeights(w13, w2, GateUp))))
    with debug("strict"):
        found = layer(*weigh_input(Fp32Rows(data), RULE.route(logits)))
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_product_is_rounded_once_to_the_dtype_of_the_rows() -> None:
    data, routing = randn(9, 8, seed=0), RULE.route(randn(9, 4, seed=1))
    with debug("strict"):
        weighed = (
            weigh_input(Bf16Rows(data.bfloat16()), routing)[0],
            weigh_input(Fp16Rows(data.half()), routing)[0],
            weigh_input(Fp32Rows(data), routing)[0],
        )
    for rows, dtype in zip(weighed, (torch.bfloat16, torch.float16, torch.float32), strict=True):
        assert torch.equal(rows.data, (data.to(dtype).float() * routing.topk_weights).to(dtype))


def test_the_weight_is_spent() -> None:
    routing = logical(ids([3], [-1], [0]), 4)
    with debug("strict"):
        _, spent = weigh_input(Fp32Rows(torch.ones(3, 2)), routing)
    same(spent, routing.topk_ids, floats([1], [0], [1]))
    assert (spent.space, spent.num_experts, spent.scaling, spent.live, spent.renormalized) == (routing.space, 4, routing.scaling, 3, True)


@pytest.mark.parametrize("live", [2, DeviceCount(count(2))], ids=["host", "device"])
def test_rows_that_go_nowhere_become_zero_whatever_is_in_them(live: int | DeviceCount) -> None:
    routing = logical(ids([3], [-1], [2]), 4, live)
    routing.topk_weights[1:] = NAN
    rows = Fp32Rows(floats([1, 2], [NAN, math.inf], [NAN, 1]))
    with debug("off"):
        weighed, spent = weigh_input(rows, routing)
    assert torch.equal(weighed.data, floats([1, 2], [0, 0], [0, 0]))
    same(spent, routing.topk_ids, floats([1], [0], [0]))


def test_the_sink_is_nowhere() -> None:
    sunk = to_sink(localize(logical(ids([3], [0]), 4), 2, 2))
    weighed, spent = weigh_input(Fp32Rows(floats([1, 2], [NAN, 1])), sunk)
    assert torch.equal(weighed.data, floats([1, 2], [0, 0]))
    same(spent, ids([1], [2]), floats([1], [0]))
    assert spent.space is LocalSinkIds


def test_more_than_one_route_is_refused() -> None:
    with pytest.raises(ValueError, match="goes on the input of rows with one route; these have 2"):
        weigh_input(Fp32Rows(torch.ones(1, 2)), logical(ids([0, 1]), 4))


@pytest.mark.parametrize(("routed", "rows"), [(1, 3), (3, 1), (2, 3)])
def test_other_rows_are_refused(routed: int, rows: int) -> None:
    with pytest.raises(ValueError, match=f"the routing is of {routed} rows, but there are {rows}"):
        weigh_input(Fp32Rows(torch.ones(rows, 2)), logical(torch.zeros(routed, 1, dtype=torch.int32), 4))

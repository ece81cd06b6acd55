"""Finalisation of the emulated NPU against its golden, and the law that ties it to routing: both orders agree for one token alone."""

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import FinalizeMode, RoutingPadMode
from tests.emulation.ascend.misuse import EmulatedMisuse, EmulatedRefusal, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_reference import numbers, random, random_routes
from tests.emulation.hazards import Mode

T, K, E, H = 6, 3, 5, 16
PADDED = (FinalizeMode.K_MAJOR_PADDED, FinalizeMode.ROW_MAJOR_PADDED)
ROW_MAJOR = (FinalizeMode.ROW_MAJOR, FinalizeMode.ROW_MAJOR_PADDED)


def route_v1(ops: EmulatedAscendOps, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    tokens, k = ids.shape
    row_idx = torch.arange(tokens * k, dtype=torch.int32).view(k, tokens).T.contiguous()
    return ops.npu_moe_init_routing(x, row_idx, ids, tokens)[:2]


def route_v2(ops: EmulatedAscendOps, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return ops.npu_moe_init_routing_v2(x, ids, active_num=ids.numel(), expert_num=E)[:2]


def finalize(ops: EmulatedAscendOps, rows: Tensor, index: Tensor, weights: Tensor, mode: FinalizeMode) -> Tensor:
    return ops.npu_moe_finalize_routing(rows, None, None, None, weights.to(rows.dtype), index, None, mode)


@pytest.mark.parametrize("mode", FinalizeMode)
@pytest.mark.parametrize("extras", [False, True])
def test_the_golden(mode: FinalizeMode, extras: bool) -> None:
    """``skip1 + skip2 + sum_j scales * (row + bias)``, a row of zeros at -1; the index is a permutation in the mode's order."""
    capacity = 4
    rows = random(0, E, capacity, H) if mode in PADDED else random(0, T * K, H)
    index = torch.randperm(rows.numel() // H, generator=torch.Generator().manual_seed(1))[: T * K].int()
    index[4] = -1
    scales, ids = random(2, T, K), random_routes(3, T, K, E)
    skips, bias = (random(4, T, H), random(5, T, H)), random(6, E, H)
    skip1, skip2, added = (*skips, bias) if extras else (None, None, None)
    out = EmulatedAscendOps().npu_moe_finalize_routing(rows, skip1, skip2, added, scales, index, ids, mode)
    flat = rows.view(-1, H)
    for token in range(T):
        for column in range(H):
            total = sum(float(skip[token, column]) for skip in skips) if extras else 0.0
            for slot in range(K):
                place = int(index[token * K + slot if mode in ROW_MAJOR else slot * T + token])
                value = float(flat[place, column]) if place >= 0 else 0.0
                value += float(bias[int(ids[token, slot]), column]) if extras else 0.0
                total += float(scales[token, slot]) * value
            assert float(out[token, column]) == pytest.approx(total, abs=1e-5)


def test_without_scales_k_says_how_many() -> None:
    rows, index = random(0, 6, H), torch.arange(6, dtype=torch.int32)
    out = EmulatedAscendOps().npu_moe_finalize_routing(rows, None, None, None, None, index, None, FinalizeMode.ROW_MAJOR, 2)
    assert numbers(out[1]) == pytest.approx([a + b for a, b in zip(numbers(rows[2]), numbers(rows[3]), strict=True)])


def test_dropped_routes_of_padded_experts_add_nothing() -> None:
    ids, x = torch.tensor([[0, 1], [0, 2], [0, 1]], dtype=torch.int32), random(0, 3, H)
    ops = EmulatedAscendOps()
    rows, index, _, _ = ops.npu_moe_init_routing_v2(x, ids, expert_num=3, expert_capacity=2, drop_pad_mode=RoutingPadMode.DROP_PAD)
    out = finalize(ops, rows, index, torch.ones(3, 2), FinalizeMode.ROW_MAJOR_PADDED)
    assert torch.allclose(out, x * torch.tensor([[2.0], [2.0], [1.0]]))


def test_what_finalisation_refuses() -> None:
    ops, rows, index = EmulatedAscendOps("faithful"), random(0, T * K, H), torch.arange(T * K, dtype=torch.int32)
    with pytest.raises(EmulatedRefusal, match="one dtype"):
        ops.npu_moe_finalize_routing(rows.bfloat16(), None, None, None, torch.ones(T, K), index, None)
    with pytest.raises(EmulatedRefusal, match="skip1"):
        ops.npu_moe_finalize_routing(rows, None, rows[:T], None, torch.ones(T, K), index, None)
    with pytest.raises(EmulatedRefusal, match="int32"):
        ops.npu_moe_finalize_routing(rows, None, None, None, torch.ones(T, K), index.long(), None)
    with pytest.raises(EmulatedRefusal, match="axes"):
        ops.npu_moe_finalize_routing(rows, None, None, None, torch.ones(T, K), index, None, FinalizeMode.ROW_MAJOR_PADDED)


# ---- the law -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_matching_orders_give_the_mixture_back(mode: Mode) -> None:
    """bf16 rows, weights that sum to 1: the mixture of a token's rows is the token, to 4e-3 of values up to about 4."""
    x, ids = random(0, 64, H, dtype=torch.bfloat16), random_routes(1, 64, K, E)
    weights = random(2, 64, K).softmax(-1)
    ops = EmulatedAscendOps(mode)
    rows, index = route_v1(ops, x, ids)
    by_v1 = finalize(ops, rows, index, weights, FinalizeMode.K_MAJOR)
    rows, index = route_v2(ops, x, ids)
    by_v2 = finalize(ops, rows, index, weights, FinalizeMode.ROW_MAJOR)
    unpermuted = ops.npu_moe_token_unpermute(rows, index, weights.bfloat16())
    for out in (by_v1, by_v2, unpermuted):
        assert float(((out.float() - x.float()).abs() / x.float().abs().clamp(min=1)).max()) < 8e-3
    assert torch.equal(by_v2, unpermuted)


@pytest.mark.parametrize("version", [1, 2])
def test_the_other_order_is_another_mixture(version: int) -> None:
    """Off by more than 3 in absolute value, silently; strict mode knows where an index came from."""
    x, ids, weights = random(0, 64, H, dtype=torch.bfloat16), random_routes(1, 64, K, E), random(2, 64, K).softmax(-1)
    other = FinalizeMode.ROW_MAJOR if version == 1 else FinalizeMode.K_MAJOR
    route = route_v1 if version == 1 else route_v2
    faithful, strict = EmulatedAscendOps("faithful"), EmulatedAscendOps()
    rows, index = route(faithful, x, ids)
    assert float((finalize(faithful, rows, index, weights, other).float() - x.float()).abs().max()) > 3
    rows, index = route(strict, x, ids)
    with pytest.raises(EmulatedMisuse) as caught:
        finalize(strict, rows, index.clone(), weights, other)
    assert caught.value.reason is Reason.INDEX_ORDER
    if version == 1:
        with pytest.raises(EmulatedMisuse):
            strict.npu_moe_token_unpermute(rows, index, weights.bfloat16())


@pytest.mark.parametrize(("tokens", "k"), [(1, 4), (8, 1)])
def test_both_orders_are_one_for_one_token_or_one_slot(tokens: int, k: int) -> None:
    x, ids = random(0, tokens, H), random_routes(1, tokens, k, E)
    ops = EmulatedAscendOps()
    assert torch.equal(route_v1(ops, x, ids)[1], route_v2(ops, x, ids)[1])
    for mode in (FinalizeMode.K_MAJOR, FinalizeMode.ROW_MAJOR):
        rows, index = route_v1(ops, x, ids)
        assert torch.allclose(finalize(ops, rows, index, torch.full((tokens, k), 1 / k), mode), x, atol=1e-6)


def test_permute_and_unpermute_are_each_other_s_reverse() -> None:
    x, ids = random(0, T, H), random_routes(1, T, K, E)
    ops = EmulatedAscendOps()
    rows, index = ops.npu_moe_token_permute(x, ids)
    v2_rows, v2_index = route_v2(ops, x, ids)
    assert torch.equal(rows, v2_rows)
    assert torch.equal(index, v2_index)
    assert torch.allclose(ops.npu_moe_token_unpermute(rows, index, torch.full((T, K), 1 / K)), x, atol=1e-6)


def test_minus_one_through_abs_is_row_one() -> None:
    """What a restricted range marks as not here is a row of zeros; abs makes it row 1."""
    x, ids = random(0, T, H), random_routes(1, T, K, E)
    ops = EmulatedAscendOps("faithful")
    rows, index, _, _ = ops.npu_moe_init_routing_v2(x, ids, active_num=T * K, expert_num=E, active_expert_range=[0, 2])
    here = (ids < 2).sum(1, keepdim=True).float()
    assert torch.allclose(finalize(ops, rows, index, torch.ones(T, K), FinalizeMode.ROW_MAJOR), x * here, atol=1e-5)
    assert torch.allclose(ops.npu_moe_token_unpermute(rows, index.abs(), torch.ones(T, K)), x * here + (K - here) * rows[1], atol=1e-5)

"""Whole layers on the emulated operators, scheme by scheme: the relative errors that quantisation costs, and those of silent mistakes.

The layer is ``sum_j w_j W2 (silu(left) * right of W13 x)`` in float64 on the weights as they are dequantised. Weights are normal, divided by the
root of their inputs.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import AscendOps, FinalizeMode, GroupAxis, GroupListType, RoutingQuantMode, SplitItem, SwigluQuantMode
from tests.emulation.ascend.misuse import EmulatedMisuse, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_matmul import carrier, packed
from tests.emulation.ascend_reference import random, random_ints, random_routes, relative_error

T, K, E, H, INTER = 48, 2, 4, 256, 128
BF16 = torch.bfloat16

Matmul = Callable[[AscendOps, Tensor, Tensor, Tensor | None, GroupListType], Tensor]


def reference(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the layer token by token; weights are [E, inputs, outputs]."""
    out = torch.zeros(T, H, dtype=torch.float64)
    for token in range(T):
        for slot in range(K):
            e = int(ids[token, slot])
            left, right = (x[token].double() @ w13[e].double()).chunk(2)
            out[token] += float(weights[token, slot]) * ((left * left.sigmoid() * right) @ w2[e].double())
    return out


def multiply(ops: AscendOps, x: Tensor, tokens: Tensor, kind: GroupListType, weight: Tensor, **scales: Tensor) -> Tensor:
    lists = {name: [tensor] for name, tensor in scales.items()}
    return ops.npu_grouped_matmul(
        [x],
        [weight],
        bias=lists.get("bias"),
        scale=lists.get("scale"),
        antiquant_scale=lists.get("antiquant_scale"),
        antiquant_offset=lists.get("antiquant_offset"),
        per_token_scale=lists.get("per_token_scale"),
        group_list=tokens,
        split_item=SplitItem.SINGLE,
        group_type=GroupAxis.M,
        group_list_type=kind,
        output_dtype=BF16,
    )[0]


def layer(ops: AscendOps, gemms: tuple[Matmul, Matmul], *, int8: bool, kinds: tuple[GroupListType, GroupListType] | None = None) -> Tensor:
    """Route, multiply, activate, multiply, finalise. ``kinds``: what is asked of routing, and what the products are told."""
    x, ids, weights = inputs()
    asked, told = kinds or (GroupListType.COUNT, GroupListType.COUNT)
    rows, index, tokens, scale = ops.npu_moe_init_routing_v2(
        x,
        ids,
        active_num=T * K,
        expert_num=E,
        expert_tokens_num_type=asked,
        expert_tokens_num_flag=True,
        quant_mode=RoutingQuantMode.DYNAMIC if int8 else RoutingQuantMode.NONE,
        active_expert_range=[0, E],
    )
    hidden = gemms[0](ops, rows, tokens, scale if int8 else None, told)
    if int8:
        activated, act_scale = ops.npu_dequant_swiglu_quant(hidden, activate_left=True, quant_mode=SwigluQuantMode.DYNAMIC)
        hidden = gemms[1](ops, activated, tokens, act_scale, told)
    else:
        hidden = gemms[1](ops, ops.npu_swiglu(hidden), tokens, None, told)
    return ops.npu_moe_finalize_routing(hidden, None, None, None, weights.to(BF16), index, None, FinalizeMode.ROW_MAJOR)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    return random(0, T, H, dtype=BF16), random_routes(1, T, K, E), random(2, T, K).softmax(-1)


def dense(seed: int) -> tuple[Tensor, Tensor]:
    return random(seed, E, H, 2 * INTER) / math.sqrt(H), random(seed + 1, E, INTER, H) / math.sqrt(INTER)


def symmetric(weight: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return integers [E, K, N] and their scales [E, N]."""
    scale = weight.abs().amax(1) / limit
    return (weight / scale[:, None]).round().to(torch.int8), scale


def error_of(ops: AscendOps, gemms: tuple[Matmul, Matmul], dequantized: tuple[Tensor, Tensor], *, int8: bool) -> float:
    return relative_error(layer(ops, gemms, int8=int8), reference(inputs()[0], *dequantized, *inputs()[1:]))


def both(make: Callable[[Tensor], Matmul], weights: tuple[Tensor, Tensor]) -> tuple[Matmul, Matmul]:
    return make(weights[0]), make(weights[1])


# ---- schemes -------------------------------------------------------------------------------------------------------------------------------


def plain(weight: Tensor) -> Matmul:
    return lambda ops, x, tokens, _, kind: multiply(ops, x, tokens, kind, weight.to(BF16))


def w8a8(weight: Tensor) -> Matmul:
    values, scale = symmetric(weight, 127)

    def gemm(ops: AscendOps, x: Tensor, tokens: Tensor, row_scale: Tensor | None, kind: GroupListType) -> Tensor:
        rows, scales = ops.npu_dynamic_quant(x) if row_scale is None else (x, row_scale)
        return multiply(ops, rows, tokens, kind, values, scale=scale.to(BF16), per_token_scale=scales)

    return gemm


def w4a8(weight: Tensor, *, correct: bool = True) -> Matmul:
    values, scale = symmetric(weight, 7)
    bias, words = 8 * (values * scale[:, None]).sum(1) * correct, packed(values)

    def gemm(ops: AscendOps, x: Tensor, tokens: Tensor, row_scale: Tensor | None, kind: GroupListType) -> Tensor:
        assert row_scale is not None
        return multiply(ops, x, tokens, kind, words, scale=carrier(scale)[:, None], per_token_scale=row_scale, bias=bias)

    return gemm


def w4a4(weight: Tensor) -> Matmul:
    values, scale = symmetric(weight, 7)
    words = packed(values)

    def gemm(ops: AscendOps, x: Tensor, tokens: Tensor, _: Tensor | None, kind: GroupListType) -> Tensor:
        rows, scales = ops.npu_dynamic_quant(x, dst_type=torch.quint4x2)
        return multiply(ops, rows, tokens, kind, words, scale=carrier(scale), per_token_scale=scales)

    return gemm


GROUP = 64


def zeros_of(weight: Tensor, *, at_eight: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned int4 [E, K, N] of normal weights, and zeros from 4 to 11, or 8, and scales [E, G, N]."""
    experts, inner, outer = weight.shape
    zeros = random_ints(8, 4, 12, experts, inner // GROUP, outer)
    zeros = torch.full_like(zeros, 8) if at_eight else zeros
    scale = (torch.full(zeros.shape, 1 / math.sqrt(inner)) / 1.2).to(BF16)
    codes = ((weight / scale.float().repeat_interleave(GROUP, 1)).round() + zeros.repeat_interleave(GROUP, 1)).clamp(0, 15).to(torch.int8)
    return codes, zeros, scale


def awq(weight: Tensor, *, sign: int = -1, at_eight: bool = False) -> Matmul:
    """Return ``x ((u - 8) + offset) * scale`` with the offset 8 - z, or z - 8 for the sign 1."""
    codes, zeros, scale = zeros_of(weight, at_eight=at_eight)
    offset, words = (sign * (zeros - 8)).to(BF16), packed(codes - 8)
    return lambda ops, x, tokens, _, kind: multiply(ops, x, tokens, kind, words, antiquant_scale=scale.to(BF16), antiquant_offset=offset)


def dequantized_zeros(weight: Tensor, *, at_eight: bool = False) -> Tensor:
    codes, zeros, scale = zeros_of(weight, at_eight=at_eight)
    return (codes.float() - zeros.repeat_interleave(GROUP, 1)) * scale.float().repeat_interleave(GROUP, 1)


def rounded(weight: Tensor, limit: int) -> Tensor:
    values, scale = symmetric(weight, limit)
    return values * scale[:, None]


def test_bf16_costs_half_a_percent() -> None:
    weights = dense(3)
    dequantized = (weights[0].to(BF16), weights[1].to(BF16))
    assert 0.003 < error_of(EmulatedAscendOps(), both(plain, weights), dequantized, int8=False) < 0.007


def test_w8a8_costs_two_percent_wherever_rows_are_quantised() -> None:
    weights = dense(3)
    dequantized = (rounded(weights[0], 127), rounded(weights[1], 127))
    at_routing = layer(EmulatedAscendOps(), both(w8a8, weights), int8=True)
    first, second = both(w8a8, weights)

    def later(ops: AscendOps, x: Tensor, tokens: Tensor, _: Tensor | None, kind: GroupListType) -> Tensor:
        return first(ops, x, tokens, None, kind)

    ops = EmulatedAscendOps()
    x, ids, router = inputs()
    rows, index, tokens, _ = ops.npu_moe_init_routing_v2(
        x, ids, expert_num=E, expert_tokens_num_type=GroupListType.COUNT, expert_tokens_num_flag=True
    )
    hidden, scale = ops.npu_dequant_swiglu_quant(
        later(ops, rows, tokens, None, GroupListType.COUNT), activate_left=True, quant_mode=SwigluQuantMode.DYNAMIC
    )
    hidden = second(ops, hidden, tokens, scale, GroupListType.COUNT)
    assert torch.equal(at_routing, ops.npu_moe_finalize_routing(hidden, None, None, None, router.to(BF16), index, None, FinalizeMode.ROW_MAJOR))
    assert 0.010 < relative_error(at_routing, reference(x, *dequantized, ids, router)) < 0.025


def test_w4a8_costs_as_much_with_its_bias_and_far_more_without() -> None:
    weights = dense(3)
    dequantized = (rounded(weights[0], 7), rounded(weights[1], 7))
    assert 0.009 < error_of(EmulatedAscendOps(), both(w4a8, weights), dequantized, int8=True) < 0.025
    wrong = error_of(EmulatedAscendOps("faithful"), both(lambda weight: w4a8(weight, correct=False), weights), dequantized, int8=True)
    assert 0.2 < wrong < 0.8


def test_w4a4_costs_a_quarter() -> None:
    weights = dense(3)
    dequantized = (rounded(weights[0], 7), rounded(weights[1], 7))
    assert 0.15 < error_of(EmulatedAscendOps(), both(w4a4, weights), dequantized, int8=False) < 0.35


def test_zeros_of_awq_are_negated_and_a_flipped_sign_is_off_by_many_times_the_layer() -> None:
    """Each product is off by a few times, and three of them follow one another."""
    weights = dense(3)
    dequantized = (dequantized_zeros(weights[0]), dequantized_zeros(weights[1]))
    assert error_of(EmulatedAscendOps(), both(awq, weights), dequantized, int8=False) < 0.01
    assert error_of(EmulatedAscendOps(), both(lambda weight: awq(weight, sign=1), weights), dequantized, int8=False) > 30


def test_zeros_of_gptq_as_they_are_do_for_symmetric_checkpoints_alone() -> None:
    weights = dense(3)
    dequantized = (dequantized_zeros(weights[0], at_eight=True), dequantized_zeros(weights[1], at_eight=True))
    gemms = both(lambda weight: awq(weight, sign=1, at_eight=True), weights)
    assert error_of(EmulatedAscendOps(), gemms, dequantized, int8=False) < 0.01


@pytest.mark.parametrize("asked", [GroupListType.COUNT, GroupListType.CUMSUM])
def test_a_list_of_the_other_kind_is_silently_another_layer(asked: GroupListType) -> None:
    """Rows of no group are poison here; taken for zeros they still leave the layer wrong by half and more."""
    weights = dense(3)
    told = GroupListType.CUMSUM if asked == GroupListType.COUNT else GroupListType.COUNT
    found = layer(EmulatedAscendOps("faithful"), both(plain, weights), int8=False, kinds=(asked, told))
    wanted = reference(inputs()[0], weights[0].to(BF16), weights[1].to(BF16), *inputs()[1:])
    assert relative_error(found.nan_to_num(0.0), wanted) > 0.4
    with pytest.raises(EmulatedMisuse) as caught:
        layer(EmulatedAscendOps(), both(plain, weights), int8=False, kinds=(asked, told))
    assert caught.value.reason is Reason.GROUP_LIST_KIND
    right = layer(EmulatedAscendOps(), both(plain, weights), int8=False, kinds=(asked, asked))
    assert relative_error(right, wanted) < 0.01
    assert not torch.isnan(right).any()

"""Gating of the emulated NPU against its golden."""

import math

import pytest
import torch

from moe_typed.runners.ascend.ops import GatingNorm, GroupSelect, Renorm
from tests.emulation.ascend.misuse import EmulatedRefusal
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_reference import integers, matrix, numbers, random, sigmoid

T, K, E = 7, 3, 5


def test_softmax_gating_gives_what_routing_v1_wants() -> None:
    logits = random(0, T, E)
    finished = torch.tensor([False] * (T - 1) + [True])
    weights, ids, row_idx = EmulatedAscendOps().npu_moe_gating_top_k_softmax(logits, finished, K)
    assert torch.equal(row_idx, torch.arange(K * T, dtype=torch.int32).view(K, T).T)
    for token, row in enumerate(matrix(logits)):
        scores = [math.exp(value) / math.fsum(math.exp(other) for other in row) for value in row]
        order = sorted(range(E), key=lambda expert: -scores[expert])[:K]
        assert numbers(weights[token]) == pytest.approx([scores[expert] for expert in order], rel=1e-5)
        assert integers(ids[token]) == ([E] * K if finished[token] else order)


@pytest.mark.parametrize("norm", GatingNorm)
@pytest.mark.parametrize("select", GroupSelect)
def test_gating_chooses_by_bias_and_group_and_weighs_without(norm: GatingNorm, select: GroupSelect) -> None:
    experts, groups, kept, k, scaling = 12, 4, 2, 3, 2.5
    logits, bias = random(0, T, experts), random(1, experts)
    weights, ids, scores = EmulatedAscendOps().npu_moe_gating_top_k(
        logits,
        k,
        bias=bias,
        k_group=kept,
        group_count=groups,
        group_select_mode=select,
        norm_type=norm,
        out_flag=True,
        routed_scaling_factor=scaling,
    )
    for token, row in enumerate(matrix(logits)):
        total = math.fsum(math.exp(value) for value in row)
        all_scores = [sigmoid(value) if norm == GatingNorm.SIGMOID else math.exp(value) / total for value in row]
        biased = [a + b for a, b in zip(all_scores, numbers(bias), strict=True)]
        members = [range(3 * group, 3 * group + 3) for group in range(groups)]
        best = [sum(sorted((biased[e] for e in group), reverse=True)[: 1 if select == GroupSelect.MAX else 2]) for group in members]
        chosen_groups = sorted(range(groups), key=lambda group: -best[group])[:kept]
        candidates = [expert for group in chosen_groups for expert in members[group]]
        order = sorted(candidates, key=lambda expert: -biased[expert])[:k]
        divisor = math.fsum(all_scores[expert] for expert in order) + 1e-20 if norm == GatingNorm.SIGMOID else 1.0
        assert integers(ids[token]) == order
        assert numbers(weights[token]) == pytest.approx([all_scores[expert] / divisor * scaling for expert in order], rel=1e-5)
        assert numbers(scores[token]) == pytest.approx(all_scores, rel=1e-5)


def test_renormalisation_depends_on_the_kernel() -> None:
    logits = random(0, T, E)
    with pytest.raises(EmulatedRefusal, match="renorm"):
        EmulatedAscendOps("faithful").npu_moe_gating_top_k(logits, K, renorm=Renorm.ALWAYS)
    weights = EmulatedAscendOps(renorm_always=True).npu_moe_gating_top_k(logits, K, renorm=Renorm.ALWAYS)[0]
    assert numbers(weights.sum(-1)) == pytest.approx([1.0] * T)


@pytest.mark.parametrize("renorm", [0, 1])
def test_the_second_softmax_gating_normalises_before_or_after_it_chooses(renorm: int) -> None:
    logits = random(0, T, E)
    weights, ids, softmax = EmulatedAscendOps().npu_moe_gating_top_k_softmax_v2(logits, k=K, renorm=renorm, output_softmax=True)
    for token, row in enumerate(matrix(logits)):
        scores = [math.exp(value) / math.fsum(math.exp(other) for other in row) for value in row]
        order = sorted(range(E), key=lambda expert: -scores[expert])[:K]
        divisor = math.fsum(scores[expert] for expert in order) if renorm else 1.0
        assert integers(ids[token]) == order
        assert numbers(weights[token]) == pytest.approx([scores[expert] / divisor for expert in order], rel=1e-5)
        assert renorm or numbers(softmax[token]) == pytest.approx(scores, rel=1e-5)

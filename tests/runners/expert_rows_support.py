"""Rows that lie by expert, for the tests of the Triton runners: what is stale or in a gap is NaN, and so is its weight."""

from collections.abc import Callable
from typing import TypeAlias

import attrs
import torch
from torch import Tensor

from moe_typed import Payload
from moe_typed.formats import ExpertWeights, GateUpOrder
from moe_typed.runners import Activation, SiluAndMul, reference_experts
from moe_typed.stages import ReceivedPerExpert, SegmentEnds, SegmentRowsInput, SlabRowsInput
from tests.runners.triton_support import NAN, randn, row_norms

MakeRows: TypeAlias = Callable[[Tensor], Payload]
ExpertRowsInput: TypeAlias = SlabRowsInput | SegmentRowsInput


@attrs.frozen(eq=False)
class Placed:
    """A runner input, and what is in it by another way: the expert of each row, -1 for none, and the weight of each."""

    runner_input: ExpertRowsInput
    experts: Tensor
    weights: Tensor

    def check(self, found: Tensor, weights: ExpertWeights[GateUpOrder], tolerance: float, activation: Activation | None = None) -> None:
        """Compare the results of the live rows with the reference; what the others hold is nobody's business."""
        payload, live = self.runner_input.payload, self.experts >= 0
        assert found.shape == (payload.rows, weights.hidden)
        ids, by = self.experts[live].unsqueeze(1), self.weights[live].unsqueeze(1)
        expected = reference_experts(payload.dequantize()[live], ids, by, weights, activation or SiluAndMul())
        error, norm = row_norms(found[live].float() - expected), row_norms(expected)
        assert bool((error <= tolerance * norm).all()), f"largest error of a row: {float((error / norm).nan_to_num(1.0).max()):.2e}"


def place_slab(
    rows_of: MakeRows, device: str, counts: list[int], capacity: int, hidden: int, *, expected: int = 4, most: int | None = None
) -> Placed:
    """Return a slab of as many rows an expert as it counts."""
    experts = torch.full((len(counts), capacity), -1, dtype=torch.int32)
    for expert, count in enumerate(counts):
        experts[expert, :count] = expert
    experts = experts.view(-1).to(device)
    payload = rows_of(_data(experts, hidden))
    received = ReceivedPerExpert(torch.tensor(counts, dtype=torch.int32, device=device))
    runner_input = SlabRowsInput(payload, received, capacity, sum(counts) if most is None else most, expected)
    return Placed(runner_input, experts, torch.ones(experts.shape, device=device))


def place_segments(rows_of: MakeRows, device: str, counts: list[int], alignment: int, hidden: int, *, expected: int = 4, behind: int = 3) -> Placed:
    """Return segments with gaps between them, and some rows behind the last."""
    ends: list[int] = []
    own: list[int] = []
    for expert, count in enumerate(counts):
        own += [-1] * (-len(own) % alignment) + [expert] * count
        ends.append(len(own))
    experts = torch.tensor(own + [-1] * behind, dtype=torch.int32, device=device)
    payload = rows_of(_data(experts, hidden))
    weights = torch.where(experts < 0, NAN, torch.rand(experts.shape, generator=torch.Generator().manual_seed(8)).to(device) + 0.1)
    segments = SegmentEnds(torch.tensor(ends, dtype=torch.int32, device=device), alignment)
    return Placed(SegmentRowsInput(payload, segments, weights, expected), experts, weights)


def _data(experts: Tensor, hidden: int) -> Tensor:
    data = randn(2, experts.shape[0], hidden).to(experts.device)
    data[experts < 0] = NAN
    return data

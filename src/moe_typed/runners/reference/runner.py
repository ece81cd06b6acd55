"""The reference runner: torch, float32, one expert after another. It is the meaning that every other runner is held to.

Every expert sees every row and the routes choose afterwards, so no shape depends on data: it compiles with ``fullgraph=True``, and a row that goes to
no expert is zero whatever its own values are. That costs experts / k times the arithmetic of a permuting runner.
"""

from typing import ClassVar, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ...formats import ExpertWeights, GateUpOrder
from ...routing import live_mask
from ...stages import FlatRowsInput, RunnerInput, SummedRowsOutput
from ..activations import Activation
from ..base import FlatRowsMeetWeights, Runner, UnsupportedError


def reference_experts(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, weights: ExpertWeights[GateUpOrder], activation: Activation
) -> Tensor:
    """Return sum over a row's routes of weight * expert(row), as float32 (rows, hidden).

    ``hidden_states``: float32 (rows, hidden). ``topk_ids``: int32 (rows, k), any id that is no expert (such as -1) is no route.
    ``topk_weights``: float32 (rows, k).
    """
    total = torch.zeros_like(hidden_states)
    for expert in range(weights.num_experts):
        joined = hidden_states @ weights.dequantize_w13(expert).T
        if weights.b13 is not None:
            joined = joined + weights.b13[expert].to(torch.float32)
        result = activation.activate(joined, weights.order) @ weights.dequantize_w2(expert).T
        if weights.b2 is not None:
            result = result + weights.b2[expert].to(torch.float32)
        result = activation.finish(result)
        chosen = topk_ids == expert
        weight = torch.where(chosen, topk_weights, 0.0).sum(1, keepdim=True)
        total = total + torch.where(chosen.any(1, keepdim=True), weight * result, 0.0)
    return total


@final
@attrs.frozen(eq=False)
class ReferenceRunner(Runner[FlatRowsInput, SummedRowsOutput]):
    """Run the experts in float32 and round the sum to the model's dtype."""

    name: ClassVar[str] = "reference"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (FlatRowsInput,)
    weights: ExpertWeights[GateUpOrder]
    activation: Activation
    out_dtype: torch.dtype

    @override
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput:
        FlatRowsMeetWeights(self.weights, runner_input)
        routing = runner_input.routing
        rows = runner_input.payload.dequantize()
        ids = routing.topk_ids if routing.all_live else torch.where(live_mask(routing), routing.topk_ids, -1)
        total = reference_experts(rows, ids, routing.topk_weights, self.weights, self.activation)
        return SummedRowsOutput(total.to(self.out_dtype))


def make_runner(weights: ExpertWeights[GateUpOrder], activation: Activation, out_dtype: torch.dtype) -> ReferenceRunner:
    """Return the runner over weights of any class. Raises: UnsupportedError for an activation of another gate/up order than theirs."""
    if not activation.takes(weights.order):
        raise UnsupportedError(f"the activation {activation.name!r} does not take rows in the order {weights.order.title!r}")
    return ReferenceRunner(weights, activation, out_dtype)

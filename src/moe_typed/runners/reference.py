"""The reference runner: torch, float32, one expert after another. It is the meaning that every other runner is held to.

Every expert sees every row and the routes choose afterwards, so no shape depends on data: it compiles with ``fullgraph=True``, and a row that goes to
no expert is zero whatever its own values are. That costs experts / k times the arithmetic of a permuting runner.
"""

from typing import ClassVar, TypeAlias, final, overload

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..boundary import boundary
from ..formats import (
    AnyDenseRows,
    Bf16ExpertWeights,
    ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp16ExpertWeights,
    Fp32ExpertWeights,
    GateUpOrder,
    MxFp8ExpertWeights,
    MxFp8Rows,
)
from ..stages import FlatRowsInput, RunnerInput, SummedRowsOutput
from .activations import Activation
from .base import FlatRowsMeetWeights, PreparedWeights, Runner

DenseWeights: TypeAlias = Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Fp32ExpertWeights[GateUpOrder]


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
        gate, up = weights.order.split(joined, -1)
        result = activation.apply(gate, up) @ weights.dequantize_w2(expert).T
        if weights.b2 is not None:
            result = result + weights.b2[expert].to(torch.float32)
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
        total = reference_experts(rows, routing.topk_ids, routing.topk_weights, self.weights, self.activation)
        return SummedRowsOutput(total.to(self.out_dtype))


@final
@boundary
class ReferenceDenseWeights(PreparedWeights[ReferenceRunner, AnyDenseRows]):
    """Unquantised weights for the reference runner."""

    weights: DenseWeights

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return ReferenceRunner(self.weights, activation, self.weights.format.data_dtype)


@final
@boundary
class ReferenceFp8Block128Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | Fp8Block128Rows]):
    """Block-128 fp8 weights for the reference runner."""

    weights: Fp8Block128ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return ReferenceRunner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceMxFp8Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | MxFp8Rows]):
    """Mxfp8 weights for the reference runner."""

    weights: MxFp8ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return ReferenceRunner(self.weights, activation, torch.bfloat16)


@overload
def prepare_reference(weights: DenseWeights) -> ReferenceDenseWeights: ...
@overload
def prepare_reference(weights: Fp8Block128ExpertWeights[GateUpOrder]) -> ReferenceFp8Block128Weights: ...
@overload
def prepare_reference(weights: MxFp8ExpertWeights[GateUpOrder]) -> ReferenceMxFp8Weights: ...
def prepare_reference(
    weights: DenseWeights | Fp8Block128ExpertWeights[GateUpOrder] | MxFp8ExpertWeights[GateUpOrder],
) -> ReferenceDenseWeights | ReferenceFp8Block128Weights | ReferenceMxFp8Weights:
    """Return checkpoint-layout weights as the reference runner takes them: in any gate/up order, without a copy.

    Raises: TypeError for anything else, weights that are prepared already among them.
    """
    match weights:
        case Bf16ExpertWeights() | Fp16ExpertWeights() | Fp32ExpertWeights():
            return ReferenceDenseWeights(weights)
        case Fp8Block128ExpertWeights():
            return ReferenceFp8Block128Weights(weights)
        case MxFp8ExpertWeights():
            return ReferenceMxFp8Weights(weights)
        case _:
            raise TypeError(f"prepare_reference takes expert weights in checkpoint layout; got {type(weights).__qualname__}")

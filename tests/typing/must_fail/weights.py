"""Weights that are not prepared, prepared twice, or in another order than a function demands."""

from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Experts,
    Fp8Block128ExpertWeights,
    GateUp,
    Interleaved,
    MxFp8ExpertWeights,
    Settled,
    UpGate,
    prepare_reference,
)
from moe_typed.formats import ExpertWeights, GateUpOrder
from moe_typed.runners import ReferenceDenseWeights, ReferenceFp8Block128Weights, ReferenceMxFp8Weights


def shuffle(weights: Bf16ExpertWeights[GateUp]) -> None: ...


def not_prepared(weights: Bf16ExpertWeights[GateUp]) -> None:
    Experts(weights)
    # E: Argument 1 to "Experts" has incompatible type "Bf16ExpertWeights[GateUp]"; expected "PreparedWeights[Runner[Never, RunnerOutput], Never]"
    # P: "Bf16ExpertWeights[GateUp]" cannot be assigned to parameter "weights" of type "PreparedWeights[AnyRunner, P_contra@Experts]"


def not_prepared_block(weights: Fp8Block128ExpertWeights[GateUp]) -> None:
    Experts(weights)
    # E: Argument 1 to "Experts" has incompatible type "Fp8Block128ExpertWeights[GateUp]"
    # E: expected "PreparedWeights[Runner[Never, RunnerOutput], Never]"
    # P: "Fp8Block128ExpertWeights[GateUp]" cannot be assigned to parameter "weights" of type "PreparedWeights[AnyRunner, P_contra@Experts]"


def prepared_twice(weights: Bf16ExpertWeights[GateUp]) -> None:
    prepare_reference(prepare_reference(weights))
    # E: No overload variant of "prepare_reference" matches argument type "ReferenceDenseWeights"
    # P: No overloads for "prepare_reference" match the provided arguments
    # P: "ReferenceDenseWeights" cannot be assigned to parameter "weights" of type "Int4Weights"


def prepared_as_another_format(weights: MxFp8ExpertWeights[GateUp]) -> ReferenceFp8Block128Weights:
    return prepare_reference(weights)
    # E: Incompatible return value type (got "ReferenceMxFp8Weights", expected "ReferenceFp8Block128Weights")
    # P: Type "ReferenceMxFp8Weights" is not assignable to return type "ReferenceFp8Block128Weights"


def wrapped_as_another_format(weights: MxFp8ExpertWeights[GateUp]) -> None:
    ReferenceFp8Block128Weights(weights)
    # E: Argument 1 to "ReferenceFp8Block128Weights" has incompatible type "MxFp8ExpertWeights[GateUp]"
    # E: expected "Fp8Block128ExpertWeights[GateUpOrder]"
    # P: "MxFp8ExpertWeights[GateUp]" cannot be assigned to parameter "weights" of type "Fp8Block128ExpertWeights[GateUpOrder]"


def up_gate_for_gate_up(weights: Bf16ExpertWeights[UpGate]) -> None:
    shuffle(weights)
    # E: Argument 1 to "shuffle" has incompatible type "Bf16ExpertWeights[UpGate]"; expected "Bf16ExpertWeights[GateUp]"
    # P: "Bf16ExpertWeights[UpGate]" cannot be assigned to parameter "weights" of type "Bf16ExpertWeights[GateUp]"


def interleaved_for_gate_up(weights: Bf16ExpertWeights[Interleaved]) -> None:
    shuffle(weights)
    # E: Argument 1 to "shuffle" has incompatible type "Bf16ExpertWeights[Interleaved]"; expected "Bf16ExpertWeights[GateUp]"
    # P: "Bf16ExpertWeights[Interleaved]" cannot be assigned to parameter "weights" of type "Bf16ExpertWeights[GateUp]"


def unknown_order_for_gate_up(weights: Bf16ExpertWeights[GateUpOrder]) -> None:
    shuffle(weights)
    # E: Argument 1 to "shuffle" has incompatible type "Bf16ExpertWeights[GateUpOrder]"; expected "Bf16ExpertWeights[GateUp]"
    # P: "Bf16ExpertWeights[GateUpOrder]" cannot be assigned to parameter "weights" of type "Bf16ExpertWeights[GateUp]"


def relabelled(w13: Tensor, w2: Tensor) -> Bf16ExpertWeights[GateUp]:
    return Bf16ExpertWeights(w13, w2, UpGate)
    # E: Argument 3 to "Bf16ExpertWeights" has incompatible type "type[UpGate]"; expected "type[GateUp]"
    # P: Type "Bf16ExpertWeights[UpGate]" is not assignable to return type "Bf16ExpertWeights[GateUp]"


def order_of_another_kind(w13: Tensor, w2: Tensor) -> None:
    Bf16ExpertWeights(w13, w2, Settled)
    # E: Value of type variable "O_co" of "Bf16ExpertWeights" cannot be "Settled"
    # P: "type[Settled]" cannot be assigned to parameter "order" of type "type[O_co@Bf16ExpertWeights]"


def any_format_for_bf16(weights: ExpertWeights[GateUp]) -> None:
    shuffle(weights)
    # E: Argument 1 to "shuffle" has incompatible type "ExpertWeights[GateUp]"; expected "Bf16ExpertWeights[GateUp]"
    # P: "ExpertWeights[GateUp]" cannot be assigned to parameter "weights" of type "Bf16ExpertWeights[GateUp]"


def one_accept_set_for_another(weights: ReferenceMxFp8Weights) -> ReferenceDenseWeights:
    return weights
    # E: Incompatible return value type (got "ReferenceMxFp8Weights", expected "ReferenceDenseWeights")
    # P: Type "ReferenceMxFp8Weights" is not assignable to return type "ReferenceDenseWeights"


def activation_by_name(weights: ReferenceDenseWeights) -> None:
    Experts(weights, "silu")
    # E: Argument 2 to "Experts" has incompatible type "str"; expected "Activation"
    # P: "Literal['silu']" cannot be assigned to parameter "activation" of type "Activation"

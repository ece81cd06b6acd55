"""Rows of the transition table that do not fit together."""

from typing import final

from torch import Tensor

from moe_typed.boundary import boundary
from moe_typed.formats import Bf16Rows, Payload
from moe_typed.runners import Runner
from moe_typed.runners.flat_rows import standard_pre
from moe_typed.runners.posts import standard_post
from moe_typed.stages import (
    Carry,
    CombineInput,
    FlatRowsInput,
    RunnerInput,
    RunnerOutput,
    StandardCarry,
    StandardCombineInput,
    StandardDispatchOutput,
    SummedRowsOutput,
)
from moe_typed.table import Edge


@final
@boundary
class SortedCarry(Carry):
    order: Tensor


@final
@boundary
class SortedRowsInput(RunnerInput):
    hidden_states: Tensor


@final
@boundary
class SortedRowsOutput(RunnerOutput):
    hidden_states: Tensor


@final
@boundary
class ArenaCombineInput(CombineInput):
    hidden_states: Tensor


def foreign_post(output: SummedRowsOutput, carry: SortedCarry) -> StandardCombineInput:
    raise NotImplementedError


def forgetful_post(output: SummedRowsOutput) -> StandardCombineInput:
    raise NotImplementedError


def astray_post(output: SummedRowsOutput, carry: StandardCarry) -> ArenaCombineInput:
    raise NotImplementedError


def forgetful_pre(dispatched: StandardDispatchOutput[Payload]) -> FlatRowsInput:
    raise NotImplementedError


def astray_pre(dispatched: StandardDispatchOutput[Payload]) -> tuple[SortedRowsInput, SortedCarry]:
    raise NotImplementedError


def picky_pre(dispatched: StandardDispatchOutput[Bf16Rows]) -> tuple[FlatRowsInput, StandardCarry]:
    raise NotImplementedError


EDGE = Edge(StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput)
ROW = EDGE.pre(standard_pre).post(standard_post)

EDGE.pre(standard_pre).post(foreign_post)
# E: Argument 1 to "post" of "HalfEdge" has incompatible type "Callable[[SummedRowsOutput, SortedCarry], StandardCombineInput]"
# E: expected "Callable[[SummedRowsOutput, StandardCarry], StandardCombineInput]"
# P: Parameter 2: type "StandardCarry" is incompatible with type "SortedCarry"

EDGE.pre(standard_pre).post(forgetful_post)
# E: Argument 1 to "post" of "HalfEdge" has incompatible type "Callable[[SummedRowsOutput], StandardCombineInput]"
# E: expected "Callable[[SummedRowsOutput, StandardCarry], StandardCombineInput]"
# P: Function accepts too few positional parameters; expected 2 but received 1

EDGE.pre(standard_pre).post(astray_post)
# E: Argument 1 to "post" of "HalfEdge" has incompatible type "Callable[[SummedRowsOutput, StandardCarry], ArenaCombineInput]"
# E: expected "Callable[[SummedRowsOutput, StandardCarry], StandardCombineInput]"
# P: Function return type "ArenaCombineInput" is incompatible with type "StandardCombineInput"

EDGE.pre(forgetful_pre)
# E: Argument 1 to "pre" of "Edge" has incompatible type "Callable[[StandardDispatchOutput[Payload]], FlatRowsInput]"
# E: expected "Callable[[StandardDispatchOutput[Payload]], tuple[FlatRowsInput, Never]]"
# P: Function return type "FlatRowsInput" is incompatible with type "tuple[FlatRowsInput, S@pre]"

EDGE.pre(astray_pre)
# E: Argument 1 to "pre" of "Edge" has incompatible type "Callable[[StandardDispatchOutput[Payload]], tuple[SortedRowsInput, SortedCarry]]"
# E: expected "Callable[[StandardDispatchOutput[Payload]], tuple[FlatRowsInput, SortedCarry]]"
# P: Function return type "tuple[SortedRowsInput, SortedCarry]" is incompatible with type "tuple[FlatRowsInput, S@pre]"

EDGE.pre(picky_pre)
# E: Argument 1 to "pre" of "Edge" has incompatible type "Callable[[StandardDispatchOutput[Bf16Rows]], tuple[FlatRowsInput, StandardCarry]]"
# E: expected "Callable[[StandardDispatchOutput[Payload]], tuple[FlatRowsInput, StandardCarry]]"
# P: Parameter 1: type "StandardDispatchOutput[Payload]" is incompatible with type "StandardDispatchOutput[Bf16Rows]"

EDGE.pre(standard_post)
# E: Argument 1 to "pre" of "Edge" has incompatible type "Callable[[SummedRowsOutput, StandardCarry], StandardCombineInput]"
# E: expected "Callable[[StandardDispatchOutput[Payload]], tuple[FlatRowsInput, Never]]"
# P: Parameter 1: type "StandardDispatchOutput[Payload]" is incompatible with type "SummedRowsOutput"

Edge(StandardDispatchOutput[Payload], ArenaCombineInput, FlatRowsInput).pre(standard_pre).post(standard_post)
# E: Argument 1 to "post" of "HalfEdge" has incompatible type "Callable[[SummedRowsOutput, StandardCarry], StandardCombineInput]"
# E: expected "Callable[[SummedRowsOutput, StandardCarry], ArenaCombineInput]"
# P: Function return type "StandardCombineInput" is incompatible with type "ArenaCombineInput"

Edge(StandardDispatchOutput[Payload], StandardCarry, FlatRowsInput)
# E: Value of type variable "C" of "Edge" cannot be "StandardCarry"
# P: "type[StandardCarry]" cannot be assigned to parameter "combine_input" of type "type[C@Edge]"


def runner_of_another_input(runner: Runner[SortedRowsInput, SummedRowsOutput]) -> None:
    ROW.using(runner)
    # E: Argument 1 to "using" of "Transition" has incompatible type "Runner[SortedRowsInput, SummedRowsOutput]"
    # E: expected "Runner[FlatRowsInput, SummedRowsOutput]"
    # P: Type parameter "RI_contra@Runner" is contravariant, but "SortedRowsInput" is not a supertype of "FlatRowsInput"


def runner_of_another_output(runner: Runner[FlatRowsInput, SortedRowsOutput]) -> None:
    ROW.using(runner)
    # E: Argument 1 to "using" of "Transition" has incompatible type "Runner[FlatRowsInput, SortedRowsOutput]"
    # E: expected "Runner[FlatRowsInput, SummedRowsOutput]"
    # P: Type parameter "RO_co@Runner" is covariant, but "SortedRowsOutput" is not a subtype of "SummedRowsOutput"


def half_a_row(runner: Runner[FlatRowsInput, SummedRowsOutput]) -> None:
    EDGE.pre(standard_pre).using(runner)
    # E: "HalfEdge[StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput, StandardCarry]" has no attribute "using"
    # P: Type of "using" is unknown
    # P: Cannot access attribute "using" for class "HalfEdge[StandardDispatchOutput[Payload], StandardCombineInput, FlatRowsInput, StandardCarry]"


def transition_given_a_tensor(runner: Runner[FlatRowsInput, SummedRowsOutput], rows: Tensor) -> None:
    ROW.using(runner)(rows)
    # E: Argument 1 has incompatible type "Tensor"; expected "StandardDispatchOutput[Payload]"
    # P: "Tensor" cannot be assigned to parameter of type "StandardDispatchOutput[Payload]"


def transition_that_ends_elsewhere(
    runner: Runner[FlatRowsInput, SummedRowsOutput], dispatched: StandardDispatchOutput[Bf16Rows]
) -> ArenaCombineInput:
    return ROW.using(runner)(dispatched)
    # E: Incompatible return value type (got "StandardCombineInput", expected "ArenaCombineInput")
    # P: Type "StandardCombineInput" is not assignable to return type "ArenaCombineInput"

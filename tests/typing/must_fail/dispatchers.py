"""What one dispatcher sends out comes home to that dispatcher alone."""

from typing import ClassVar, TypeVar, final

from torch import Tensor
from typing_extensions import override

from moe_typed import (
    Bf16Rows,
    CombineInput,
    Dispatcher,
    DispatchOutput,
    Experts,
    LocalIds,
    LogicalIds,
    Payload,
    Routing,
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
    bf16_as_is,
    boundary,
)
from moe_typed.runners import ReferenceDenseWeights

P_co = TypeVar("P_co", bound=Payload, covariant=True)
Q = TypeVar("Q", bound=Payload)


@final
@boundary
class ArenaCombineInput(CombineInput):
    hidden_states: Tensor


@final
@boundary
class ArenaDispatchOutput(DispatchOutput[P_co, ArenaCombineInput]):
    combine_input: ClassVar[type[CombineInput]] = ArenaCombineInput
    payload: P_co
    routing: Routing[LocalIds]

    @property
    @override
    def live_rows(self) -> Tensor | None:
        return None

    @override
    def with_payload(self, payload: Q) -> "ArenaDispatchOutput[Q]":
        return ArenaDispatchOutput(payload, self.routing)


Arena = Dispatcher[Bf16Rows, Bf16Rows, ArenaCombineInput]


def combine_of_another(rows: Bf16Rows, routing: Routing[LogicalIds], weights: ReferenceDenseWeights, arena: Arena) -> None:
    standard = StandardDispatcher(bf16_as_is)
    combine_input = Experts(weights)(standard.dispatch(rows, routing))
    arena.combine(combine_input)
    # E: Argument 1 to "combine" of "Dispatcher" has incompatible type "StandardCombineInput"; expected "ArenaCombineInput"
    # P: "StandardCombineInput" cannot be assigned to parameter "combine_input" of type "ArenaCombineInput"


def the_reverse(rows: Bf16Rows, routing: Routing[LogicalIds], weights: ReferenceDenseWeights, arena: Arena) -> None:
    combine_input = Experts(weights)(arena.dispatch(rows, routing))
    StandardDispatcher(bf16_as_is).combine(combine_input)
    # E: Argument 1 to "combine" of "StandardDispatcher" has incompatible type "ArenaCombineInput"; expected "StandardCombineInput"
    # P: "ArenaCombineInput" cannot be assigned to parameter "combine_input" of type "StandardCombineInput"


def combine_of_a_dispatch_output(dispatched: StandardDispatchOutput[Bf16Rows]) -> None:
    StandardDispatcher(bf16_as_is).combine(dispatched)
    # E: Argument 1 to "combine" of "StandardDispatcher" has incompatible type "StandardDispatchOutput[Bf16Rows]"; expected "StandardCombineInput"
    # P: "StandardDispatchOutput[Bf16Rows]" cannot be assigned to parameter "combine_input" of type "StandardCombineInput"


def experts_promised_for_another(weights: ReferenceDenseWeights, dispatched: ArenaDispatchOutput[Bf16Rows]) -> StandardCombineInput:
    return Experts(weights)(dispatched)
    # E: Incompatible return value type (got "ArenaCombineInput", expected "StandardCombineInput")
    # P: Type "ArenaCombineInput" is not assignable to return type "StandardCombineInput"


def bound_for_another(weights: ReferenceDenseWeights, dispatched: StandardDispatchOutput[Bf16Rows]) -> None:
    Experts(weights).bind(ArenaDispatchOutput[Bf16Rows])(dispatched)
    # E: Argument 1 has incompatible type "StandardDispatchOutput[Bf16Rows]"
    # E: expected "DispatchOutput[Bf16Rows | Fp16Rows | Fp32Rows, ArenaCombineInput]"
    # P: "StandardDispatchOutput[Bf16Rows]" cannot be assigned to parameter of type "DispatchOutput[AnyDenseRows, ArenaCombineInput]"


def dispatcher_that_returns_another(arena: Arena) -> Dispatcher[Bf16Rows, Bf16Rows, StandardCombineInput]:
    return arena
    # E: Incompatible return value type (got "Dispatcher[Bf16Rows, Bf16Rows, ArenaCombineInput, LogicalIds, Tensor]"
    # E: expected "Dispatcher[Bf16Rows, Bf16Rows, StandardCombineInput, LogicalIds, Tensor]")
    # P: Type "Arena" is not assignable to return type "Dispatcher[Bf16Rows, Bf16Rows
    # P: Type parameter "C@Dispatcher" is invariant, but "ArenaCombineInput" is not the same as "StandardCombineInput"


@final
class Confused(Dispatcher[Bf16Rows, Bf16Rows, ArenaCombineInput]):
    @property
    @override
    def variant(self) -> type[DispatchOutput[Bf16Rows, StandardCombineInput]]:
        # E: Signature of "variant" incompatible with supertype "Dispatcher"
        # P: Return type mismatch: base method returns type "type[DispatchOutput[Bf16Rows, ArenaCombineInput]]", override returns type
        return StandardDispatchOutput

    @property
    @override
    def payload(self) -> type[Bf16Rows]:
        return Bf16Rows

    @override
    def dispatch(self, rows: Bf16Rows, routing: Routing[LogicalIds]) -> StandardDispatchOutput[Bf16Rows]:
        # E: Return type "StandardDispatchOutput[Bf16Rows]" of "dispatch" incompatible with return type "DispatchOutput[Bf16Rows, ArenaCombineInput]"
        # E: in supertype "moe_typed.dispatchers.base.Dispatcher"
        # P: Return type mismatch: base method returns type "DispatchOutput[Bf16Rows, ArenaCombineInput]", override returns type
        raise NotImplementedError

    @override
    def combine(self, combine_input: StandardCombineInput) -> Tensor:
        # E: Argument 1 of "combine" is incompatible with supertype "moe_typed.dispatchers.base.Dispatcher"
        # E: supertype defines the argument type as "ArenaCombineInput"
        # P: Parameter 2 type mismatch: base parameter is type "ArenaCombineInput", override parameter is type "StandardCombineInput"
        raise NotImplementedError

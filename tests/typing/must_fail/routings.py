"""Ids in the wrong space, and a routed scaling factor in the wrong place."""

from torch import Tensor

from moe_typed import (
    Bf16Rows,
    GroupedTopK,
    LocalIds,
    LocalSinkIds,
    LogicalIds,
    Pending,
    PhysicalIds,
    Routing,
    Settled,
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
    bf16_as_is,
    localize,
)
from moe_typed.stages import FlatRowsInput


def physical_for_local(rows: Bf16Rows, routing: Routing[PhysicalIds]) -> None:
    StandardDispatchOutput(rows, routing)
    # E: Argument 2 to "StandardDispatchOutput" has incompatible type "Routing[PhysicalIds, RoutedScaling]"
    # E: expected "Routing[LocalIds, RoutedScaling]"
    # P: Type parameter "I_co@Routing" is covariant, but "PhysicalIds" is not a subtype of "LocalIds"


def logical_for_local(rows: Bf16Rows, routing: Routing[LogicalIds]) -> None:
    FlatRowsInput(rows, routing)
    # E: Argument 2 to "FlatRowsInput" has incompatible type "Routing[LogicalIds, RoutedScaling]"; expected "Routing[LocalIds, RoutedScaling]"
    # P: Type parameter "I_co@Routing" is covariant, but "LogicalIds" is not a subtype of "LocalIds"


def sink_for_local(rows: Bf16Rows, routing: Routing[LocalSinkIds]) -> None:
    FlatRowsInput(rows, routing)
    # E: Argument 2 to "FlatRowsInput" has incompatible type "Routing[LocalSinkIds, RoutedScaling]"; expected "Routing[LocalIds, RoutedScaling]"
    # P: Type parameter "I_co@Routing" is covariant, but "LocalSinkIds" is not a subtype of "LocalIds"


def local_for_logical(rows: Bf16Rows, routing: Routing[LocalIds]) -> None:
    StandardDispatcher(bf16_as_is).dispatch(rows, routing)
    # E: Argument 2 to "dispatch" of "StandardDispatcher" has incompatible type "Routing[LocalIds, RoutedScaling]"
    # E: expected "Routing[LogicalIds, RoutedScaling]"
    # P: Type parameter "I_co@Routing" is covariant, but "LocalIds" is not a subtype of "LogicalIds"


def local_for_physical(routing: Routing[LocalIds]) -> Routing[PhysicalIds]:
    return routing
    # E: Incompatible return value type (got "Routing[LocalIds, RoutedScaling]", expected "Routing[PhysicalIds, RoutedScaling]")
    # P: Type "Routing[LocalIds, RoutedScaling]" is not assignable to return type "Routing[PhysicalIds, RoutedScaling]"


def local_for_sink(routing: Routing[LocalIds]) -> Routing[LocalSinkIds]:
    return routing
    # E: Incompatible return value type (got "Routing[LocalIds, RoutedScaling]", expected "Routing[LocalSinkIds, RoutedScaling]")
    # P: Type "Routing[LocalIds, RoutedScaling]" is not assignable to return type "Routing[LocalSinkIds, RoutedScaling]"


def mapped_twice(routing: Routing[LogicalIds]) -> None:
    localize(localize(routing, 0, 4), 0, 4)
    # E: Argument 1 to "localize" has incompatible type "Routing[LocalIds, RoutedScaling]"; expected "Routing[LogicalIds, RoutedScaling]"
    # P: Type parameter "I_co@Routing" is covariant, but "LocalIds" is not a subtype of "LogicalIds"


def relabelled(ids: Tensor, weights: Tensor) -> Routing[LocalIds, Settled]:
    return Routing(ids, weights, PhysicalIds, 8, Settled(), True, 4)
    # E: Argument 3 to "Routing" has incompatible type "type[PhysicalIds]"; expected "type[LocalIds]"
    # P: Type "Routing[PhysicalIds, Settled]" is not assignable to return type "Routing[LocalIds, Settled]"


def pending_where_settled_is_demanded(rule: GroupedTopK[Pending], logits: Tensor) -> Routing[LogicalIds, Settled]:
    return rule.route(logits)
    # E: Incompatible return value type (got "Routing[LogicalIds, Pending]", expected "Routing[LogicalIds, Settled]")
    # P: Type "Routing[LogicalIds, Pending]" is not assignable to return type "Routing[LogicalIds, Settled]"


def settled_where_pending_is_demanded(routing: Routing[LogicalIds, Settled]) -> Routing[LogicalIds, Pending]:
    return routing
    # E: Incompatible return value type (got "Routing[LogicalIds, Settled]", expected "Routing[LogicalIds, Pending]")
    # P: Type "Routing[LogicalIds, Settled]" is not assignable to return type "Routing[LogicalIds, Pending]"


def unknown_where_settled_is_demanded(routing: Routing[LogicalIds]) -> Routing[LogicalIds, Settled]:
    return routing
    # E: Incompatible return value type (got "Routing[LogicalIds, RoutedScaling]", expected "Routing[LogicalIds, Settled]")
    # P: Type "Routing[LogicalIds, RoutedScaling]" is not assignable to return type "Routing[LogicalIds, Settled]"


def pending_through_localize(routing: Routing[LogicalIds, Pending]) -> Routing[LocalIds, Settled]:
    return localize(routing, 0, 4)
    # E: Argument 1 to "localize" has incompatible type "Routing[LogicalIds, Pending]"; expected "Routing[LogicalIds, Settled]"
    # P: Type "Routing[LocalIds, Pending]" is not assignable to return type "Routing[LocalIds, Settled]"


def scaling_forgotten(hidden_states: Tensor) -> None:
    StandardCombineInput(hidden_states)
    # E: Missing positional argument "scaling" in call to "StandardCombineInput"
    # P: Argument missing for parameter "scaling"


def factor_for_scaling(hidden_states: Tensor) -> None:
    StandardCombineInput(hidden_states, 2.5)
    # E: Argument 2 to "StandardCombineInput" has incompatible type "float"; expected "RoutedScaling"
    # P: "float" cannot be assigned to parameter "scaling" of type "RoutedScaling"

"""Boundary objects are immutable, and built from exactly their fields."""

import attrs
from torch import Tensor

from moe_typed import Bf16Rows, Fp8Block128Rows, MxFp8Rows, Pending, Settled, StandardDispatchOutput
from moe_typed.routing import LocalIds, Routing


def assigned(rows: Fp8Block128Rows, scale: Tensor) -> None:
    rows.scale = scale
    # E: Property "scale" defined in "Fp8Block128Rows" is read-only
    # P: Attribute "scale" is read-only


def added(rows: Bf16Rows, scale: Tensor) -> None:
    rows.scale = scale
    # E: "Bf16Rows" has no attribute "scale"
    # P: Attribute "scale" is unknown


def missing(data: Tensor) -> None:
    Fp8Block128Rows(data)
    # E: Missing positional argument "scale" in call to "Fp8Block128Rows"
    # P: Argument missing for parameter "scale"


def extra(data: Tensor, scale: Tensor) -> None:
    Bf16Rows(data, scale)
    # E: Too many arguments for "Bf16Rows"
    # P: Expected 1 positional argument


def misnamed(data: Tensor, scale: Tensor) -> None:
    MxFp8Rows(data=data, scales=scale)
    # E: Unexpected keyword argument "scales" for "MxFp8Rows"; did you mean "scale"?
    # P: Argument missing for parameter "scale"
    # P: No parameter named "scales"


def wrong_class(rows: Bf16Rows, routing: Routing[LocalIds]) -> None:
    StandardDispatchOutput(routing, rows)
    # E: Value of type variable "P_co" of "StandardDispatchOutput" cannot be "Routing[LocalIds, RoutedScaling]"
    # E: Argument 2 to "StandardDispatchOutput" has incompatible type "Bf16Rows"; expected "Routing[LocalIds, RoutedScaling]"
    # P: "Routing[LocalIds, RoutedScaling]" is not assignable to "Payload"
    # P: "Bf16Rows" cannot be assigned to parameter "routing" of type "Routing[LocalIds, RoutedScaling]"


def evolved(scaling: Pending) -> None:
    attrs.evolve(scaling, factor="2.5")
    # E: Argument "factor" to "evolve" of "Pending" has incompatible type "str"; expected "float"
    # P: -


def evolved_into_a_new_field(scaling: Pending) -> None:
    attrs.evolve(scaling, scale=2.5)
    # E: Unexpected keyword argument "scale" for "evolve" of "Pending"
    # P: -


def in_place_of_another(scaling: Pending) -> Settled:
    return scaling
    # E: Incompatible return value type (got "Pending", expected "Settled")
    # P: Type "Pending" is not assignable to return type "Settled"

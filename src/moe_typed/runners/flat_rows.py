"""Into flat rows and back: the pre and post functions of the rows of the table that end at FlatRowsInput."""

from ..formats import Payload
from ..stages import FlatRowsInput, StandardCarry, StandardCombineInput, StandardDispatchOutput, SummedRowsOutput


def standard_pre(dispatched: StandardDispatchOutput[Payload]) -> tuple[FlatRowsInput, StandardCarry]:
    """Hand the rows over as they are: Standard and flat rows agree on order, id space and router-weight state."""
    routing = dispatched.routing
    return FlatRowsInput(dispatched.payload, routing), StandardCarry(routing.scaling)


def standard_post(output: SummedRowsOutput, carry: StandardCarry) -> StandardCombineInput:
    """Bring the results together with the scaling that combine settles."""
    return StandardCombineInput(output.hidden_states, carry.scaling)

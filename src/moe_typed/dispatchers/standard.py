"""The standard dispatcher: one rank holds every expert, and nothing is sent."""

from typing import TypeVar, final

from torch import Tensor
from typing_extensions import override

from ..formats import Conversion, Payload
from ..routing import LogicalIds, Routing, live_tensor, localize
from ..stages import DispatchOutput, StandardCombineInput, StandardDispatchOutput
from .base import Dispatcher

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)


@final
class StandardDispatcher(Dispatcher[M_contra, P_co, StandardCombineInput]):
    """Hand rows to the experts of this rank; ``wire`` is the conversion that they pass on the way (``bf16_as_is``: none)."""

    def __init__(self, wire: Conversion[M_contra, P_co]) -> None:
        self.wire = wire

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, StandardCombineInput]]:
        return StandardDispatchOutput

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.wire.target

    @override
    def dispatch(self, rows: M_contra, routing: Routing[LogicalIds]) -> StandardDispatchOutput[P_co]:
        return StandardDispatchOutput(self.wire.run(rows, live_tensor(routing.live, routing.topk_ids)), localize(routing, 0, routing.num_experts))

    @override
    def combine(self, combine_input: StandardCombineInput) -> Tensor:
        return combine_input.scaling.settle(combine_input.hidden_states)

"""Standard: no communication. Rows stay where they are, and every expert they go to is on this rank."""

from typing import ClassVar, TypeVar, final

from torch import Tensor
from typing_extensions import override

from ..boundary import Floating, boundary
from ..formats import Payload
from ..routing import LocalIds, RoutedScaling, Routing, live_tensor
from .base import Carry, CombineInput, DispatchOutput

P_co = TypeVar("P_co", bound=Payload, covariant=True)
Q = TypeVar("Q", bound=Payload)


@final
@boundary
class StandardCombineInput(CombineInput):
    """Expert results in source order: router weights applied, summed over k, the routed scaling factor as ``scaling`` says.

    ``hidden_states``: bf16, fp16 or fp32 (rows, hidden); padding rows are zero.
    """

    hidden_states: Floating[Tensor, "rows hidden"]
    scaling: RoutedScaling


@final
@boundary
class StandardDispatchOutput(DispatchOutput[P_co, StandardCombineInput]):
    """Rows in source order (flat), local ids with -1, router weights pending, live rows as the routing says; the payload is owned."""

    combine_input: ClassVar[type[CombineInput]] = StandardCombineInput
    payload: P_co
    routing: Routing[LocalIds]

    def check_values(self) -> None:
        """Raise BoundaryError for live rows whose data cannot be right."""
        self.payload.check_live(self.routing.count_live())

    @property
    @override
    def live_rows(self) -> Tensor | None:
        return live_tensor(self.routing.live, self.routing.topk_ids)

    @override
    def with_payload(self, payload: Q) -> "StandardDispatchOutput[Q]":
        return StandardDispatchOutput(payload, self.routing)


@final
@boundary
class StandardCarry(Carry):
    """What combine needs to know beside the expert results."""

    scaling: RoutedScaling

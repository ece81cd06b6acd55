"""DeepEP, normal mode: one row for each (token, rank) pair."""

from typing import ClassVar, TypeVar, final

from jaxtyping import BFloat16
from torch import Tensor
from typing_extensions import override

from ..boundary import boundary, value_error
from ..formats import Payload
from ..routing import LocalIds, RoutedScaling, Routing, live_tensor
from .base import Carry, CombineInput, DispatchOutput
from .counts import PaddedReceivedPerExpert
from .handles import Handle

P_co = TypeVar("P_co", bound=Payload, covariant=True)
Q = TypeVar("Q", bound=Payload)


@final
class DeepEPNormalHandle(Handle[tuple[object, ...]]):
    """The tuple that ``Buffer.dispatch`` returned."""


@final
@boundary
class DeepEPNormalCombineInput(CombineInput):
    """Expert results in the order of the received rows: router weights applied, this rank's experts summed.

    DeepEP adds the ranks' rows as they are. ``hidden_states``: bf16 (rows, hidden).
    """

    hidden_states: BFloat16[Tensor, "rows hidden"]
    routing: Routing[LocalIds]
    handle: DeepEPNormalHandle

    @property
    def scaling(self) -> RoutedScaling:
        """Return the scaling that combine settles."""
        return self.routing.scaling


@final
@boundary
class DeepEPNormalDispatchOutput(DispatchOutput[P_co, DeepEPNormalCombineInput]):
    """Rows by source rank and token (flat), ids of this rank's experts with -1 for those of others, router weights pending; the payload is owned.

    ``received``: what the host was told of each expert; None where the host did not wait (``num_worst_tokens``), and rows that are not real have
    -1 alone.
    """

    combine_input: ClassVar[type[CombineInput]] = DeepEPNormalCombineInput
    payload: P_co
    routing: Routing[LocalIds]
    received: PaddedReceivedPerExpert | None
    handle: DeepEPNormalHandle

    def check_values(self) -> None:
        """Raise BoundaryError for counts of another number of experts, and for rows with a route whose data cannot be right."""
        if self.received is not None and len(self.received.counts) != self.routing.num_experts:
            raise value_error(self, "received", f"counts {len(self.received.counts)} experts; the routing is over {self.routing.num_experts}")
        self.payload.check_live((self.routing.topk_ids >= 0).any(1))

    @property
    @override
    def live_rows(self) -> Tensor | None:
        return live_tensor(self.routing.live, self.routing.topk_ids)

    @override
    def with_payload(self, payload: Q) -> "DeepEPNormalDispatchOutput[Q]":
        return DeepEPNormalDispatchOutput(payload, self.routing, self.received, self.handle)

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)


@final
@boundary
class DeepEPNormalCarry(Carry):
    """What combine needs beside the expert results."""

    routing: Routing[LocalIds]
    handle: DeepEPNormalHandle

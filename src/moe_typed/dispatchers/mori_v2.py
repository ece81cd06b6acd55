"""MoRI v2 (``mori.ops.dispatch_combine_v2.EpDispatchCombineOp``): one node, normal mode."""

from collections.abc import Callable
from typing import ClassVar, Final, Literal, Protocol, TypeVar, cast, final

import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Conversion, Payload
from ..routing import PhysicalIds, Residence, Routing
from ..stages import DispatchOutput, Handle, MoriEPNormalCombineInput, MoriEPNormalDispatchOutput, MoriEPNormalHandle
from .arena import PairedArena
from .mori_base import Arrival, MoriDispatcher, MoriTicket
from .mori_config import MoriV2Config
from .receive import ReceiveCap, WholeArena

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
H = TypeVar("H")

_WHOLE: Final = WholeArena()


class MoriV2Op(Protocol[H]):
    """What is called of the op; ``H`` is its ``EpDispatchRoutingHandle``."""

    @property
    def cfg(self) -> MoriV2Config:
        """Return the config that the op was made with."""
        ...

    def dispatch(
        self,
        input: Tensor,  # noqa: A002 - the name that the library has
        weights: Tensor | None,
        scales: Tensor | None,
        indices: Tensor,
        *,
        return_routing: Literal[True],
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor, H]:
        """Send each row once to each rank of its ids."""
        ...

    def combine(self, input: Tensor, *, routing: H) -> tuple[Tensor, Tensor | None]:  # noqa: A002 - the name that the library has
        """Return the plain sum of the ranks' rows."""
        ...

    def combine_in_view(self) -> Tensor:
        """Return the memory that combine reads: results that stand there already are not copied."""
        ...

    def reset(self) -> None:
        """Set the counters back, together with all ranks."""
        ...


@final
class MoriV2Dispatcher(MoriDispatcher[M_contra, P_co, MoriEPNormalCombineInput, MoriEPNormalDispatchOutput[P_co]]):
    """MoRI v2. Where combine gathers, the dispatch output has the staging view, and a runner that writes there saves a copy.

    Raises: as the base; ValueError for an op that carries another dtype than the wire's, or combines another one than bf16.
    """

    library: ClassVar[str] = "MoRI v2"

    def __init__(
        self,
        op: MoriV2Op[H],
        wire: Conversion[M_contra, P_co],
        residence: Residence[PhysicalIds],
        *,
        arena: PairedArena,
        cap: ReceiveCap = _WHOLE,
        own_result: bool = True,
    ) -> None:
        config = op.cfg
        super().__init__(config, op.reset, wire, residence, cap=cap, own_result=own_result, arena=arena)
        carried, combined = config.dispatch_data_type or config.data_type, config.combine_data_type or config.data_type
        if (carried, combined) != (wire.target.format.data_dtype, torch.bfloat16):
            wanted = f"dispatches {wire.target.format.data_dtype} and combines torch.bfloat16"
            raise ValueError(f"an op is needed that {wanted}; this one was made for {carried} and {combined}")
        self._op = cast("MoriV2Op[object]", op)  # it is given its own handles alone
        self._has_staging = config.combine_mode == "gather"  # what scatters reads another layout

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, MoriEPNormalCombineInput]]:
        return MoriEPNormalDispatchOutput

    @override
    def dispatch(self, rows: M_contra, routing: Routing[PhysicalIds]) -> MoriEPNormalDispatchOutput[P_co]:
        return self._start(rows, routing).wait()

    @override
    def _send(self, data: Tensor, weights: Tensor, scales: Tensor | None, ids: Tensor) -> Arrival:
        out, out_weights, out_scales, out_ids, total, routing = self._op.dispatch(data, weights, scales, ids, return_routing=True)
        return Arrival((out, out_weights, out_scales, out_ids, total), routing)

    @override
    def _fetch(self, hidden_states: Tensor, ticket: MoriTicket) -> tuple[Tensor, Callable[[], None] | None]:
        return self._op.combine(hidden_states, routing=ticket.routing)[0], None

    @override
    def _promise(
        self, arrival: Arrival, ticket: MoriTicket, origin: Routing[PhysicalIds]
    ) -> tuple[Handle[object], Callable[[], MoriEPNormalDispatchOutput[P_co]]]:
        handle = MoriEPNormalHandle(ticket, self)
        staging = self._op.combine_in_view() if self._has_staging else None
        return handle, lambda: MoriEPNormalDispatchOutput(*self._arrived(arrival, origin), self.residence, origin, torch.bfloat16, handle, staging)

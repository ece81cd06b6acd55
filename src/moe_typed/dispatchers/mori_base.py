"""What the dispatchers over MoRI have in common.

MoRI carries scales as bytes that it does not know: the format is an agreement of the ranks, and the config is checked against it here.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, Generic, TypeAlias, TypeVar, cast, final

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad
from typing_extensions import override

from ..formats import Conversion, Payload, head
from ..routing import DeviceCount, PhysicalIds, Residence, Routing, contiguous_residence, live_mask
from ..stages import CombineInput, Handle, MoriCombineInput, MoriDispatchOutput
from .arena import PairedArena
from .base import Dispatcher
from .errors import LibraryError
from .mori_config import MoriConfig
from .outgoing import OutgoingRows, check_capacity, refuse_tracing, same_origin
from .pending import PendingCombine, PendingDispatch
from .receive import ReceiveCap, WholeArena
from .spread import ExpertSpread
from .wire import BY_ROW, rebuild, require_carried, scale_of

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
C = TypeVar("C", bound=MoriCombineInput)
D_co = TypeVar("D_co", bound=MoriDispatchOutput[Payload, CombineInput], covariant=True)

Received: TypeAlias = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]

_WHOLE: Final = WholeArena()


@final
@attrs.frozen(eq=False)
class MoriTicket:
    """What combine needs: the ids that were sent, of how many rows and which routing, and the library's handle where it has one."""

    ids: Tensor
    rows: int
    origin: Routing[PhysicalIds]
    routing: object


@final
@attrs.frozen(eq=False)
class Arrival:
    """What a library's dispatch returned: rows, weights, scales, ids, the total on the device; and its handle.

    ``receive``: what makes all of it valid, where that is a step of its own.
    """

    received: Received
    routing: object = None
    receive: Callable[[], None] | None = None


class MoriDispatcher(Dispatcher[M_contra, P_co, C, PhysicalIds], Generic[M_contra, P_co, C, D_co]):
    """The base of dispatchers over MoRI.

    ``wire``: what is sent; the op's config must have room for exactly this. ``residence``: the slots of this rank. ``cap``: how much of the arena
    is looked at. ``own_result``: combine returns memory of its own; without it, a view that the next combine overwrites. ``arena``: one for
    each op, which all dispatchers over it are given: none of them sees what the others dispatch.

    Every route must go somewhere (``routing.fill_nowhere``): MoRI's kernels disagree on -1. Rows that are padding by a count on the host are not
    sent; by a count on the device they are, hence must hold finite numbers. Either way they come home as zeros.

    The total received is the op's own tensor, which combine sets to 0. Nothing reads it later: the experts run before combine on the same stream, and
    the rows that it counts belong to the next dispatch then.

    Raises: UnsupportedError for a payload that MoRI cannot carry; ValueError for a config that does not fit the payload, and for a residence of other
    slots than those that MoRI sends to this rank, whose rows would all go nowhere (read once, when the dispatcher is made).
    """

    library: ClassVar[str]

    def __init__(
        self,
        config: MoriConfig,
        reset: Callable[[], None],
        wire: Conversion[M_contra, P_co],
        residence: Residence[PhysicalIds],
        *,
        arena: PairedArena,
        cap: ReceiveCap = _WHOLE,
        own_result: bool = True,
    ) -> None:
        require_carried(wire.target, BY_ROW, self.library)
        check_scales(config, wire.target)
        self.spread = ExpertSpread(config.rank, config.world_size, config.world_size * config.num_experts_per_rank)
        slots, held = residence.mask.mask.shape[0], residence.map.num_local
        if (slots, held) != (self.spread.num_experts, self.spread.local):
            raise ValueError(f"the residence is of {held} of {slots} slots, but the op's of {self.spread.local} of {self.spread.num_experts}")
        sent_here = contiguous_residence(PhysicalIds, slots, self.spread.first, held, residence.mask.mask.device)
        if not (torch.equal(residence.mask.mask, sent_here.mask.mask) and torch.equal(residence.map.local, sent_here.map.local)):
            last = self.spread.first + held - 1
            raise ValueError(f"the residence is not of slots {self.spread.first} to {last} in order, which MoRI sends to rank {self.spread.rank}")
        self.wire = wire
        self.residence = residence
        self.cap = cap
        self.own_result = own_result
        self.arena = arena
        self._config = config
        self._reset = reset

    @override
    def __repr__(self) -> str:
        where = f"rank {self.spread.rank} of {self.spread.ranks}"
        shared = "" if self.own_result else ", own_result=False"
        settings = f"{self.cap!r}, quant_type={self._config.quant_type!r}{shared}"
        return f"{type(self).__qualname__}({self.wire.name}, {where}, max_tokens={self._config.max_num_inp_token_per_rank}, {settings})"

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.wire.target

    @override
    def combine(self, combine_input: C) -> Tensor:
        return self._start_combine(combine_input).wait()

    def reset(self) -> None:
        """Set the library's counters back after a dispatch without a combine: a collective, called on every rank."""
        self._reset()
        self.arena.settle()

    @abstractmethod
    def _send(self, data: Tensor, weights: Tensor, scales: Tensor | None, ids: Tensor) -> Arrival:
        """Call the library's dispatch."""

    @abstractmethod
    def _fetch(self, hidden_states: Tensor, ticket: MoriTicket) -> tuple[Tensor, Callable[[], None] | None]:
        """Call the library's combine; return the rows, and what makes them valid, where that is a step of its own."""

    @abstractmethod
    def _promise(self, arrival: Arrival, ticket: MoriTicket, origin: Routing[PhysicalIds]) -> tuple[Handle[object], Callable[[], D_co]]:
        """Return the handle, and what makes the output once the rows are there."""

    def _start(self, rows: M_contra, routing: Routing[PhysicalIds]) -> PendingDispatch[D_co]:
        refuse_tracing(self)
        routing.demand(PhysicalIds)
        self.spread.demand(rows.rows, routing)
        OutgoingRows(rows, routing)
        config = self._config
        if (rows.hidden, routing.topk_ids.shape[1]) != (config.hidden_dim, config.num_experts_per_token):
            expected = f"{config.hidden_dim} values and {config.num_experts_per_token} routes"
            raise ValueError(f"the op is made for rows of {expected}; got {rows.hidden} and {routing.topk_ids.shape[1]}")
        sent = routing.live if isinstance(routing.live, int) else rows.rows
        check_capacity(sent, config.max_num_inp_token_per_rank)
        bound = self.cap.bound(self.spread, sent)
        payload = head(self.wire.run(rows), sent)
        scale = scale_of(payload)
        ids = routing.topk_ids[:sent].contiguous()
        weights = routing.topk_weights[:sent].contiguous()
        self.arena.claim()
        arrival = self._send(payload.data.contiguous(), weights, None if scale is None else scale.contiguous(), ids)
        handle, deliver = self._promise(arrival, MoriTicket(ids, rows.rows, routing, arrival.routing), routing)
        self.arena.hold(handle)

        def finish() -> D_co:
            if arrival.receive is not None:
                arrival.receive()
            self.cap.verify(arrival.received[4])
            output = deliver()
            return output if bound is None else output.capped(min(bound, output.payload.rows))

        return PendingDispatch(finish, handle)

    def _arrived(self, arrival: Arrival, sent: Routing[PhysicalIds]) -> tuple[P_co, Routing[PhysicalIds]]:
        """Return payload and routing of the arena."""
        data, weights, scales, ids, total = arrival.received
        payload = rebuild(self.wire.target, data, None if scales is None else self._scales(scales))
        live = DeviceCount(total)
        routing = Routing(ids, weights, PhysicalIds, self.spread.num_experts, sent.scaling, sent.renormalized, live, sent.num_shared)
        return payload, routing

    def _scales(self, scales: Tensor) -> Tensor:
        """Return scales in their dtype; version 2 returns words of four bytes, of which there may be more than the scales fill."""
        spec = self.wire.target.format.scale
        if spec is None:
            raise LibraryError(f"{self.library} returned scales of rows that have none")
        return scales if scales.dtype == spec.dtype else scales.view(spec.dtype)[:, : self._config.scale_dim].contiguous()

    def _start_combine(self, combine_input: C) -> PendingCombine:
        refuse_tracing(self)
        handle, origin = combine_input.handle, combine_input.origin
        ticket = cast("MoriTicket", handle.consume(self))  # the owner that it is given to made it
        try:
            same_origin(combine_input, origin, ticket.origin)
            combined, receive = self._fetch(combine_input.hidden_states.contiguous(), ticket)
        except Exception as error:
            handle.fail(error)
            raise

        def finish() -> Tensor:
            if receive is not None:
                receive()
            self.arena.settle()
            return self._home(combined, ticket, origin)

        return PendingCombine(finish, handle)

    def _home(self, combined: Tensor, ticket: MoriTicket, origin: Routing[PhysicalIds]) -> Tensor:
        """Return the rows that this rank sent, scaled; zeros for padding."""
        sent = ticket.ids.shape[0]
        result = mine = combined[:sent]
        if sent < ticket.rows:
            result = pad(mine, (0, 0, 0, ticket.rows - sent))
        elif isinstance(origin.live, DeviceCount):
            result = torch.where(live_mask(origin), mine, 0.0)
        result = origin.scaling.settle(result)
        return result.clone() if self.own_result and result is mine else result


def check_scales(config: MoriConfig, payload: type[Payload]) -> None:
    """Raise ValueError for a config whose scales are not those of the payload: MoRI would cut or misplace their bytes without a word."""
    spec = payload.format.scale
    wanted = (0, 0) if spec is None else (config.hidden_dim // spec.group[1], spec.dtype.itemsize)
    size = config.scale_type_size if config.scale_dim else 0
    if (config.scale_dim, size) != wanted:
        raise ValueError(
            f"{payload.__qualname__} of {config.hidden_dim} values needs scale_dim={wanted[0]} and scale_type_size={wanted[1]}; "
            f"the op was made with {config.scale_dim} and {config.scale_type_size}"
        )

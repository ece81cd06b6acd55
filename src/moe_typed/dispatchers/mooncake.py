"""Mooncake EP (``mooncake.mooncake_ep_buffer.Buffer``)."""

from collections.abc import Callable
from typing import ClassVar, Protocol, TypeAlias, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Bf16Rows, Fp8Block128Rows, Fp8Block128SlabRows, Payload
from ..routing import Routing, SlotIds
from ..stages import DispatchOutput, Handle, MooncakeCombineInput, MooncakeDispatchOutput, MooncakeHandle
from .arena import RingArena
from .low_latency import LL_BF16, LL_FP8, LL_FP8_ROWS, Hook, LowLatencyWire, Received, Sent, SlabDispatcher, Ticket
from .spread import ExpertSpread

P_co = TypeVar("P_co", bound=Bf16Rows | Fp8Block128SlabRows | Fp8Block128Rows, covariant=True)

_Handle: TypeAlias = tuple[Tensor, Tensor, int, int, int]


class MooncakeBuffer(Protocol):
    """What is called of Mooncake's ``Buffer``."""

    @property
    def rank(self) -> int:
        """Return which rank of its group this is."""
        ...

    @property
    def group_size(self) -> int:
        """Return how many ranks the group has."""
        ...

    def dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        active_ranks: Tensor | None,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        timeout_us: int,
        use_fp8: bool,
        *,
        return_recv_hook: bool,
    ) -> tuple[Received, Tensor, _Handle, object, Hook | None]:
        """Send each row once to each of its experts."""
        ...

    def combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        active_ranks: Tensor | None,
        timeout_us: int,
        handle: _Handle,
        *,
        return_recv_hook: bool,
    ) -> tuple[Tensor, object, Hook | None]:
        """Return the weighted sum of the experts' rows."""
        ...


@final
class MooncakeDispatcher(SlabDispatcher[P_co, MooncakeCombineInput, MooncakeDispatchOutput[P_co], _Handle]):
    """Mooncake.

    ``active_ranks``: int32 (ranks,), 1 for a rank that answers; a timeout of ``timeout_us`` microseconds sets a 0, and the experts of such a rank are
    left out of the sum, whose weights are not renormalised. None: the process group knows. ``timeout_us`` = -1 waits for ever.
    Without RDMA and P2P Mooncake's scales are row-major: say so with the wire ``LL_FP8_ROWS``; what arrives otherwise is refused.
    Raises: as the base; ValueError for a spread over another group than the buffer's, and for a mask of another length or dtype, which Mooncake would
    replace by one of its own.
    """

    library: ClassVar[str] = "Mooncake"
    wires: ClassVar[tuple[LowLatencyWire[Payload], ...]] = (LL_BF16, LL_FP8, LL_FP8_ROWS)

    def __init__(
        self,
        buffer: MooncakeBuffer,
        wire: LowLatencyWire[P_co],
        spread: ExpertSpread,
        *,
        max_tokens: int,
        active_ranks: Tensor | None,
        timeout_us: int,
        arena: RingArena,
    ) -> None:
        super().__init__(wire, spread, max_tokens, torch.int64, arena)
        spread.demand_group(self.library, buffer.rank, buffer.group_size)
        if active_ranks is not None and (active_ranks.dtype != torch.int32 or active_ranks.shape != (spread.ranks,)):
            raise ValueError(f"active_ranks must be int32 ({spread.ranks},); got {active_ranks.dtype} {tuple(active_ranks.shape)}")
        self.active_ranks = active_ranks
        self.timeout_us = timeout_us
        self._buffer = buffer

    @override
    def _settings(self) -> str:
        return f", timeout_us={self.timeout_us}"

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, MooncakeCombineInput]]:
        return MooncakeDispatchOutput

    @override
    def dispatch(self, rows: Bf16Rows, routing: Routing[SlotIds]) -> MooncakeDispatchOutput[P_co]:
        return self._start(rows, routing, hook=False).wait()

    @override
    def _send(self, rows: Tensor, ids: Tensor, hook: bool) -> Sent[_Handle]:
        received, counts, handle, _, arrive = self._buffer.dispatch(
            rows, ids, self.active_ranks, self.max_tokens, self.spread.num_experts, self.timeout_us, self.wire.use_fp8, return_recv_hook=hook
        )
        return Sent(received, counts, handle, arrive)

    @override
    def _fetch(self, hidden_states: Tensor, weights: Tensor, ticket: Ticket[_Handle], hook: bool) -> tuple[Tensor, Hook | None]:
        combined, _, arrive = self._buffer.combine(
            hidden_states, ticket.ids, weights, self.active_ranks, self.timeout_us, ticket.handle, return_recv_hook=hook
        )
        return combined, arrive

    @override
    def _promise(
        self, sent: Sent[_Handle], ticket: Ticket[_Handle], origin: Routing[SlotIds], expected: int
    ) -> tuple[Handle[object], Callable[[], MooncakeDispatchOutput[P_co]]]:
        handle = MooncakeHandle(ticket, self)
        return handle, lambda: MooncakeDispatchOutput(*self._arrived(sent), expected, origin, handle)

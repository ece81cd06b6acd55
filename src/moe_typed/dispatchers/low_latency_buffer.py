"""The calls that DeepEP and NIXL have in common; they differ in their handles and in the dtype of ids."""

from typing import ClassVar, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Payload
from ..stages import CombineInput, DispatchOutput, SlabCombineInput
from .arena import RingArena
from .low_latency import LL_BF16, LL_FP8, LL_FP8_UE8M0, Hook, LowLatencyWire, Received, Sent, SlabDispatcher, Ticket
from .spread import ExpertSpread

P_co = TypeVar("P_co", bound=Payload, covariant=True)
C = TypeVar("C", bound=SlabCombineInput)
D_co = TypeVar("D_co", bound=DispatchOutput[Payload, CombineInput], covariant=True)
T = TypeVar("T")


class LowLatencyBuffer(Protocol[T]):
    """What is called of ``deep_ep.Buffer`` and ``nixl_ep.Buffer``; ``T`` is the handle of the library."""

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        return_recv_hook: bool,
    ) -> tuple[Received, Tensor, T, object, Hook | None]:
        """Send each row once to each of its experts."""
        ...

    def low_latency_combine(
        self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor, handle: T, *, use_logfmt: bool, return_recv_hook: bool
    ) -> tuple[Tensor, object, Hook | None]:
        """Return the weighted sum of the experts' rows."""
        ...


class BufferDispatcher(SlabDispatcher[P_co, C, D_co, T], Generic[P_co, C, D_co, T]):
    """The base of both.

    ``topk_idx_t``: the library's attribute of that name, the dtype of ids that it was built with. ``use_logfmt``: combine sends about 10 bits a
    value. ``arena``: that of the buffer, where layers share one.
    """

    wires: ClassVar[tuple[LowLatencyWire[Payload], ...]] = (LL_BF16, LL_FP8, LL_FP8_UE8M0)

    def __init__(
        self,
        buffer: LowLatencyBuffer[T],
        wire: LowLatencyWire[P_co],
        spread: ExpertSpread,
        *,
        max_tokens: int,
        topk_idx_t: torch.dtype,
        use_logfmt: bool = False,
        arena: RingArena | None = None,
    ) -> None:
        super().__init__(wire, spread, max_tokens, topk_idx_t, arena)
        self.use_logfmt = use_logfmt
        self._buffer = buffer

    @override
    def _settings(self) -> str:
        return ", use_logfmt" if self.use_logfmt else ""

    @override
    def _send(self, rows: Tensor, ids: Tensor, hook: bool) -> Sent[T]:
        wire = self.wire
        received, counts, handle, _, arrive = self._buffer.low_latency_dispatch(
            rows,
            ids,
            self.max_tokens,
            self.spread.num_experts,
            use_fp8=wire.use_fp8,
            round_scale=wire.round_scale,
            use_ue8m0=wire.use_ue8m0,
            return_recv_hook=hook,
        )
        return Sent(received, counts, handle, arrive)

    @override
    def _fetch(self, hidden_states: Tensor, weights: Tensor, ticket: Ticket[T], hook: bool) -> tuple[Tensor, Hook | None]:
        combined, _, arrive = self._buffer.low_latency_combine(
            hidden_states, ticket.ids, weights, ticket.handle, use_logfmt=self.use_logfmt, return_recv_hook=hook
        )
        return combined, arrive

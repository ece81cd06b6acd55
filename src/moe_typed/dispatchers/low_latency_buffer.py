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

    @property
    def rank(self) -> int:
        """Return which rank of its group this is."""
        ...

    @property
    def group_size(self) -> int:
        """Return how many ranks the group has; with NIXL, how many there are room for, or connected, by its version."""
        ...

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
    value. Raises: as the base; ValueError for a spread over another group than the buffer's.
    """

    wires: ClassVar[tuple[LowLatencyWire[Payload], ...]] = (LL_BF16, LL_FP8, LL_FP8_UE8M0)
    fixed_group: ClassVar[bool]  # whether ``group_size`` of the buffer is the number of ranks that experts are spread over

    def __init__(
        self,
        buffer: LowLatencyBuffer[T],
        wire: LowLatencyWire[P_co],
        spread: ExpertSpread,
        *,
        max_tokens: int,
        topk_idx_t: torch.dtype,
        arena: RingArena,
        use_logfmt: bool = False,
    ) -> None:
        super().__init__(wire, spread, max_tokens, topk_idx_t, arena)
        spread.demand_group(self.library, buffer.rank, buffer.group_size if self.fixed_group else None)
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

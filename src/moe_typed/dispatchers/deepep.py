"""DeepEP, normal mode (``deep_ep.Buffer.dispatch`` and ``combine``)."""

from typing import Protocol, TypeAlias, TypeVar, cast, final, overload

import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Conversion, Payload
from ..routing import LocalIds, Routing, SlotIds, live_tensor
from ..stages import DeepEPNormalCombineInput, DeepEPNormalDispatchOutput, DeepEPNormalHandle, DispatchOutput, PaddedReceivedPerExpert
from .base import Dispatcher
from .errors import LibraryError
from .outgoing import OutgoingRows, check_capacity, masked_ids, refuse_tracing
from .spread import ExpertSpread
from .wire import BY_ROW, Carried, from_words, in_words, require_carried

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
K = TypeVar("K")
K_contra = TypeVar("K_contra", contravariant=True)

_Received: TypeAlias = tuple[Carried, Tensor | None, Tensor | None, list[int] | None, tuple[Tensor, ...] | None, object]


class DeepEPNormalBuffer(Protocol[K_contra]):
    """What is called of ``deep_ep.Buffer``; ``K_contra`` is ``deep_ep.Config``."""

    @property
    def rank(self) -> int:
        """Return which rank of its group this is."""
        ...

    @property
    def group_size(self) -> int:
        """Return how many ranks the group has."""
        ...

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, Tensor | None, Tensor, Tensor, object]:
        """Return how many rows go where."""
        ...

    @overload
    def dispatch(
        self,
        x: Tensor,
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        expert_alignment: int,
        num_worst_tokens: int,
        config: K_contra | None,
    ) -> _Received: ...
    @overload
    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        *,
        num_tokens_per_rank: Tensor,
        num_tokens_per_rdma_rank: Tensor | None,
        is_token_in_rank: Tensor,
        num_tokens_per_expert: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        expert_alignment: int,
        num_worst_tokens: int,
        config: K_contra | None,
    ) -> _Received: ...

    def combine(self, x: Tensor, handle: tuple[Tensor, ...], *, config: K_contra | None) -> tuple[Tensor, Tensor | None, object]:
        """Return the plain sum of the ranks' rows."""
        ...


@final
class DeepEPNormalDispatcher(Dispatcher[M_contra, P_co, DeepEPNormalCombineInput, SlotIds]):
    """DeepEP, normal mode.

    ``wire``: what is sent. ``topk_idx_t``: ``deep_ep.topk_idx_t``. ``expert_alignment``: what the counts that come to the host are rounded up to.
    ``max_tokens``: None, and the host waits for the device to learn how many rows arrive; or the most rows that any rank sends, and nothing waits:
    there are ``ranks * max_tokens`` rows then, of which those that are not real go nowhere (one node alone).
    ``dispatch_config`` and ``combine_config``: the library's own for numbers of ranks that it knows.

    Raises: UnsupportedError for a payload that DeepEP cannot carry; ValueError for a spread over another group than the buffer's.
    """

    def __init__(
        self,
        buffer: DeepEPNormalBuffer[K],
        wire: Conversion[M_contra, P_co],
        spread: ExpertSpread,
        *,
        topk_idx_t: torch.dtype,
        expert_alignment: int = 1,
        max_tokens: int | None = None,
        dispatch_config: K | None = None,
        combine_config: K | None = None,
    ) -> None:
        require_carried(wire.target, BY_ROW, "DeepEP normal")
        if expert_alignment < 1 or (max_tokens is not None and max_tokens < 1):
            raise ValueError(f"expert_alignment and max_tokens must be positive; got {expert_alignment} and {max_tokens}")
        spread.demand_group("DeepEP normal", buffer.rank, buffer.group_size)
        self.wire = wire
        self.spread = spread
        self.expert_alignment = expert_alignment
        self.max_tokens = max_tokens
        self._topk_idx_t = topk_idx_t
        self._buffer = cast("DeepEPNormalBuffer[object]", buffer)  # it is given the two configs below alone, which are of its own class
        self._dispatch_config = dispatch_config
        self._combine_config = combine_config

    @override
    def __repr__(self) -> str:
        limit = "" if self.max_tokens is None else f", max_tokens={self.max_tokens}"
        where = f"rank {self.spread.rank} of {self.spread.ranks}"
        return f"DeepEPNormalDispatcher({self.wire.name}, {where}, expert_alignment={self.expert_alignment}{limit})"

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, DeepEPNormalCombineInput]]:
        return DeepEPNormalDispatchOutput

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.wire.target

    @override
    def dispatch(self, rows: M_contra, routing: Routing[SlotIds]) -> DeepEPNormalDispatchOutput[P_co]:
        refuse_tracing(self)
        self.spread.demand(rows.rows, routing)
        OutgoingRows(rows, routing)
        worst = 0
        if self.max_tokens is not None:
            check_capacity(rows.rows, self.max_tokens)
            worst = self.spread.ranks * self.max_tokens
        ids = masked_ids(routing, self._topk_idx_t)
        carried = in_words(self.wire.run(rows, live_tensor(routing.live, ids)))
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self.spread.num_experts)
        received, local_ids, weights, counts, library_handle, _ = self._buffer.dispatch(
            carried,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=routing.topk_weights.contiguous(),
            expert_alignment=self.expert_alignment,
            num_worst_tokens=worst,
            config=self._dispatch_config,
        )
        if local_ids is None or weights is None or library_handle is None:
            raise LibraryError("DeepEP returned no ids, weights or handle, as it does for a cached layout")
        if worst:
            weights = torch.where(local_ids >= 0, weights, 0.0)  # rows that are not real have -1 alone, and weights that nothing was written to
        return DeepEPNormalDispatchOutput(
            from_words(self.wire.target, received),
            self._arrived(local_ids, weights, routing),
            None if worst or counts is None else PaddedReceivedPerExpert(tuple(counts), self.expert_alignment),
            DeepEPNormalHandle(library_handle, self),
        )

    def _arrived(self, ids: Tensor, weights: Tensor, sent: Routing[SlotIds]) -> Routing[LocalIds]:
        rows = ids.shape[0]
        return Routing(ids.to(torch.int32), weights, LocalIds, self.spread.local, sent.scaling, sent.renormalized, rows, sent.num_shared)

    @override
    def combine(self, combine_input: DeepEPNormalCombineInput) -> Tensor:
        refuse_tracing(self)
        handle = combine_input.handle
        library_handle = cast("tuple[Tensor, ...]", handle.consume(self))  # the owner that it is given to made it
        try:
            combined, _, _ = self._buffer.combine(combine_input.hidden_states.contiguous(), library_handle, config=self._combine_config)
        except Exception as error:
            handle.fail(error)
            raise
        return combine_input.scaling.settle(combined)

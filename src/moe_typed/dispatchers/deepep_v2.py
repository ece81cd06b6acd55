"""DeepEP V2: plain rows, rows expanded by expert, and the same without a host sync for a masked product."""

from typing import ClassVar, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Conversion, Payload
from ..routing import DeviceCount, LocalIds, Routing, SlotIds
from ..stages import (
    DeepEPv2ExpandedCombineInput,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2ExpandedHandle,
    DeepEPv2MaskedDispatchOutput,
    DeepEPv2PlainCombineInput,
    DeepEPv2PlainDispatchOutput,
    DeepEPv2PlainHandle,
    DispatchOutput,
    PaddedPrefixSum,
    SegmentEnds,
)
from .elastic import DeepEPElasticBuffer, ElasticDispatcher, ElasticHandle
from .errors import LibraryError
from .spread import ExpertSpread

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
H = TypeVar("H", bound=ElasticHandle)


@final
class DeepEPv2PlainDispatcher(ElasticDispatcher[M_contra, P_co, DeepEPv2PlainCombineInput]):
    """Rows as in normal mode.

    ``host_sync``: the host waits to learn how many rows arrive. Without it there are ``ranks * max_tokens`` rows, and the device alone knows.
    """

    expands: ClassVar[bool] = False

    def __init__(
        self,
        buffer: DeepEPElasticBuffer[H],
        wire: Conversion[M_contra, P_co],
        spread: ExpertSpread,
        *,
        max_tokens: int,
        topk_idx_t: torch.dtype,
        expert_alignment: int = 1,
        host_sync: bool = True,
    ) -> None:
        super().__init__(buffer, wire, spread, max_tokens=max_tokens, topk_idx_t=topk_idx_t, expert_alignment=expert_alignment)
        self.host_sync = host_sync

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, DeepEPv2PlainCombineInput]]:
        return DeepEPv2PlainDispatchOutput

    @override
    def dispatch(self, rows: M_contra, routing: Routing[SlotIds]) -> DeepEPv2PlainDispatchOutput[P_co]:
        payload, ids, weights, library_handle, ticket = self._send(rows, routing, host_sync=self.host_sync)
        if ids is None or weights is None:
            raise LibraryError("DeepEP V2 returned no ids or weights for rows that are not expanded")
        live = ids.shape[0] if self.host_sync else DeviceCount(library_handle.psum_num_recv_tokens_per_scaleup_rank[-1:])
        arrived = Routing(ids.to(torch.int32), weights, LocalIds, self.spread.local, routing.scaling, routing.renormalized, live, routing.num_shared)
        received = PaddedPrefixSum(library_handle.psum_num_recv_tokens_per_expert, self.expert_alignment)
        return DeepEPv2PlainDispatchOutput(payload, arrived, received, DeepEPv2PlainHandle(ticket, self))

    @override
    def combine(self, combine_input: DeepEPv2PlainCombineInput) -> Tensor:
        return self._gather(combine_input.hidden_states, combine_input.scaling, combine_input.handle)


@final
class DeepEPv2ExpandedDispatcher(ElasticDispatcher[M_contra, P_co, DeepEPv2ExpandedCombineInput]):
    """Rows by local expert; the host waits to learn how many there are."""

    expands: ClassVar[bool] = True

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, DeepEPv2ExpandedCombineInput]]:
        return DeepEPv2ExpandedDispatchOutput

    @override
    def dispatch(self, rows: M_contra, routing: Routing[SlotIds]) -> DeepEPv2ExpandedDispatchOutput[P_co]:
        payload, _, weights, library_handle, ticket = self._send(rows, routing, host_sync=True)
        segments = SegmentEnds(library_handle.psum_num_recv_tokens_per_expert, self.expert_alignment)
        return DeepEPv2ExpandedDispatchOutput(payload, _of_slots(weights), segments, routing.scaling, DeepEPv2ExpandedHandle(ticket, self))

    @override
    def combine(self, combine_input: DeepEPv2ExpandedCombineInput) -> Tensor:
        return self._gather(combine_input.hidden_states, combine_input.scaling, combine_input.handle)


@final
class DeepEPv2MaskedDispatcher(ElasticDispatcher[M_contra, P_co, DeepEPv2ExpandedCombineInput]):
    """Rows by local expert in memory for the worst case; nothing waits, so that a CUDA graph can hold it."""

    expands: ClassVar[bool] = True

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, DeepEPv2ExpandedCombineInput]]:
        return DeepEPv2MaskedDispatchOutput

    @override
    def dispatch(self, rows: M_contra, routing: Routing[SlotIds]) -> DeepEPv2MaskedDispatchOutput[P_co]:
        payload, _, weights, library_handle, ticket = self._send(rows, routing, host_sync=False)
        return DeepEPv2MaskedDispatchOutput(
            payload,
            _of_slots(weights),
            SegmentEnds(library_handle.psum_num_recv_tokens_per_expert, self.expert_alignment),
            self.spread.ranks * self.max_tokens,  # a row goes to an expert once
            self.spread.expected_rows(rows.rows, routing.topk_ids.shape[1]),
            routing.scaling,
            DeepEPv2ExpandedHandle(ticket, self),
        )

    @override
    def combine(self, combine_input: DeepEPv2ExpandedCombineInput) -> Tensor:
        return self._gather(combine_input.hidden_states, combine_input.scaling, combine_input.handle)


def _of_slots(weights: Tensor | None) -> Tensor:
    """Return the weights of slots. Raises: LibraryError for anything but one a slot."""
    if weights is None or weights.dim() != 1:
        raise LibraryError("DeepEP V2 returned no weight for each slot of rows that are expanded")
    return weights

"""What the three dispatchers over DeepEP V2 (``deep_ep.ElasticBuffer``) have in common."""

from typing import ClassVar, Protocol, TypeVar, cast, final, overload

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Conversion, Payload, ScaleOrder
from ..routing import RoutedScaling, Routing, SlotIds, live_tensor
from ..stages import CombineInput, Handle
from .base import Dispatcher
from .outgoing import OutgoingRows, check_capacity, masked_ids, refuse_tracing
from .spread import ExpertSpread
from .wire import BY_COLUMN, BY_ROW, Carried, from_words, in_words, require_carried, zero_row

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
C = TypeVar("C", bound=CombineInput)
H = TypeVar("H", bound="ElasticHandle")


class ElasticHandle(Protocol):
    """What is read of ``deep_ep.EPHandle``."""

    @property
    def psum_num_recv_tokens_per_scaleup_rank(self) -> Tensor:
        """Return how many rows arrived from each rank and those before it: int32 (ranks,), the last one is the total."""
        ...

    @property
    def psum_num_recv_tokens_per_expert(self) -> Tensor:
        """Return int32 (local_experts,): where segments end, or sums of padded counts, by how the rows were dispatched."""
        ...


class DeepEPElasticBuffer(Protocol[H]):
    """What is called of ``deep_ep.ElasticBuffer``; ``H`` is ``deep_ep.EPHandle``."""

    @property
    def rank_idx(self) -> int:
        """Return which rank of its group this is."""
        ...

    @property
    def num_ranks(self) -> int:
        """Return how many ranks the group has."""
        ...

    @overload
    def dispatch(
        self,
        x: Tensor,
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
        do_cpu_sync: bool,
        do_expand: bool,
        use_tma_aligned_col_major_sf: bool,
    ) -> tuple[Carried, Tensor | None, Tensor | None, H, object]: ...
    @overload
    def dispatch(
        self,
        x: tuple[Tensor, Tensor],
        *,
        topk_idx: Tensor,
        topk_weights: Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        expert_alignment: int,
        do_cpu_sync: bool,
        do_expand: bool,
        use_tma_aligned_col_major_sf: bool,
    ) -> tuple[Carried, Tensor | None, Tensor | None, H, object]: ...

    def combine(self, x: Tensor, handle: H) -> tuple[Tensor, Tensor | None, object]:
        """Return the plain sum of the ranks' rows, or of the slots."""
        ...


@final
@attrs.frozen(eq=False)
class ElasticTicket:
    """What combine needs: the library's handle, and how many rows this rank sent."""

    handle: ElasticHandle
    rows: int


class ElasticDispatcher(Dispatcher[M_contra, P_co, C, SlotIds]):
    """The base of dispatchers over DeepEP V2.

    ``wire``: what is sent. ``topk_idx_t``: ``deep_ep.topk_idx_t``. ``max_tokens``: the most rows that a rank may send, equal on all ranks.
    ``expert_alignment``: what segments begin at multiples of; that of the product that reads them. No row may name an expert twice: DeepEP V2 traps.

    A rank without rows sends one row of zeros with weight 0, as engines do: DeepEP does not say that a rank may send none. Combine leaves it out.

    Raises: UnsupportedError for a payload that DeepEP V2 cannot carry; ValueError for a spread over another group than the buffer's.
    """

    expands: ClassVar[bool]

    def __init__(
        self,
        buffer: DeepEPElasticBuffer[H],
        wire: Conversion[M_contra, P_co],
        spread: ExpertSpread,
        *,
        max_tokens: int,
        topk_idx_t: torch.dtype,
        expert_alignment: int,
    ) -> None:
        require_carried(wire.target, (*BY_ROW, *BY_COLUMN), "DeepEP V2")
        if expert_alignment < 1 or max_tokens < 1:
            raise ValueError(f"expert_alignment and max_tokens must be positive; got {expert_alignment} and {max_tokens}")
        spread.demand_group("DeepEP V2", buffer.rank_idx, buffer.num_ranks)
        scale = wire.target.format.scale
        self.wire = wire
        self.spread = spread
        self.max_tokens = max_tokens
        self.expert_alignment = expert_alignment
        self._topk_idx_t = topk_idx_t
        self._is_by_column = scale is not None and scale.order is ScaleOrder.COLUMN_MAJOR_ALIGNED
        self._buffer = cast("DeepEPElasticBuffer[ElasticHandle]", buffer)  # it is given its own handles alone

    @override
    def __repr__(self) -> str:
        where = f"rank {self.spread.rank} of {self.spread.ranks}"
        limits = f"max_tokens={self.max_tokens}, expert_alignment={self.expert_alignment}"
        return f"{type(self).__qualname__}({self.wire.name}, {where}, {limits})"

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.wire.target

    def _send(
        self, rows: M_contra, routing: Routing[SlotIds], *, host_sync: bool
    ) -> tuple[P_co, Tensor | None, Tensor | None, ElasticHandle, ElasticTicket]:
        """Return payload, ids and weights as they arrived, the library's handle, and what combine needs."""
        refuse_tracing(self)
        self.spread.demand(rows.rows, routing)
        OutgoingRows(rows, routing)
        check_capacity(rows.rows, self.max_tokens)
        ids, weights = masked_ids(routing, self._topk_idx_t), routing.topk_weights.contiguous()
        carried = in_words(self.wire.run(rows, live_tensor(routing.live, ids)))
        if not ids.shape[0]:
            carried = (zero_row(carried[0]), zero_row(carried[1])) if isinstance(carried, tuple) else zero_row(carried)
            ids, weights = torch.arange(ids.shape[1], dtype=ids.dtype, device=ids.device).unsqueeze(0), weights.new_zeros((1, ids.shape[1]))
        received, local_ids, local_weights, handle, _ = self._buffer.dispatch(
            carried,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=self.spread.num_experts,
            num_max_tokens_per_rank=self.max_tokens,
            expert_alignment=self.expert_alignment,
            do_cpu_sync=host_sync,
            do_expand=self.expands,
            use_tma_aligned_col_major_sf=self._is_by_column,
        )
        return from_words(self.wire.target, received), local_ids, local_weights, handle, ElasticTicket(handle, rows.rows)

    def _gather(self, hidden_states: Tensor, scaling: RoutedScaling, handle: Handle[object]) -> Tensor:
        refuse_tracing(self)
        ticket = cast("ElasticTicket", handle.consume(self))  # the owner that it is given to made it
        try:
            combined, _, _ = self._buffer.combine(hidden_states.contiguous(), ticket.handle)
        except Exception as error:
            handle.fail(error)
            raise
        return scaling.settle(combined[: ticket.rows])

"""DeepEP on the NPU (sgl-kernel-npu's ``deep_ep.Buffer``): normal and low latency. Rows go out as bf16, and the library quantises them where asked.

Its flags are not those of the GPU's: ``use_fp8`` is int8 here. A library that lacks ``quant_mode`` in normal mode lets an environment variable choose
what it sends; what arrives is compared with what was asked for.
"""

from collections.abc import Callable
from typing import Final, Generic, TypeAlias, TypeVar, cast, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..experts import ExpertStage
from ..formats import Bf16Rows, Int8TokenRows, MxFp8PairRows, Payload
from ..formats.payloads.ascend import PAIR, PAIR_CHANNELS
from ..routing import Routing, SlotIds
from ..runners.ascend.ops import AscendBuffer, BufferQuantMode
from ..runners.ascend.runner import require_results
from ..stages import (
    DeepEPLLNpuCombineInput,
    DeepEPLLNpuDispatchOutput,
    DeepEPLLNpuHandle,
    DeepEPNormalNpuCombineInput,
    DeepEPNormalNpuDispatchOutput,
    DeepEPNormalNpuHandle,
    DispatchOutput,
    GroupCounts,
)
from .arena import RingArena
from .base import Dispatcher, MoELayer
from .errors import LibraryError
from .low_latency import Ticket
from .outgoing import OutgoingRows, check_capacity, masked_ids, refuse_tracing, same_origin
from .spread import ExpertSpread

P_co = TypeVar("P_co", bound=Payload, covariant=True)
H = TypeVar("H")
L = TypeVar("L")
E = TypeVar("E")

_Received: TypeAlias = Tensor | tuple[Tensor, Tensor]


@final
@attrs.frozen(eq=False)
class NpuWire(Generic[P_co]):
    """What the library is told to make of bf16 rows in each mode, and the class that arrives."""

    name: str
    payload: type[P_co]
    arrive: Callable[[Tensor, Tensor | None], P_co]
    quant_mode: BufferQuantMode
    use_fp8: bool
    use_ue8m0: bool


def _bf16(data: Tensor, scale: Tensor | None) -> Bf16Rows:
    if scale is not None or data.dtype != torch.bfloat16:
        raise LibraryError(f"bf16 rows were asked for, and {data.dtype} came{'' if scale is None else ' with scales'}")
    return Bf16Rows(data)


def _int8(data: Tensor, scale: Tensor | None) -> Int8TokenRows:
    if scale is None or data.dtype != torch.int8:
        raise LibraryError(f"int8 rows with scales were asked for, and {data.dtype} came{' without' if scale is None else ''}")
    return Int8TokenRows(data.contiguous(), scale.view(-1))


def _mxfp8(data: Tensor, scale: Tensor | None) -> MxFp8PairRows:
    if scale is None or data.dtype != torch.float8_e4m3fn:
        raise LibraryError(f"mxfp8 rows with scales were asked for, and {data.dtype} came{' without' if scale is None else ''}")
    rows, hidden = data.shape
    return MxFp8PairRows(data.contiguous(), scale.reshape(rows, hidden // PAIR_CHANNELS, PAIR).view(torch.float8_e8m0fnu))


NPU_BF16: Final = NpuWire("NPU_BF16", Bf16Rows, _bf16, "bf16", use_fp8=False, use_ue8m0=False)
NPU_INT8: Final = NpuWire("NPU_INT8", Int8TokenRows, _int8, "int8", use_fp8=True, use_ue8m0=False)
NPU_MXFP8: Final = NpuWire("NPU_MXFP8", MxFp8PairRows, _mxfp8, "mx_fp8_e4m3", use_fp8=True, use_ue8m0=True)


def _arrived(wire: NpuWire[P_co], received: _Received) -> P_co:
    data, scale = received if isinstance(received, tuple) else (received, None)
    return wire.arrive(data, scale)


@final
class DeepEPNormalNpuDispatcher(Dispatcher[Bf16Rows, P_co, DeepEPNormalNpuCombineInput, SlotIds]):
    """DeepEP on the NPU, normal mode: the host waits for the device to learn how many rows arrive.

    Combine applies the router weights that were dispatched: the library keeps them.
    """

    def __init__(self, buffer: AscendBuffer[H, L, E], wire: NpuWire[P_co], spread: ExpertSpread) -> None:
        self.wire = wire
        self.spread = spread
        self._buffer = cast("AscendBuffer[object, object, object]", buffer)  # it is given back what it returned, and nothing else

    @override
    def __repr__(self) -> str:
        return f"DeepEPNormalNpuDispatcher({self.wire.name}, rank {self.spread.rank} of {self.spread.ranks})"

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, DeepEPNormalNpuCombineInput]]:
        return DeepEPNormalNpuDispatchOutput

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.wire.payload

    @override
    def then(self, experts: ExpertStage[P_co]) -> MoELayer[Bf16Rows, P_co, DeepEPNormalNpuCombineInput, SlotIds, Tensor]:
        """Return the layer. Raises: as ``Dispatcher.then``; UnsupportedError for weights that cannot give bf16, which is what combine takes."""
        layer = super().then(experts)
        require_results(experts.runner, Bf16Rows)
        return layer

    @override
    def dispatch(self, rows: Bf16Rows, routing: Routing[SlotIds]) -> DeepEPNormalNpuDispatchOutput[P_co]:
        refuse_tracing(self)
        self.spread.demand(rows.rows, routing)
        OutgoingRows(rows, routing)
        ids = masked_ids(routing, torch.int64)
        per_rank, _, per_expert, in_rank, _ = self._buffer.get_dispatch_layout(ids, self.spread.num_experts)
        received, _, _, counts, library_handle, _ = self._buffer.dispatch(
            rows.data.contiguous(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=routing.topk_weights.contiguous(),
            quant_mode=self.wire.quant_mode,
        )
        if len(counts) != self.spread.local:
            raise LibraryError(f"counts of {self.spread.local} local experts were expected, and {len(counts)} came")
        groups = GroupCounts(torch.tensor(counts, dtype=torch.int64, device=rows.data.device))
        handle = DeepEPNormalNpuHandle(library_handle, self)
        try:
            return DeepEPNormalNpuDispatchOutput(_arrived(self.wire, received), groups, routing.scaling, torch.bfloat16, handle)
        except Exception as error:
            handle.fail(error)
            raise

    @override
    def combine(self, combine_input: DeepEPNormalNpuCombineInput) -> Tensor:
        refuse_tracing(self)
        handle = combine_input.handle
        library_handle = handle.consume(self)
        try:
            combined, _, _ = self._buffer.combine(combine_input.hidden_states.contiguous(), library_handle)
        except Exception as error:
            handle.fail(error)
            raise
        return combine_input.scaling.settle(combined)


@final
class DeepEPLLNpuDispatcher(Dispatcher[Bf16Rows, P_co, DeepEPLLNpuCombineInput, SlotIds]):
    """DeepEP on the NPU, low latency: rows arrive in room for the worst case, and nothing waits. ``max_tokens``: the most rows that a rank may send.

    ``arena``: that of the buffer; layers over one buffer share it.
    """

    def __init__(self, buffer: AscendBuffer[H, L, E], wire: NpuWire[P_co], spread: ExpertSpread, *, max_tokens: int, arena: RingArena) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, not {max_tokens}")
        self.wire = wire
        self.spread = spread
        self.max_tokens = max_tokens
        self.arena = arena
        self._buffer = cast("AscendBuffer[object, object, object]", buffer)  # as in normal mode

    @override
    def __repr__(self) -> str:
        where = f"rank {self.spread.rank} of {self.spread.ranks}"
        return f"DeepEPLLNpuDispatcher({self.wire.name}, {where}, max_tokens={self.max_tokens})"

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, DeepEPLLNpuCombineInput]]:
        return DeepEPLLNpuDispatchOutput

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.wire.payload

    @override
    def then(self, experts: ExpertStage[P_co]) -> MoELayer[Bf16Rows, P_co, DeepEPLLNpuCombineInput, SlotIds, Tensor]:
        """Return the layer. Raises: as ``Dispatcher.then``; UnsupportedError for weights that cannot give bf16, which is what combine takes."""
        layer = super().then(experts)
        require_results(experts.runner, Bf16Rows)
        return layer

    @override
    def dispatch(self, rows: Bf16Rows, routing: Routing[SlotIds]) -> DeepEPLLNpuDispatchOutput[P_co]:
        refuse_tracing(self)
        self.spread.demand(rows.rows, routing)
        check_capacity(rows.rows, self.max_tokens)
        OutgoingRows(rows, routing, distinct=True)
        ids = masked_ids(routing, torch.int64)
        self.arena.claim()
        received, counts, library_handle, _, _ = self._buffer.low_latency_dispatch(
            rows.data.contiguous(),
            ids,
            self.max_tokens,
            self.spread.num_experts,
            use_fp8=self.wire.use_fp8,
            use_ue8m0=self.wire.use_ue8m0,
            topk_weights=routing.topk_weights.contiguous(),
        )
        handle = DeepEPLLNpuHandle(Ticket(library_handle, ids, routing), self)
        self.arena.hold(handle)
        try:
            if counts.shape != (self.spread.local,):
                raise LibraryError(f"counts of {self.spread.local} local experts were expected, and {tuple(counts.shape)} came")
            groups = GroupCounts(counts.to(torch.int64))
            return DeepEPLLNpuDispatchOutput(_arrived(self.wire, received), groups, routing, torch.bfloat16, handle)
        except Exception as error:
            handle.fail(error)
            raise

    @override
    def combine(self, combine_input: DeepEPLLNpuCombineInput) -> Tensor:
        refuse_tracing(self)
        handle, origin = combine_input.handle, combine_input.origin
        ticket = cast("Ticket[object]", handle.consume(self))  # the owner that it is given to made it
        try:
            same_origin(combine_input, origin, ticket.origin)
            weights = origin.topk_weights.contiguous()
            combined, _, _ = self._buffer.low_latency_combine(combine_input.hidden_states.contiguous(), ticket.ids, weights, ticket.handle)
        except Exception as error:
            handle.fail(error)
            raise
        return origin.scaling.settle(combined)

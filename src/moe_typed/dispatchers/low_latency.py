"""What the low-latency dispatchers (DeepEP, Mooncake, NIXL) have in common.

The rows go out as bf16, and the library quantises them, so that the wire is a choice of the library's flags and no conversion. No call waits for the
device: all of it can be captured in a CUDA graph.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, Generic, TypeAlias, TypeVar, cast, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Bf16Rows, Fp8Block128PackedSlabRows, Fp8Block128Rows, Fp8Block128SlabRows, Payload
from ..routing import Routing, SlotIds
from ..runners import UnsupportedError
from ..stages import CombineInput, DispatchOutput, Handle, ReceivedPerExpert, SlabCombineInput
from .arena import RingArena
from .base import Dispatcher
from .errors import LibraryError
from .outgoing import OutgoingRows, check_capacity, masked_ids, refuse_tracing, same_origin
from .pending import PendingCombine, PendingDispatch
from .spread import ExpertSpread

P_co = TypeVar("P_co", bound=Payload, covariant=True)
C = TypeVar("C", bound=SlabCombineInput)
D_co = TypeVar("D_co", bound=DispatchOutput[Payload, CombineInput], covariant=True)
T = TypeVar("T")

Received: TypeAlias = Tensor | tuple[Tensor, Tensor]
Hook: TypeAlias = Callable[[], None]

_ROW_BLOCK: Final = 4  # the scales of a slab are aligned for TMA: 16 bytes, which is four rows (DeepEP's and Mooncake's own check)


def _bf16(data: Tensor, scale: Tensor | None) -> Bf16Rows:
    if scale is not None:
        raise LibraryError("bf16 rows were asked for, and came with scales")
    return Bf16Rows(_flat(data))


def _slab(data: Tensor, scale: Tensor | None) -> Fp8Block128SlabRows:
    return Fp8Block128SlabRows(_flat(data), _column_major(scale))


def _packed_slab(data: Tensor, scale: Tensor | None) -> Fp8Block128PackedSlabRows:
    return Fp8Block128PackedSlabRows(_flat(data), _column_major(scale))


def _rows(data: Tensor, scale: Tensor | None) -> Fp8Block128Rows:
    if scale is None or not scale.is_contiguous():
        raise LibraryError(f"row-major scales were expected (LL_FP8_ROWS), and {_describe(scale)} came: LL_FP8 takes column-major ones")
    return Fp8Block128Rows(_flat(data), scale.flatten(0, 1))


def _flat(data: Tensor) -> Tensor:
    """Return (local_experts, capacity, hidden) as (rows, hidden), a view."""
    if data.dim() != 3 or not data.is_contiguous():
        raise LibraryError(f"a contiguous slab (local_experts, capacity, hidden) was expected, and {_describe(data)} came")
    return data.flatten(0, 1)


def _column_major(scale: Tensor | None) -> Tensor:
    """Return scales (local_experts, capacity, groups) whose rows lie next to each other within an expert, as they are."""
    if scale is None or scale.dim() != 3 or not scale.transpose(1, 2).is_contiguous():
        raise LibraryError(f"column-major scales were expected, and {_describe(scale)} came: Mooncake without RDMA needs LL_FP8_ROWS")
    return scale


def _describe(tensor: Tensor | None) -> str:
    return "no tensor" if tensor is None else f"{tuple(tensor.shape)} with strides {tensor.stride()}"


@final
@attrs.frozen(eq=False)
class LowLatencyWire(Generic[P_co]):
    """What a low-latency library makes of bf16 rows: its flags, and the payload class that arrives."""

    name: str
    payload: type[P_co]
    arrive: Callable[[Tensor, Tensor | None], P_co]
    use_fp8: bool = False
    round_scale: bool = False
    use_ue8m0: bool = False


LL_BF16: Final = LowLatencyWire("LL_BF16", Bf16Rows, _bf16)
LL_FP8: Final = LowLatencyWire("LL_FP8", Fp8Block128SlabRows, _slab, use_fp8=True)
LL_FP8_UE8M0: Final = LowLatencyWire("LL_FP8_UE8M0", Fp8Block128PackedSlabRows, _packed_slab, use_fp8=True, round_scale=True, use_ue8m0=True)
LL_FP8_ROWS: Final = LowLatencyWire("LL_FP8_ROWS", Fp8Block128Rows, _rows, use_fp8=True)


@final
@attrs.frozen(eq=False)
class Sent(Generic[T]):
    """What a library's dispatch returned: rows with scales, counts, its own handle, and the hook when one was asked for."""

    received: Received
    counts: Tensor
    handle: T
    hook: Hook | None


@final
@attrs.frozen(eq=False)
class Ticket(Generic[T]):
    """What combine needs: the library's handle, this rank's ids in the dtype that they were converted to once, and the routing that they are of."""

    handle: T
    ids: Tensor
    origin: Routing[SlotIds]


class SlabDispatcher(Dispatcher[Bf16Rows, P_co, C, SlotIds], Generic[P_co, C, D_co, T]):
    """The base of low-latency dispatchers. ``max_tokens`` is the most rows that a rank may send, equal on all ranks.

    ``arena``: one for each object of the library, which all dispatchers over it are given: none of them sees what the others dispatch.

    Raises: UnsupportedError for a wire that the library does not have; ValueError for sizes that its kernels refuse.
    """

    library: ClassVar[str]
    wires: ClassVar[tuple[LowLatencyWire[Payload], ...]]

    def __init__(self, wire: LowLatencyWire[P_co], spread: ExpertSpread, max_tokens: int, id_dtype: torch.dtype, arena: RingArena) -> None:
        if wire not in self.wires:
            names = ", ".join(known.name for known in self.wires)
            raise UnsupportedError(f"{self.library} has no wire {wire.name}; it has {names}")
        if max_tokens < 1 or spread.ranks * max_tokens % _ROW_BLOCK:
            raise ValueError(f"{spread.ranks} ranks of {max_tokens} rows make no multiple of {_ROW_BLOCK} rows, by which scales are aligned")
        self.wire = wire
        self.spread = spread
        self.max_tokens = max_tokens
        self.arena = arena
        self._id_dtype = id_dtype

    @override
    def __repr__(self) -> str:
        where = f"rank {self.spread.rank} of {self.spread.ranks}"
        return f"{type(self).__qualname__}({self.wire.name}, {where}, max_tokens={self.max_tokens}{self._settings()})"

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.wire.payload

    def start_dispatch(self, rows: Bf16Rows, routing: Routing[SlotIds]) -> PendingDispatch[D_co]:
        """Send the rows off; other work may follow before ``wait``. Raises: as ``dispatch``."""
        return self._start(rows, routing, hook=True)

    @override
    def combine(self, combine_input: C) -> Tensor:
        return self._start_combine(combine_input, hook=False).wait()

    def start_combine(self, combine_input: C) -> PendingCombine:
        """Send the results off; other work may follow before ``wait``. Raises: as ``combine``."""
        return self._start_combine(combine_input, hook=True)

    @abstractmethod
    def _settings(self) -> str:
        """Return the other settings that change numbers, each after a comma."""

    @abstractmethod
    def _send(self, rows: Tensor, ids: Tensor, hook: bool) -> Sent[T]:
        """Call the library's dispatch."""

    @abstractmethod
    def _fetch(self, hidden_states: Tensor, weights: Tensor, ticket: Ticket[T], hook: bool) -> tuple[Tensor, Hook | None]:
        """Call the library's combine."""

    @abstractmethod
    def _promise(self, sent: Sent[T], ticket: Ticket[T], origin: Routing[SlotIds], expected: int) -> tuple[Handle[object], Callable[[], D_co]]:
        """Return the handle, and what makes the output once the rows are there."""

    def _start(self, rows: Bf16Rows, routing: Routing[SlotIds], *, hook: bool) -> PendingDispatch[D_co]:
        refuse_tracing(self)
        self.spread.demand(rows.rows, routing)
        OutgoingRows(rows, routing)
        check_capacity(rows.rows, self.max_tokens)
        ids = masked_ids(routing, self._id_dtype)
        self.arena.claim()
        sent = self._send(rows.data.contiguous(), ids, hook)
        handle, deliver = self._promise(sent, Ticket(sent.handle, ids, routing), routing, self.spread.expected_rows(*ids.shape))
        self.arena.hold(handle)
        try:
            return PendingDispatch(_after(sent.hook, deliver, hook), handle)
        except LibraryError as error:
            handle.fail(error)
            raise

    def _arrived(self, sent: Sent[T]) -> tuple[P_co, ReceivedPerExpert, int]:
        """Return payload, counts and capacity. Raises: LibraryError for a layout that the wire does not say."""
        data, scale = sent.received if isinstance(sent.received, tuple) else (sent.received, None)
        payload = self.wire.arrive(data, scale)
        if data.shape[0] != self.spread.local or sent.counts.shape != data.shape[:1]:
            came = f"{data.shape[0]} with counts {tuple(sent.counts.shape)}"
            raise LibraryError(f"slabs of {self.spread.local} local experts were expected, and {came} came")
        return payload, ReceivedPerExpert(sent.counts), data.shape[1]

    def _start_combine(self, combine_input: C, *, hook: bool) -> PendingCombine:
        refuse_tracing(self)
        handle, origin = combine_input.handle, combine_input.origin
        ticket = cast("Ticket[T]", handle.consume(self))  # the owner that it is given to made it
        try:
            same_origin(combine_input, origin, ticket.origin)
            combined, received = self._fetch(combine_input.hidden_states, origin.topk_weights.contiguous(), ticket, hook)
            return PendingCombine(_after(received, lambda: origin.scaling.settle(combined), hook), handle)
        except Exception as error:
            handle.fail(error)
            raise


def _after(hook: Hook | None, then: Callable[[], T], asked: bool) -> Callable[[], T]:
    """Return ``then``, after the hook where one was asked for. Raises: LibraryError when there is none."""
    if not asked:
        return then
    if hook is None:
        raise LibraryError("a receive hook was asked for, and none came")

    def receive() -> T:
        hook()
        return then()

    return receive

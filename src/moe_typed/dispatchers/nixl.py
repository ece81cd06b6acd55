"""NIXL EP, low-latency mode (``nixl_ep.Buffer.low_latency_dispatch`` and ``low_latency_combine``)."""

from collections.abc import Callable
from typing import ClassVar, TypeAlias, TypeVar, final

from torch import Tensor
from typing_extensions import override

from ..formats import Bf16Rows, Fp8Block128PackedSlabRows, Fp8Block128SlabRows
from ..routing import Routing, SlotIds
from ..stages import DispatchOutput, Handle, NixlCombineInput, NixlDispatchOutput, NixlHandle
from .low_latency import Sent, Ticket
from .low_latency_buffer import BufferDispatcher

P_co = TypeVar("P_co", bound=Bf16Rows | Fp8Block128SlabRows | Fp8Block128PackedSlabRows, covariant=True)

_Handle: TypeAlias = tuple[Tensor, Tensor, int, int]


@final
class NixlDispatcher(BufferDispatcher[P_co, NixlCombineInput, NixlDispatchOutput[P_co], _Handle]):
    """NIXL EP. Ranks come and go with the buffer: a dispatcher is of one membership, and the engine makes another one for another.

    The buffer tells its rank, which is compared with the spread's. What it tells of the number of ranks is not the number that experts are spread
    over (the most that memory was allocated for, or one past the last that is connected, by its version): that they agree is up to the engine.
    """

    library: ClassVar[str] = "NIXL"
    fixed_group: ClassVar[bool] = False

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, NixlCombineInput]]:
        return NixlDispatchOutput

    @override
    def dispatch(self, rows: Bf16Rows, routing: Routing[SlotIds]) -> NixlDispatchOutput[P_co]:
        return self._start(rows, routing, hook=False).wait()

    @override
    def _promise(
        self, sent: Sent[_Handle], ticket: Ticket[_Handle], origin: Routing[SlotIds], expected: int
    ) -> tuple[Handle[object], Callable[[], NixlDispatchOutput[P_co]]]:
        handle = NixlHandle(ticket, self)
        return handle, lambda: NixlDispatchOutput(*self._arrived(sent), expected, origin, handle)

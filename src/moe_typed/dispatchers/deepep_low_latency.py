"""DeepEP, low-latency mode (``deep_ep.Buffer.low_latency_dispatch`` and ``low_latency_combine``)."""

from collections.abc import Callable
from typing import ClassVar, TypeAlias, TypeVar, final

from torch import Tensor
from typing_extensions import override

from ..formats import Bf16Rows, Fp8Block128PackedSlabRows, Fp8Block128SlabRows
from ..routing import Routing, SlotIds
from ..stages import DeepEPLLCombineInput, DeepEPLLDispatchOutput, DeepEPLLHandle, DispatchOutput, Handle
from .low_latency import Sent, Ticket
from .low_latency_buffer import BufferDispatcher

P_co = TypeVar("P_co", bound=Bf16Rows | Fp8Block128SlabRows | Fp8Block128PackedSlabRows, covariant=True)

_Handle: TypeAlias = tuple[Tensor, Tensor, int, int, int]


@final
class DeepEPLowLatencyDispatcher(BufferDispatcher[P_co, DeepEPLLCombineInput, DeepEPLLDispatchOutput[P_co], _Handle]):
    """DeepEP low latency. A buffer that served normal mode needs ``clean_low_latency_buffer`` first, which is its owner's to do."""

    library: ClassVar[str] = "DeepEP low latency"
    fixed_group: ClassVar[bool] = True

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, DeepEPLLCombineInput]]:
        return DeepEPLLDispatchOutput

    @override
    def dispatch(self, rows: Bf16Rows, routing: Routing[SlotIds]) -> DeepEPLLDispatchOutput[P_co]:
        return self._start(rows, routing, hook=False).wait()

    @override
    def _promise(
        self, sent: Sent[_Handle], ticket: Ticket[_Handle], origin: Routing[SlotIds], expected: int
    ) -> tuple[Handle[object], Callable[[], DeepEPLLDispatchOutput[P_co]]]:
        handle = DeepEPLLHandle(ticket, self)
        return handle, lambda: DeepEPLLDispatchOutput(*self._arrived(sent), expected, origin, handle)

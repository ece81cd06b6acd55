"""MoRI v1 (``mori.ops.EpDispatchCombineOp``), in normal and in low-latency mode."""

from collections.abc import Callable
from typing import ClassVar, Final, Generic, Protocol, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from ..formats import Conversion, Payload
from ..routing import PhysicalIds, Residence, Routing
from ..runners import UnsupportedError
from ..stages import (
    CombineInput,
    DispatchOutput,
    Handle,
    MoriCombineInput,
    MoriDispatchOutput,
    MoriEPLLCombineInput,
    MoriEPLLDispatchOutput,
    MoriEPLLHandle,
    MoriEPNormalCombineInput,
    MoriEPNormalDispatchOutput,
    MoriEPNormalHandle,
)
from .arena import PairedArena
from .mori_base import Arrival, MoriDispatcher, MoriTicket, Received
from .mori_config import MoriV1Config
from .pending import PendingCombine, PendingDispatch
from .receive import ReceiveCap, WholeArena

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
C = TypeVar("C", bound=MoriCombineInput)
D_co = TypeVar("D_co", bound=MoriDispatchOutput[Payload, CombineInput], covariant=True)

_WHOLE: Final = WholeArena()
_ASYNC: Final = "AsyncLL"  # the only kernel that receives in a step of its own
_SCANNED: Final = 8  # how many routes of a row IntraNodeLL looks at; it may miss the rank of the ninth


class MoriOp(Protocol):
    """What is called of ``mori.ops.EpDispatchCombineOp``."""

    @property
    def config(self) -> MoriV1Config:
        """Return the config that the op was made with."""
        ...

    def dispatch(self, input: Tensor, weights: Tensor | None, scales: Tensor | None, indices: Tensor) -> Received:  # noqa: A002 - their name
        """Send each row once to each rank of its ids."""
        ...

    def dispatch_recv(self) -> None:
        """Let what the last dispatch returned become valid."""
        ...

    def combine(self, input: Tensor, weights: Tensor | None, indices: Tensor) -> tuple[Tensor, Tensor | None]:  # noqa: A002 - their name
        """Return the plain sum of the ranks' rows."""
        ...

    def combine_recv(self) -> None:
        """Let what the last combine returned become valid."""
        ...

    def reset(self) -> None:
        """Set the counters back, together with all ranks."""
        ...


class MoriV1Dispatcher(MoriDispatcher[M_contra, P_co, C, D_co], Generic[M_contra, P_co, C, D_co]):
    """The base of both modes. Raises: as its base; UnsupportedError for an op of the other mode; ValueError for settings that lose rows."""

    library: ClassVar[str] = "MoRI"
    kernels: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        op: MoriOp,
        wire: Conversion[M_contra, P_co],
        residence: Residence[PhysicalIds],
        *,
        arena: PairedArena,
        cap: ReceiveCap = _WHOLE,
        own_result: bool = True,
    ) -> None:
        kernel = check_config(op.config, self.kernels)
        super().__init__(op.config, op.reset, wire, residence, cap=cap, own_result=own_result, arena=arena)
        self._op = op
        self._kernel = kernel
        self._is_async = kernel == _ASYNC

    @override
    def _send(self, data: Tensor, weights: Tensor, scales: Tensor | None, ids: Tensor) -> Arrival:
        received = self._op.dispatch(data, weights, scales, ids)
        return Arrival(received, receive=self._op.dispatch_recv if self._is_async else None)

    @override
    def _fetch(self, hidden_states: Tensor, ticket: MoriTicket) -> tuple[Tensor, Callable[[], None] | None]:
        combined, _ = self._op.combine(hidden_states, None, ticket.ids)  # the ids that this rank sent, and not those that it received
        return combined, self._op.combine_recv if self._is_async else None


@final
class MoriNormalDispatcher(MoriV1Dispatcher[M_contra, P_co, MoriEPNormalCombineInput, MoriEPNormalDispatchOutput[P_co]]):
    """MoRI v1 with a kernel of normal mode (IntraNode, InterNode, InterNodeV1)."""

    kernels: ClassVar[tuple[str, ...]] = ("IntraNode", "InterNode", "InterNodeV1")

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, MoriEPNormalCombineInput]]:
        return MoriEPNormalDispatchOutput

    @override
    def dispatch(self, rows: M_contra, routing: Routing[PhysicalIds]) -> MoriEPNormalDispatchOutput[P_co]:
        return self._start(rows, routing).wait()

    @override
    def _promise(
        self, arrival: Arrival, ticket: MoriTicket, origin: Routing[PhysicalIds]
    ) -> tuple[Handle[object], Callable[[], MoriEPNormalDispatchOutput[P_co]]]:
        handle = MoriEPNormalHandle(ticket, self)
        return handle, lambda: MoriEPNormalDispatchOutput(*self._arrived(arrival, origin), self.residence, origin, torch.bfloat16, handle)


@final
class MoriLowLatencyDispatcher(MoriV1Dispatcher[M_contra, P_co, MoriEPLLCombineInput, MoriEPLLDispatchOutput[P_co]]):
    """MoRI v1 with a kernel of low-latency mode (AsyncLL, IntraNodeLL, InterNodeV1LL). AsyncLL alone can be started and waited for."""

    kernels: ClassVar[tuple[str, ...]] = ("InterNodeV1LL", "AsyncLL", "IntraNodeLL")

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, MoriEPLLCombineInput]]:
        return MoriEPLLDispatchOutput

    @override
    def dispatch(self, rows: M_contra, routing: Routing[PhysicalIds]) -> MoriEPLLDispatchOutput[P_co]:
        return self._start(rows, routing).wait()

    def start_dispatch(self, rows: M_contra, routing: Routing[PhysicalIds]) -> PendingDispatch[MoriEPLLDispatchOutput[P_co]]:
        """Send the rows off; other work may follow before ``wait``. Raises: as ``dispatch``; UnsupportedError for other kernels than AsyncLL."""
        self._require_async()
        return self._start(rows, routing)

    def start_combine(self, combine_input: MoriEPLLCombineInput) -> PendingCombine:
        """Send the results off; other work may follow before ``wait``. Raises: as ``combine``; UnsupportedError for other kernels than AsyncLL."""
        self._require_async()
        return self._start_combine(combine_input)

    def _require_async(self) -> None:
        if not self._is_async:
            raise UnsupportedError(f"the kernel {self._kernel} does not receive in a step of its own; {_ASYNC} does")

    @override
    def _promise(
        self, arrival: Arrival, ticket: MoriTicket, origin: Routing[PhysicalIds]
    ) -> tuple[Handle[object], Callable[[], MoriEPLLDispatchOutput[P_co]]]:
        handle = MoriEPLLHandle(ticket, self)
        return handle, lambda: MoriEPLLDispatchOutput(*self._arrived(arrival, origin), self.residence, origin, torch.bfloat16, handle)


def check_config(config: MoriV1Config, kernels: tuple[str, ...]) -> str:
    """Return the kernel's name.

    Raises: UnsupportedError for a kernel of the other mode; ValueError for settings under which MoRI reads other memory than it is given.
    """
    kernel = config.kernel_type.name
    if kernel not in kernels:
        raise UnsupportedError(f"the op's kernel is {kernel}, and this dispatcher is for {', '.join(kernels)}")
    if config.max_token_type_size < torch.bfloat16.itemsize:
        raise ValueError(f"max_token_type_size must be 2 or more, for combine sends bf16; the op was made with {config.max_token_type_size}")
    if not config.use_external_inp_buf:
        raise ValueError("the op was made with use_external_inp_buf=False, and would send what stands in its own buffer instead of the results")
    if kernel == "IntraNodeLL" and config.num_experts_per_token > _SCANNED:
        raise ValueError(f"{kernel} looks at {_SCANNED} routes of a row, and the op was made for {config.num_experts_per_token}")
    return kernel

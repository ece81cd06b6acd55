"""MoRI: one row for each (token, rank) pair in a symmetric arena, of which the device alone knows how many are live."""

from abc import abstractmethod
from typing import Annotated, ClassVar, Generic, Self, final

import torch
from jaxtyping import BFloat16
from torch import Tensor
from typing_extensions import TypeVar, override

from ..boundary import Layout, Rename, boundary
from ..formats import Payload, head
from ..routing import PhysicalIds, Residence, Routing, live_tensor
from .base import Carry, CombineInput, DispatchOutput
from .handles import Handle

P_co = TypeVar("P_co", bound=Payload, covariant=True)
C_co = TypeVar("C_co", bound=CombineInput, covariant=True)
H_co = TypeVar("H_co", bound=Handle[object], covariant=True, default=Handle[object])
Q = TypeVar("Q", bound=Payload)

_SOURCE = Rename({"rows": "source_rows"})
_SLOTS = Rename({"slots": "experts"})


class MoriDispatchOutput(DispatchOutput[P_co, C_co], Generic[P_co, C_co, H_co]):
    """The base of MoRI's dispatch outputs."""

    routing: Routing[PhysicalIds]
    residence: Residence[PhysicalIds]
    origin: Routing[PhysicalIds]
    out_dtype: torch.dtype
    handle: H_co

    @property
    @override
    def live_rows(self) -> Tensor | None:
        return live_tensor(self.routing.live, self.routing.topk_ids)

    @abstractmethod
    @override
    def with_payload(self, payload: Q) -> "MoriDispatchOutput[Q, C_co, H_co]": ...

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)

    @abstractmethod
    def capped(self, rows: int) -> Self:
        """Return the first ``rows`` rows of payload, scales, ids, weights and staging view (if any); ``rows`` bounds the live ones.

        Raises: ValueError for a payload whose scales cannot be cut by rows.
        """

    def check_values(self) -> None:
        """Raise BoundaryError for live rows whose data cannot be right."""
        self.payload.check_live(self.routing.count_live())


class MoriCombineInput(CombineInput, Generic[H_co]):
    """The base of expert results in the order of the received rows: router weights applied, this rank's experts summed; stale rows undefined.

    MoRI adds the ranks' rows as they are. ``origin``: this rank's own routing, by which the rows come home, and not the received one.
    """

    hidden_states: Tensor
    origin: Routing[PhysicalIds]
    handle: H_co


@final
@boundary
class MoriCarry(Carry, Generic[H_co]):
    """What combine needs beside the expert results."""

    origin: Routing[PhysicalIds]
    handle: H_co


@final
class MoriEPNormalHandle(Handle[object]):
    """The routing handle of a dispatch, where the kernel has one."""


@final
@boundary
class MoriEPNormalCombineInput(MoriCombineInput[MoriEPNormalHandle]):
    """MoRI, normal mode. ``hidden_states``: bf16 (rows, hidden)."""

    hidden_states: BFloat16[Tensor, "rows hidden"]
    origin: Annotated[Routing[PhysicalIds], _SOURCE]
    handle: MoriEPNormalHandle


@final
@boundary
class MoriEPNormalDispatchOutput(MoriDispatchOutput[P_co, MoriEPNormalCombineInput, MoriEPNormalHandle]):
    """Rows in no fixed order (flat), a view of the arena that the next dispatch overwrites; all k slots of a row, weights pending.

    ``routing.live``: the total received, on the device; ``residence``: the slots of this rank. ``staging``: bf16 (rows, hidden), where a result saves
    combine a copy.
    """

    combine_input: ClassVar[type[CombineInput]] = MoriEPNormalCombineInput
    payload: P_co
    routing: Routing[PhysicalIds]
    residence: Annotated[Residence[PhysicalIds], _SLOTS]
    origin: Annotated[Routing[PhysicalIds], _SOURCE]
    out_dtype: torch.dtype
    handle: MoriEPNormalHandle
    staging: Annotated[BFloat16[Tensor, "rows out_hidden"], Layout(contiguous=True)] | None = None

    @override
    def with_payload(self, payload: Q) -> "MoriEPNormalDispatchOutput[Q]":
        return MoriEPNormalDispatchOutput(payload, self.routing, self.residence, self.origin, self.out_dtype, self.handle, self.staging)

    @override
    def capped(self, rows: int) -> "MoriEPNormalDispatchOutput[P_co]":
        staging = None if self.staging is None else self.staging[:rows]
        payload, routing = head(self.payload, rows), self.routing.head(rows)
        return MoriEPNormalDispatchOutput(payload, routing, self.residence, self.origin, self.out_dtype, self.handle, staging)


@final
class MoriEPLLHandle(Handle[object]):
    """The routing handle of a low-latency dispatch, where the kernel has one."""


@final
@boundary
class MoriEPLLCombineInput(MoriCombineInput[MoriEPLLHandle]):
    """MoRI, low-latency mode. ``hidden_states``: bf16 (rows, hidden)."""

    hidden_states: BFloat16[Tensor, "rows hidden"]
    origin: Annotated[Routing[PhysicalIds], _SOURCE]
    handle: MoriEPLLHandle


@final
@boundary
class MoriEPLLDispatchOutput(MoriDispatchOutput[P_co, MoriEPLLCombineInput, MoriEPLLHandle]):
    """Rows as in normal mode: flat, in an arena, and not a slab as the low-latency modes of other libraries have it. No staging view."""

    combine_input: ClassVar[type[CombineInput]] = MoriEPLLCombineInput
    payload: P_co
    routing: Routing[PhysicalIds]
    residence: Annotated[Residence[PhysicalIds], _SLOTS]
    origin: Annotated[Routing[PhysicalIds], _SOURCE]
    out_dtype: torch.dtype
    handle: MoriEPLLHandle

    @override
    def with_payload(self, payload: Q) -> "MoriEPLLDispatchOutput[Q]":
        return MoriEPLLDispatchOutput(payload, self.routing, self.residence, self.origin, self.out_dtype, self.handle)

    @override
    def capped(self, rows: int) -> "MoriEPLLDispatchOutput[P_co]":
        return MoriEPLLDispatchOutput(head(self.payload, rows), self.routing.head(rows), self.residence, self.origin, self.out_dtype, self.handle)

"""Slabs: DeepEP low latency, Mooncake and NIXL. One row for each (token, expert), in a stretch of ``capacity`` rows for each local expert.

The three have one layout and are three classes: their handles differ, and a combine takes its own dispatch alone. The payload's rows are the slab's,
end to end; from an expert's count on they are stale. The arena is the library's: its next dispatch but one overwrites it. There are no received ids;
``origin`` is this rank's own routing, whose weights the library's combine applies.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar, Generic, final

import torch
from jaxtyping import BFloat16
from torch import Tensor
from typing_extensions import TypeVar, override

from ..boundary import Dim, Layout, Rename, boundary, value_error
from ..formats import Payload
from ..routing import LocalIds, Routing, Settled, SlotIds
from .base import Carry, CombineInput, DispatchOutput
from .counts import ReceivedPerExpert
from .handles import Handle

P_co = TypeVar("P_co", bound=Payload, covariant=True)
C_co = TypeVar("C_co", bound=CombineInput, covariant=True)
H_co = TypeVar("H_co", bound=Handle[object], covariant=True, default=Handle[object])
Q = TypeVar("Q", bound=Payload)

_CONTIGUOUS = Layout(contiguous=True)
_SOURCE = Rename({"rows": "source_rows", "experts": "slots"})


def check_slab(value: object, payload: Payload, received: ReceivedPerExpert, capacity: int) -> None:
    """Raise BoundaryError for counts that do not fit the slab, and for live rows whose data cannot be right."""
    counts = received.counts
    if payload.rows != counts.shape[0] * capacity:
        raise value_error(value, "payload", f"has {payload.rows} rows; {counts.shape[0]} experts of {capacity} rows have another number")
    if bool(((counts < 0) | (counts > capacity)).any()):
        raise value_error(value, "received", f"holds a count outside 0..{capacity}", "a receive hook that was not called leaves counts undefined")
    payload.check_live(received.experts_of_slab(capacity) >= 0)


class SlabDispatchOutput(DispatchOutput[P_co, C_co], Generic[P_co, C_co, H_co]):
    """The base of dispatch outputs in slabs."""

    received: ReceivedPerExpert
    capacity: int
    expected_rows: int
    origin: Routing[SlotIds]
    handle: H_co

    @property
    @override
    def live_rows(self) -> None:
        """Return None: stale rows lie between the live ones."""

    @abstractmethod
    @override
    def with_payload(self, payload: Q) -> "SlabDispatchOutput[Q, C_co, H_co]": ...

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)

    def local_experts(self) -> Tensor:
        """Return the local expert of each row, -1 for a stale one: int32 (rows,); no host sync."""
        return self.received.experts_of_slab(self.capacity)

    def unit_routing(self) -> Routing[LocalIds]:
        """Return each row's route to its one expert, with weight 1: the library's combine applies the router's."""
        ids = self.local_experts().unsqueeze(1)
        weights = torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
        return Routing(ids, weights, LocalIds, self.received.counts.shape[0], Settled(), self.origin.renormalized, ids.shape[0])

    @property
    def most_rows(self) -> int:
        """Return how many rows can be live in all: ``capacity`` is what all ranks may send, and one of these rows goes to k experts at most."""
        return self.capacity * min(self.origin.topk_ids.shape[1], self.received.counts.shape[0])

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_slab``."""
        check_slab(self, self.payload, self.received, self.capacity)


class SlabCombineInput(CombineInput, Generic[H_co]):
    """The base of expert results in slabs: router weights pending, nothing summed, stale rows undefined; combine does both."""

    hidden_states: Tensor
    origin: Routing[SlotIds]
    handle: H_co


@final
@boundary
class SlabCarry(Carry, Generic[H_co]):
    """What combine needs beside the expert results."""

    origin: Routing[SlotIds]
    capacity: int
    handle: H_co


@final
class DeepEPLLHandle(Handle[object]):
    """What ``Buffer.low_latency_combine`` needs."""


@final
@boundary
class DeepEPLLCombineInput(SlabCombineInput[DeepEPLLHandle]):
    """DeepEP low latency. ``hidden_states``: bf16 (local_experts, capacity, hidden)."""

    hidden_states: Annotated[BFloat16[Tensor, "local_experts capacity hidden"], _CONTIGUOUS]
    origin: Annotated[Routing[SlotIds], _SOURCE]
    handle: DeepEPLLHandle


@final
@boundary
class DeepEPLLDispatchOutput(SlabDispatchOutput[P_co, DeepEPLLCombineInput, DeepEPLLHandle]):
    """DeepEP low latency. ``expected_rows``: about as many rows has an expert; a hint for the schedule, not a bound."""

    combine_input: ClassVar[type[CombineInput]] = DeepEPLLCombineInput
    payload: P_co
    received: ReceivedPerExpert
    capacity: Annotated[int, Dim("capacity")]
    expected_rows: int
    origin: Annotated[Routing[SlotIds], _SOURCE]
    handle: DeepEPLLHandle

    @override
    def with_payload(self, payload: Q) -> "DeepEPLLDispatchOutput[Q]":
        return DeepEPLLDispatchOutput(payload, self.received, self.capacity, self.expected_rows, self.origin, self.handle)


@final
class MooncakeHandle(Handle[object]):
    """What Mooncake's ``Buffer.combine`` needs."""


@final
@boundary
class MooncakeCombineInput(SlabCombineInput[MooncakeHandle]):
    """Mooncake. ``hidden_states``: bf16 (local_experts, capacity, hidden)."""

    hidden_states: Annotated[BFloat16[Tensor, "local_experts capacity hidden"], _CONTIGUOUS]
    origin: Annotated[Routing[SlotIds], _SOURCE]
    handle: MooncakeHandle


@final
@boundary
class MooncakeDispatchOutput(SlabDispatchOutput[P_co, MooncakeCombineInput, MooncakeHandle]):
    """Mooncake. ``expected_rows``: about as many rows has an expert; a hint for the schedule, not a bound."""

    combine_input: ClassVar[type[CombineInput]] = MooncakeCombineInput
    payload: P_co
    received: ReceivedPerExpert
    capacity: Annotated[int, Dim("capacity")]
    expected_rows: int
    origin: Annotated[Routing[SlotIds], _SOURCE]
    handle: MooncakeHandle

    @override
    def with_payload(self, payload: Q) -> "MooncakeDispatchOutput[Q]":
        return MooncakeDispatchOutput(payload, self.received, self.capacity, self.expected_rows, self.origin, self.handle)


@final
class NixlHandle(Handle[object]):
    """What NIXL's ``Buffer.low_latency_combine`` needs."""


@final
@boundary
class NixlCombineInput(SlabCombineInput[NixlHandle]):
    """NIXL. ``hidden_states``: bf16 (local_experts, capacity, hidden)."""

    hidden_states: Annotated[BFloat16[Tensor, "local_experts capacity hidden"], _CONTIGUOUS]
    origin: Annotated[Routing[SlotIds], _SOURCE]
    handle: NixlHandle


@final
@boundary
class NixlDispatchOutput(SlabDispatchOutput[P_co, NixlCombineInput, NixlHandle]):
    """NIXL. Its capacity follows the ranks that are active. ``expected_rows``: about as many rows has an expert; a hint, not a bound."""

    combine_input: ClassVar[type[CombineInput]] = NixlCombineInput
    payload: P_co
    received: ReceivedPerExpert
    capacity: Annotated[int, Dim("capacity")]
    expected_rows: int
    origin: Annotated[Routing[SlotIds], _SOURCE]
    handle: NixlHandle

    @override
    def with_payload(self, payload: Q) -> "NixlDispatchOutput[Q]":
        return NixlDispatchOutput(payload, self.received, self.capacity, self.expected_rows, self.origin, self.handle)

"""DeepEP on the NPU, both modes: received rows sorted by local expert, one for each route, in two dims even in low latency.

Source: sgl-kernel-npu's deep_ep of August 2026.
"""

from abc import abstractmethod
from typing import Annotated, ClassVar, TypeVar, final

import torch
from jaxtyping import BFloat16
from torch import Tensor
from typing_extensions import override

from ..boundary import Rename, boundary
from ..formats import Payload
from ..routing import RoutedScaling, Routing, SlotIds
from .ascend import check_total
from .ascend_groups import GroupCounts
from .base import Carry, CombineInput, DispatchOutput
from .handles import Handle

P_co = TypeVar("P_co", bound=Payload, covariant=True)
C_co = TypeVar("C_co", bound=CombineInput, covariant=True)
Q = TypeVar("Q", bound=Payload)

_SOURCE = Rename({"rows": "tokens", "experts": "slots"})


@final
class DeepEPNormalNpuHandle(Handle[object]):
    """What ``Buffer.dispatch`` returned for ``Buffer.combine``; ids and router weights are in it."""


@final
class DeepEPLLNpuHandle(Handle[object]):
    """What ``Buffer.low_latency_dispatch`` returned for ``Buffer.low_latency_combine``."""


class NpuDispatchOutput(DispatchOutput[P_co, C_co]):
    """The base of both: rows sorted by local expert, router weights pending, rows after the counts' total undefined."""

    groups: GroupCounts
    out_dtype: torch.dtype

    @property
    @override
    def live_rows(self) -> Tensor | None:
        return self.groups.total().to(torch.int32)

    @abstractmethod
    @override
    def with_payload(self, payload: Q) -> "NpuDispatchOutput[Q, C_co]": ...

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_total``."""
        check_total(self, self.payload, self.groups)


@final
@boundary
class DeepEPNormalNpuCombineInput(CombineInput):
    """One result a received row, router weights pending: combine applies those that were dispatched. ``hidden_states``: bf16 (rows, hidden)."""

    hidden_states: BFloat16[Tensor, "rows hidden"]
    scaling: RoutedScaling
    handle: DeepEPNormalNpuHandle


@final
@boundary
class DeepEPNormalNpuCarry(Carry):
    """What combine needs beside the expert results."""

    scaling: RoutedScaling
    handle: DeepEPNormalNpuHandle


@final
@boundary
class DeepEPNormalNpuDispatchOutput(NpuDispatchOutput[P_co, DeepEPNormalNpuCombineInput]):
    """Normal mode: as many rows as arrived, which the host knows; owned."""

    combine_input: ClassVar[type[CombineInput]] = DeepEPNormalNpuCombineInput
    payload: P_co
    groups: GroupCounts
    scaling: RoutedScaling
    out_dtype: torch.dtype
    handle: DeepEPNormalNpuHandle

    @override
    def with_payload(self, payload: Q) -> "DeepEPNormalNpuDispatchOutput[Q]":
        return DeepEPNormalNpuDispatchOutput(payload, self.groups, self.scaling, self.out_dtype, self.handle)

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)


@final
@boundary
class DeepEPLLNpuCombineInput(CombineInput):
    """One result a received row, router weights pending; undefined rows stay so. ``hidden_states``: bf16 (rows, hidden).

    ``origin``: this rank's own routing, whose weights combine applies.
    """

    hidden_states: BFloat16[Tensor, "rows hidden"]
    origin: Annotated[Routing[SlotIds], _SOURCE]
    handle: DeepEPLLNpuHandle


@final
@boundary
class DeepEPLLNpuCarry(Carry):
    """What combine needs beside the expert results."""

    origin: Routing[SlotIds]
    handle: DeepEPLLNpuHandle


@final
@boundary
class DeepEPLLNpuDispatchOutput(NpuDispatchOutput[P_co, DeepEPLLNpuCombineInput]):
    """Low latency: room for the worst case, of which the device alone knows the end; the library's next dispatch but one overwrites it."""

    combine_input: ClassVar[type[CombineInput]] = DeepEPLLNpuCombineInput
    payload: P_co
    groups: GroupCounts
    origin: Annotated[Routing[SlotIds], _SOURCE]
    out_dtype: torch.dtype
    handle: DeepEPLLNpuHandle

    @override
    def with_payload(self, payload: Q) -> "DeepEPLLNpuDispatchOutput[Q]":
        return DeepEPLLNpuDispatchOutput(payload, self.groups, self.origin, self.out_dtype, self.handle)

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)

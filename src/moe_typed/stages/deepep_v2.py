"""DeepEP V2 (``ElasticBuffer``): plain rows, rows expanded by expert, and the same in fixed memory for a masked product."""

from abc import abstractmethod
from typing import Annotated, ClassVar, TypeVar, final

from jaxtyping import BFloat16, Float32
from torch import Tensor
from typing_extensions import override

from ..boundary import Rename, boundary, value_error
from ..formats import Payload
from ..routing import LocalIds, RoutedScaling, Routing, live_tensor
from .base import Carry, CombineInput, DispatchOutput
from .counts import PaddedPrefixSum, SegmentEnds
from .handles import Handle

P_co = TypeVar("P_co", bound=Payload, covariant=True)
Q = TypeVar("Q", bound=Payload)


@final
class DeepEPv2PlainHandle(Handle[object]):
    """The ``EPHandle`` of a dispatch that did not expand."""


@final
class DeepEPv2ExpandedHandle(Handle[object]):
    """The ``EPHandle`` of a dispatch that expanded."""


@final
@boundary
class DeepEPv2PlainCombineInput(CombineInput):
    """Expert results in the order of the received rows: router weights applied, this rank's experts summed.

    ``hidden_states``: bf16 (rows, hidden).
    """

    hidden_states: BFloat16[Tensor, "rows hidden"]
    scaling: RoutedScaling
    handle: DeepEPv2PlainHandle


@final
@boundary
class DeepEPv2ExpandedCombineInput(CombineInput):
    """Expert results, one a slot: router weights applied, nothing summed, gaps undefined. ``hidden_states``: bf16 (slots, hidden)."""

    hidden_states: BFloat16[Tensor, "slots hidden"]
    scaling: RoutedScaling
    handle: DeepEPv2ExpandedHandle


@final
@boundary
class DeepEPv2PlainDispatchOutput(DispatchOutput[P_co, DeepEPv2PlainCombineInput]):
    """Rows by rank (flat), one for each (token, rank); ids of this rank's experts with -1 for those of others, router weights pending; owned.

    The weights of routes with -1 are those of the other ranks' experts, and count for nothing here.
    """

    combine_input: ClassVar[type[CombineInput]] = DeepEPv2PlainCombineInput
    payload: P_co
    routing: Routing[LocalIds]
    received: Annotated[PaddedPrefixSum, Rename({"local_experts": "experts"})]
    handle: DeepEPv2PlainHandle

    def check_values(self) -> None:
        """Raise BoundaryError for live rows whose data cannot be right."""
        self.payload.check_live(self.routing.count_live())

    @property
    @override
    def live_rows(self) -> Tensor | None:
        return live_tensor(self.routing.live, self.routing.topk_ids)

    @override
    def with_payload(self, payload: Q) -> "DeepEPv2PlainDispatchOutput[Q]":
        return DeepEPv2PlainDispatchOutput(payload, self.routing, self.received, self.handle)

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)


def check_segments(value: object, payload: Payload, segments: SegmentEnds) -> None:
    """Raise BoundaryError for segments beyond the rows, and for rows of segments whose data cannot be right."""
    rows, end = payload.rows, int(segments.ends[-1])
    if end > rows:
        raise value_error(value, "segments", f"end at row {end}, but there are {rows} rows")
    payload.check_live(segments.experts_of_rows(rows) >= 0)


class SegmentedDispatchOutput(DispatchOutput[P_co, DeepEPv2ExpandedCombineInput]):
    """The base of rows that lie in one segment for each local expert."""

    segments: SegmentEnds
    slot_weights: Tensor
    scaling: RoutedScaling
    handle: DeepEPv2ExpandedHandle

    @property
    @override
    def live_rows(self) -> None:
        """Return None: gaps lie between the live rows."""

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_segments``."""
        check_segments(self, self.payload, self.segments)

    @abstractmethod
    @override
    def with_payload(self, payload: Q) -> "SegmentedDispatchOutput[Q]": ...

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)


@final
@boundary
class DeepEPv2ExpandedDispatchOutput(SegmentedDispatchOutput[P_co]):
    """Rows by local expert, one for each (token, expert), in segments that begin at multiples of an alignment; the host knows how many; owned.

    There are no ids: a row's expert is its segment's. ``slot_weights``: float32 (slots,), the router weight of each row, pending; undefined in gaps.
    """

    combine_input: ClassVar[type[CombineInput]] = DeepEPv2ExpandedCombineInput
    payload: Annotated[P_co, Rename({"rows": "slots"})]
    slot_weights: Float32[Tensor, " slots"]
    segments: SegmentEnds
    scaling: RoutedScaling
    handle: DeepEPv2ExpandedHandle

    @override
    def with_payload(self, payload: Q) -> "DeepEPv2ExpandedDispatchOutput[Q]":
        return DeepEPv2ExpandedDispatchOutput(payload, self.slot_weights, self.segments, self.scaling, self.handle)


@final
@boundary
class DeepEPv2MaskedDispatchOutput(SegmentedDispatchOutput[P_co]):
    """Rows as ``DeepEPv2ExpandedDispatchOutput`` has them, but in memory for the worst case, of which the device alone knows the end; owned.

    ``max_rows``: no local expert has more rows. ``expected_rows``: about as many has one; a hint for the schedule, not a bound.
    """

    combine_input: ClassVar[type[CombineInput]] = DeepEPv2ExpandedCombineInput
    payload: Annotated[P_co, Rename({"rows": "slots"})]
    slot_weights: Float32[Tensor, " slots"]
    segments: SegmentEnds
    max_rows: int
    expected_rows: int
    scaling: RoutedScaling
    handle: DeepEPv2ExpandedHandle

    @override
    def with_payload(self, payload: Q) -> "DeepEPv2MaskedDispatchOutput[Q]":
        return DeepEPv2MaskedDispatchOutput(payload, self.slot_weights, self.segments, self.max_rows, self.expected_rows, self.scaling, self.handle)


@final
@boundary
class DeepEPv2PlainCarry(Carry):
    """What combine needs beside the expert results."""

    scaling: RoutedScaling
    handle: DeepEPv2PlainHandle


@final
@boundary
class DeepEPv2ExpandedCarry(Carry):
    """What combine needs beside the expert results."""

    scaling: RoutedScaling
    handle: DeepEPv2ExpandedHandle

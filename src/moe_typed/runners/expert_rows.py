"""Into rows that lie by expert, without a copy and without a launch: the pre functions of the rows that end at SlabRowsInput and SegmentRowsInput."""

from typing import TypeVar

from ..formats import Payload
from ..stages import (
    CombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    DeepEPv2ExpandedCarry,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2MaskedDispatchOutput,
    MooncakeDispatchOutput,
    MooncakeHandle,
    NixlDispatchOutput,
    NixlHandle,
    SegmentRowsInput,
    SlabCarry,
    SlabDispatchOutput,
    SlabRowsInput,
)

C = TypeVar("C", bound=CombineInput)


def deepep_ll_in_place(dispatched: DeepEPLLDispatchOutput[Payload]) -> tuple[SlabRowsInput, SlabCarry[DeepEPLLHandle]]:
    """Hand the slab over as it is."""
    return _slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def mooncake_in_place(dispatched: MooncakeDispatchOutput[Payload]) -> tuple[SlabRowsInput, SlabCarry[MooncakeHandle]]:
    """Do as for DeepEP low latency."""
    return _slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def nixl_in_place(dispatched: NixlDispatchOutput[Payload]) -> tuple[SlabRowsInput, SlabCarry[NixlHandle]]:
    """Do as for DeepEP low latency."""
    return _slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def deepep_v2_expanded_in_place(dispatched: DeepEPv2ExpandedDispatchOutput[Payload]) -> tuple[SegmentRowsInput, DeepEPv2ExpandedCarry]:
    """Hand the segments over as they are. The host knows how many rows came: an expert has its share of them, gaps counted in."""
    rows, segments = dispatched.payload.rows, dispatched.segments
    runner_input = SegmentRowsInput(dispatched.payload, segments, dispatched.slot_weights, -(-rows // segments.ends.shape[0]))
    return runner_input, DeepEPv2ExpandedCarry(dispatched.scaling, dispatched.handle)


def deepep_v2_masked_in_place(dispatched: DeepEPv2MaskedDispatchOutput[Payload]) -> tuple[SegmentRowsInput, DeepEPv2ExpandedCarry]:
    """Hand the segments over as they are."""
    runner_input = SegmentRowsInput(dispatched.payload, dispatched.segments, dispatched.slot_weights, dispatched.expected_rows)
    return runner_input, DeepEPv2ExpandedCarry(dispatched.scaling, dispatched.handle)


def _slab(dispatched: SlabDispatchOutput[Payload, C]) -> SlabRowsInput:
    return SlabRowsInput(dispatched.payload, dispatched.received, dispatched.capacity, dispatched.most_rows, dispatched.expected_rows)

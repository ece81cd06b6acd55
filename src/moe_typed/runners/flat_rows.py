"""Into flat rows: the pre functions of the rows of the table that end at FlatRowsInput."""

from typing import TypeVar

import torch

from ..formats import Payload
from ..routing import LocalIds, Routing, localize_by_map
from ..stages import (
    CombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    DeepEPNormalCarry,
    DeepEPNormalDispatchOutput,
    DeepEPv2ExpandedCarry,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2MaskedDispatchOutput,
    DeepEPv2PlainCarry,
    DeepEPv2PlainDispatchOutput,
    FlatRowsInput,
    MooncakeDispatchOutput,
    MooncakeHandle,
    MoriCarry,
    MoriDispatchOutput,
    MoriEPLLDispatchOutput,
    MoriEPLLHandle,
    MoriEPNormalDispatchOutput,
    MoriEPNormalHandle,
    NixlDispatchOutput,
    NixlHandle,
    SegmentedDispatchOutput,
    SlabCarry,
    SlabDispatchOutput,
    StandardCarry,
    StandardDispatchOutput,
)

C = TypeVar("C", bound=CombineInput)


def standard_pre(dispatched: StandardDispatchOutput[Payload]) -> tuple[FlatRowsInput, StandardCarry]:
    """Hand the rows over as they are: Standard and flat rows agree on order, id space and router-weight state."""
    routing = dispatched.routing
    return FlatRowsInput(dispatched.payload, routing), StandardCarry(routing.scaling)


def deepep_normal_pre(dispatched: DeepEPNormalDispatchOutput[Payload]) -> tuple[FlatRowsInput, DeepEPNormalCarry]:
    """Hand the rows over as they are."""
    return FlatRowsInput(dispatched.payload, dispatched.routing), DeepEPNormalCarry(dispatched.routing, dispatched.handle)


def deepep_v2_plain_pre(dispatched: DeepEPv2PlainDispatchOutput[Payload]) -> tuple[FlatRowsInput, DeepEPv2PlainCarry]:
    """Hand the rows over as they are."""
    routing = dispatched.routing
    return FlatRowsInput(dispatched.payload, routing), DeepEPv2PlainCarry(routing.scaling, dispatched.handle)


def deepep_v2_expanded_pre(dispatched: DeepEPv2ExpandedDispatchOutput[Payload]) -> tuple[FlatRowsInput, DeepEPv2ExpandedCarry]:
    """Give each slot its one route, to the expert of its segment; gaps go nowhere."""
    return FlatRowsInput(dispatched.payload, slot_routing(dispatched)), DeepEPv2ExpandedCarry(dispatched.scaling, dispatched.handle)


def deepep_v2_masked_pre(dispatched: DeepEPv2MaskedDispatchOutput[Payload]) -> tuple[FlatRowsInput, DeepEPv2ExpandedCarry]:
    """Do as for expanded rows."""
    return FlatRowsInput(dispatched.payload, slot_routing(dispatched)), DeepEPv2ExpandedCarry(dispatched.scaling, dispatched.handle)


def deepep_ll_pre(dispatched: DeepEPLLDispatchOutput[Payload]) -> tuple[FlatRowsInput, SlabCarry[DeepEPLLHandle]]:
    """Give each row of the slab its one route with weight 1; stale rows go nowhere. The rows stay where they are."""
    return _flat_slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def mooncake_pre(dispatched: MooncakeDispatchOutput[Payload]) -> tuple[FlatRowsInput, SlabCarry[MooncakeHandle]]:
    """Do as for DeepEP low latency."""
    return _flat_slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def nixl_pre(dispatched: NixlDispatchOutput[Payload]) -> tuple[FlatRowsInput, SlabCarry[NixlHandle]]:
    """Do as for DeepEP low latency."""
    return _flat_slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def mori_normal_pre(dispatched: MoriEPNormalDispatchOutput[Payload]) -> tuple[FlatRowsInput, MoriCarry[MoriEPNormalHandle]]:
    """Keep the routes to this rank's slots; those to others, and all of stale rows, become -1."""
    return _flat_arena(dispatched), MoriCarry(dispatched.origin, dispatched.handle)


def mori_ll_pre(dispatched: MoriEPLLDispatchOutput[Payload]) -> tuple[FlatRowsInput, MoriCarry[MoriEPLLHandle]]:
    """Do as in normal mode."""
    return _flat_arena(dispatched), MoriCarry(dispatched.origin, dispatched.handle)


def slot_routing(dispatched: SegmentedDispatchOutput[Payload]) -> Routing[LocalIds]:
    """Return the routing of segmented rows: one column, the slot's expert and weight; a gap goes nowhere, with weight 0."""
    ids = dispatched.segments.experts_of_rows(dispatched.payload.rows).unsqueeze(1)
    weights = torch.where(ids < 0, 0.0, dispatched.slot_weights.unsqueeze(1))
    return Routing(ids, weights, LocalIds, dispatched.segments.ends.shape[0], dispatched.scaling, False, ids.shape[0])


def _flat_slab(dispatched: SlabDispatchOutput[Payload, C]) -> FlatRowsInput:
    return FlatRowsInput(dispatched.payload, dispatched.unit_routing())


def _flat_arena(dispatched: MoriDispatchOutput[Payload, C]) -> FlatRowsInput:
    return FlatRowsInput(dispatched.payload, localize_by_map(dispatched.routing, dispatched.residence.map))

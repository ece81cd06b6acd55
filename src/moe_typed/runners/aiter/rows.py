"""Into AITER: the pre functions of the rows of the table that end at AITER's inputs.

Where ids are local, -1 goes to the sink slot. Where they are slots over all ranks, they stay, and the mask says which are here.
"""

from typing import TypeVar

import torch

from ...formats import Payload
from ...routing import LocalIds, Routing, to_sink
from ...stages import (
    AiterSinkInput,
    AiterSlotInput,
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
    MooncakeDispatchOutput,
    MooncakeHandle,
    MoriCarry,
    MoriEPLLDispatchOutput,
    MoriEPLLHandle,
    MoriEPNormalDispatchOutput,
    MoriEPNormalHandle,
    NixlDispatchOutput,
    NixlHandle,
    SlabCarry,
    SlabDispatchOutput,
    StandardCarry,
    StandardDispatchOutput,
)
from ..flat_rows import slot_routing

C = TypeVar("C", bound=CombineInput)

_OUT_DTYPES = (torch.bfloat16, torch.float16)  # all that fused_moe writes


def standard_to_aiter(dispatched: StandardDispatchOutput[Payload]) -> tuple[AiterSinkInput, StandardCarry]:
    """Send -1 to the sink; padding rows have nothing else. Quantised rows come back as bf16."""
    dtype = dispatched.payload.format.data_dtype
    out_dtype = dtype if dtype in _OUT_DTYPES else torch.bfloat16
    return _sink(dispatched.payload, dispatched.routing, out_dtype), StandardCarry(dispatched.routing.scaling)


def deepep_normal_to_aiter(dispatched: DeepEPNormalDispatchOutput[Payload]) -> tuple[AiterSinkInput, DeepEPNormalCarry]:
    """Send -1 to the sink."""
    return _sink(dispatched.payload, dispatched.routing), DeepEPNormalCarry(dispatched.routing, dispatched.handle)


def deepep_v2_plain_to_aiter(dispatched: DeepEPv2PlainDispatchOutput[Payload]) -> tuple[AiterSinkInput, DeepEPv2PlainCarry]:
    """Send -1 to the sink, and every route of the rows after the live ones."""
    routing = dispatched.routing
    return _sink(dispatched.payload, routing), DeepEPv2PlainCarry(routing.scaling, dispatched.handle)


def deepep_v2_expanded_to_aiter(dispatched: DeepEPv2ExpandedDispatchOutput[Payload]) -> tuple[AiterSinkInput, DeepEPv2ExpandedCarry]:
    """Give each slot its one route, to the expert of its segment; gaps go to the sink."""
    return _sink(dispatched.payload, slot_routing(dispatched)), DeepEPv2ExpandedCarry(dispatched.scaling, dispatched.handle)


def deepep_v2_masked_to_aiter(dispatched: DeepEPv2MaskedDispatchOutput[Payload]) -> tuple[AiterSinkInput, DeepEPv2ExpandedCarry]:
    """Do as for expanded rows."""
    return _sink(dispatched.payload, slot_routing(dispatched)), DeepEPv2ExpandedCarry(dispatched.scaling, dispatched.handle)


def deepep_ll_to_aiter(dispatched: DeepEPLLDispatchOutput[Payload]) -> tuple[AiterSinkInput, SlabCarry[DeepEPLLHandle]]:
    """Give each row of the slab its one route with weight 1; stale rows go to the sink. The rows stay where they are."""
    return _slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def mooncake_to_aiter(dispatched: MooncakeDispatchOutput[Payload]) -> tuple[AiterSinkInput, SlabCarry[MooncakeHandle]]:
    """Do as for DeepEP low latency."""
    return _slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def nixl_to_aiter(dispatched: NixlDispatchOutput[Payload]) -> tuple[AiterSinkInput, SlabCarry[NixlHandle]]:
    """Do as for DeepEP low latency."""
    return _slab(dispatched), SlabCarry(dispatched.origin, dispatched.capacity, dispatched.handle)


def mori_normal_to_aiter(dispatched: MoriEPNormalDispatchOutput[Payload]) -> tuple[AiterSlotInput, MoriCarry[MoriEPNormalHandle]]:
    """Hand everything over as it is: AITER reads the total received from the device, and the slots of this rank from the mask."""
    runner_input = AiterSlotInput(dispatched.payload, dispatched.routing, dispatched.residence.mask, dispatched.out_dtype, dispatched.staging)
    return runner_input, MoriCarry(dispatched.origin, dispatched.handle)


def mori_ll_to_aiter(dispatched: MoriEPLLDispatchOutput[Payload]) -> tuple[AiterSlotInput, MoriCarry[MoriEPLLHandle]]:
    """Do as in normal mode, without a staging view."""
    runner_input = AiterSlotInput(dispatched.payload, dispatched.routing, dispatched.residence.mask, dispatched.out_dtype)
    return runner_input, MoriCarry(dispatched.origin, dispatched.handle)


def _sink(payload: Payload, routing: Routing[LocalIds], out_dtype: torch.dtype = torch.bfloat16) -> AiterSinkInput:
    return AiterSinkInput(payload, to_sink(routing), out_dtype)


def _slab(dispatched: SlabDispatchOutput[Payload, C]) -> AiterSinkInput:
    return _sink(dispatched.payload, dispatched.unit_routing())

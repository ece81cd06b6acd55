"""The ways home: from a runner's rows to what each dispatcher's combine takes. They are the same after every runner.

Libraries combine bf16 alone, so results of another dtype are rounded to it here.
"""

import torch
from torch import Tensor

from ..stages import (
    DeepEPLLCombineInput,
    DeepEPLLHandle,
    DeepEPNormalCarry,
    DeepEPNormalCombineInput,
    DeepEPv2ExpandedCarry,
    DeepEPv2ExpandedCombineInput,
    DeepEPv2PlainCarry,
    DeepEPv2PlainCombineInput,
    MooncakeCombineInput,
    MooncakeHandle,
    MoriCarry,
    MoriEPLLCombineInput,
    MoriEPLLHandle,
    MoriEPNormalCombineInput,
    MoriEPNormalHandle,
    NixlCombineInput,
    NixlHandle,
    RowsOutput,
    SlabCarry,
    StandardCarry,
    StandardCombineInput,
    SummedRowsOutput,
)


def standard_post(output: SummedRowsOutput, carry: StandardCarry) -> StandardCombineInput:
    """Bring the results together with the scaling that combine settles."""
    return StandardCombineInput(output.hidden_states, carry.scaling)


def deepep_normal_post(output: SummedRowsOutput, carry: DeepEPNormalCarry) -> DeepEPNormalCombineInput:
    """Bring the results together with the received routing and the handle."""
    return DeepEPNormalCombineInput(_bf16(output), carry.routing, carry.handle)


def deepep_v2_plain_post(output: RowsOutput, carry: DeepEPv2PlainCarry) -> DeepEPv2PlainCombineInput:
    """Bring the results together with the handle; combine reads the live rows alone."""
    return DeepEPv2PlainCombineInput(_bf16(output), carry.scaling, carry.handle)


def deepep_v2_expanded_post(output: RowsOutput, carry: DeepEPv2ExpandedCarry) -> DeepEPv2ExpandedCombineInput:
    """Bring the slots' results together with the handle: each slot has one route, so that its sum is its weighted result."""
    return DeepEPv2ExpandedCombineInput(_bf16(output), carry.scaling, carry.handle)


def deepep_ll_post(output: RowsOutput, carry: SlabCarry[DeepEPLLHandle]) -> DeepEPLLCombineInput:
    """Bring the slab together with this rank's routing: ``pre`` gave each row weight 1, so that the router's is still pending."""
    return DeepEPLLCombineInput(_slab(output, carry.capacity), carry.origin, carry.handle)


def mooncake_post(output: RowsOutput, carry: SlabCarry[MooncakeHandle]) -> MooncakeCombineInput:
    """Do as for DeepEP low latency."""
    return MooncakeCombineInput(_slab(output, carry.capacity), carry.origin, carry.handle)


def nixl_post(output: RowsOutput, carry: SlabCarry[NixlHandle]) -> NixlCombineInput:
    """Do as for DeepEP low latency."""
    return NixlCombineInput(_slab(output, carry.capacity), carry.origin, carry.handle)


def mori_normal_post(output: RowsOutput, carry: MoriCarry[MoriEPNormalHandle]) -> MoriEPNormalCombineInput:
    """Bring the results together with this rank's own routing, by which MoRI finds the way home; it reads the live rows alone."""
    return MoriEPNormalCombineInput(_bf16(output), carry.origin, carry.handle)


def mori_ll_post(output: RowsOutput, carry: MoriCarry[MoriEPLLHandle]) -> MoriEPLLCombineInput:
    """Do as in normal mode."""
    return MoriEPLLCombineInput(_bf16(output), carry.origin, carry.handle)


def _bf16(output: RowsOutput) -> Tensor:
    rows = output.hidden_states
    return rows if rows.dtype is torch.bfloat16 else rows.to(torch.bfloat16)  # a call of ``to`` that changes nothing costs a microsecond


def _slab(output: RowsOutput, capacity: int) -> Tensor:
    rows = _bf16(output)
    return rows.view(-1, capacity, rows.shape[1])

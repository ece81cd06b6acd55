"""The emulated libraries of a rank, made for the sizes of these tests."""

from typing import Literal

import torch

from moe_typed.dispatchers import (
    ExpertSpread,
)
from moe_typed.routing import PhysicalIds, Residence, contiguous_residence
from tests.dispatchers.support import (
    CAPACITY,
    LOCAL,
    NARROW,
    TOPK,
    WIDE,
    WIRES,
)
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_elastic import EmulatedElasticBuffer
from tests.emulation.mori import EmulatedDispatchCombineOp
from tests.emulation.mori_config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from tests.emulation.mori_v2 import EmulatedCommunicator, EmulatedDispatchCombineOpV2
from tests.emulation.mori_v2_config import EpDispatchCombineConfigV2
from tests.emulation.nixl import EmulatedNixlBuffer
from tests.emulation.world import Group


def spread_of(group: Group) -> ExpertSpread:
    return ExpertSpread(group.rank(), group.size(), LOCAL * group.size())


def residence_of(group: Group) -> Residence[PhysicalIds]:
    spread = spread_of(group)
    return contiguous_residence(PhysicalIds, spread.num_experts, spread.first, spread.local, torch.device("cpu"))


def low_latency_buffer(group: Group, hidden: int = WIDE) -> EmulatedBuffer:
    size = EmulatedBuffer.get_low_latency_rdma_size_hint(CAPACITY, hidden, group.size(), LOCAL * group.size())
    return EmulatedBuffer(group, num_rdma_bytes=size, low_latency_mode=True)


def nixl_buffer(group: Group, topk_idx_t: torch.dtype = torch.int32) -> EmulatedNixlBuffer:
    buffer = EmulatedNixlBuffer(rank=group.rank(), world=group.world, topk_idx_t=topk_idx_t)
    size = EmulatedNixlBuffer.get_rdma_size_hint(CAPACITY, WIDE, group.size(), LOCAL * group.size())
    buffer.update_memory_buffers(group.size(), LOCAL, size)
    buffer.connect_ranks([rank for rank in range(group.size()) if rank != group.rank()])
    return buffer


def elastic_buffer(group: Group) -> EmulatedElasticBuffer:
    return EmulatedElasticBuffer(group, num_max_tokens_per_rank=CAPACITY, hidden=NARROW, num_topk=TOPK)


def scales_of(wire: str, hidden: int = NARROW) -> tuple[int, int]:
    """Return how many scales of how many bytes MoRI is to carry."""
    spec = WIRES[wire].target.format.scale
    return (0, 0) if spec is None else (hidden // spec.group[1], spec.dtype.itemsize)


def mori_config(group: Group, wire: str, kernel: EpDispatchCombineKernelType, hidden: int = NARROW) -> EpDispatchCombineConfig:
    dim, size = scales_of(wire, hidden)
    return EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=group.rank(),
        world_size=group.size(),
        hidden_dim=hidden,
        scale_dim=dim,
        scale_type_size=size,
        max_token_type_size=2,
        max_num_inp_token_per_rank=CAPACITY,
        num_experts_per_rank=LOCAL,
        num_experts_per_token=TOPK,
        kernel_type=kernel,
    )


def mori_op(group: Group, wire: str, kernel: EpDispatchCombineKernelType, hidden: int = NARROW) -> EmulatedDispatchCombineOp:
    return EmulatedDispatchCombineOp(mori_config(group, wire, kernel, hidden), group=group, gfx="gfx950")


def mori_v2_op(group: Group, wire: str, combine_mode: Literal["gather", "scatter"] = "gather") -> EmulatedDispatchCombineOpV2:
    dim, size = scales_of(wire)
    config = EpDispatchCombineConfigV2(
        group.rank(),
        group.size(),
        NARROW,
        CAPACITY,
        LOCAL,
        TOPK,
        dispatch_data_type=WIRES[wire].target.format.data_dtype,
        combine_data_type=torch.bfloat16,
        scale_dim=dim,
        scale_type_size=size,
        combine_mode=combine_mode,
    )
    return EmulatedDispatchCombineOpV2(config, EmulatedCommunicator(group), gfx="gfx950")

"""The libraries' own classes are what the dispatchers take, and so are their emulations."""

from typing import assert_type

import deep_ep
import nixl_ep
import torch
from mooncake import mooncake_ep_buffer
from mori import ops as mori_v1
from mori.ops import dispatch_combine_v2 as mori_v2

from moe_typed import Bf16Rows, MxFp8Rows, bf16_as_is, quantize_mxfp8
from moe_typed.dispatchers import (
    LL_BF16,
    LL_FP8,
    LL_FP8_ROWS,
    LL_FP8_UE8M0,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    DeepEPv2ExpandedDispatcher,
    DeepEPv2MaskedDispatcher,
    DeepEPv2PlainDispatcher,
    ExpertSpread,
    MooncakeDispatcher,
    MoriLowLatencyDispatcher,
    MoriNormalDispatcher,
    MoriV2Dispatcher,
    NixlDispatcher,
    PairedArena,
    RingArena,
)
from moe_typed.formats import Fp8Block128PackedSlabRows, Fp8Block128Rows, Fp8Block128SlabRows
from moe_typed.routing import PaddedPhysicalIds, PhysicalIds, Residence, Routing
from moe_typed.stages import DeepEPLLDispatchOutput, DeepEPNormalDispatchOutput, MooncakeDispatchOutput, MoriEPNormalDispatchOutput
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_common import Config
from tests.emulation.deep_ep_elastic import EmulatedElasticBuffer
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mori import EmulatedDispatchCombineOp
from tests.emulation.mori_v2 import EmulatedDispatchCombineOpV2
from tests.emulation.nixl import EmulatedNixlBuffer


def deepep(
    buffer: deep_ep.Buffer | EmulatedBuffer, spread: ExpertSpread, rows: Bf16Rows, slots: Routing[PhysicalIds], padded: Routing[PaddedPhysicalIds]
) -> None:
    if isinstance(buffer, deep_ep.Buffer):
        config = deep_ep.Buffer.get_dispatch_config(2)
        normal = DeepEPNormalDispatcher(buffer, quantize_mxfp8, spread, topk_idx_t=deep_ep.topk_idx_t, dispatch_config=config)
        slab = DeepEPLowLatencyDispatcher(buffer, LL_FP8, spread, max_tokens=4, topk_idx_t=deep_ep.topk_idx_t, arena=RingArena())
    else:
        normal = DeepEPNormalDispatcher(buffer, quantize_mxfp8, spread, topk_idx_t=torch.int64, dispatch_config=Config())
        slab = DeepEPLowLatencyDispatcher(buffer, LL_FP8, spread, max_tokens=4, topk_idx_t=torch.int64, arena=RingArena())
        DeepEPLowLatencyDispatcher(buffer, LL_FP8_UE8M0, spread, max_tokens=4, topk_idx_t=torch.int64, arena=RingArena())
    assert_type(normal.dispatch(rows, slots), DeepEPNormalDispatchOutput[MxFp8Rows])
    assert_type(slab.dispatch(rows, padded), DeepEPLLDispatchOutput[Fp8Block128SlabRows])
    assert_type(slab.start_dispatch(rows, slots).wait(), DeepEPLLDispatchOutput[Fp8Block128SlabRows])


def deepep_v2(buffer: deep_ep.ElasticBuffer, emulated: EmulatedElasticBuffer, spread: ExpertSpread) -> None:
    DeepEPv2PlainDispatcher(buffer, bf16_as_is, spread, max_tokens=4, topk_idx_t=deep_ep.topk_idx_t)
    DeepEPv2ExpandedDispatcher(buffer, bf16_as_is, spread, max_tokens=4, topk_idx_t=deep_ep.topk_idx_t, expert_alignment=128)
    DeepEPv2MaskedDispatcher(emulated, quantize_mxfp8, spread, max_tokens=4, topk_idx_t=torch.int64, expert_alignment=128)


def mori(
    v1: mori_v1.EpDispatchCombineOp, v2: mori_v2.EpDispatchCombineOp, residence: Residence[PhysicalIds], rows: Bf16Rows, slots: Routing[PhysicalIds]
) -> None:
    assert_type(MoriNormalDispatcher(v1, bf16_as_is, residence, arena=PairedArena()).dispatch(rows, slots), MoriEPNormalDispatchOutput[Bf16Rows])
    assert_type(MoriV2Dispatcher(v2, quantize_mxfp8, residence, arena=PairedArena()).dispatch(rows, slots), MoriEPNormalDispatchOutput[MxFp8Rows])
    MoriLowLatencyDispatcher(v1, bf16_as_is, residence, arena=PairedArena()).start_dispatch(rows, slots).wait()


def emulated_mori(v1: EmulatedDispatchCombineOp, v2: EmulatedDispatchCombineOpV2, residence: Residence[PhysicalIds]) -> None:
    MoriNormalDispatcher(v1, bf16_as_is, residence, arena=PairedArena())
    MoriV2Dispatcher(v2, bf16_as_is, residence, arena=PairedArena())


def mooncake(
    buffer: mooncake_ep_buffer.Buffer, emulated: EmulatedMooncakeBuffer, spread: ExpertSpread, rows: Bf16Rows, slots: Routing[PaddedPhysicalIds]
) -> None:
    fast = MooncakeDispatcher(buffer, LL_FP8, spread, max_tokens=4, active_ranks=None, timeout_us=-1, arena=RingArena())
    slow = MooncakeDispatcher(emulated, LL_FP8_ROWS, spread, max_tokens=4, active_ranks=None, timeout_us=-1, arena=RingArena())
    assert_type(fast.dispatch(rows, slots), MooncakeDispatchOutput[Fp8Block128SlabRows])
    assert_type(slow.dispatch(rows, slots), MooncakeDispatchOutput[Fp8Block128Rows])


def nixl(buffer: nixl_ep.Buffer, emulated: EmulatedNixlBuffer, spread: ExpertSpread) -> None:
    NixlDispatcher(buffer, LL_BF16, spread, max_tokens=4, topk_idx_t=nixl_ep.topk_idx_t, arena=RingArena())
    packed = NixlDispatcher(emulated, LL_FP8_UE8M0, spread, max_tokens=4, topk_idx_t=torch.int32, arena=RingArena())
    assert_type(packed.payload, type[Fp8Block128PackedSlabRows])

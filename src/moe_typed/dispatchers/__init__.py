"""Dispatchers: how rows reach the ranks of their experts and come home.

Those over a communication library take the library's own object, which the engine makes, and are typed by protocols of what they call: none of them
imports a library.
"""

from .arena import PairedArena, RingArena
from .ascend_tp import AscendTPDispatcher, Sorted, TPRouting, as_int8, as_mxfp8, as_they_are, as_they_are_v1, on_310p
from .base import Dispatcher, MoELayer
from .deepep import DeepEPNormalBuffer, DeepEPNormalDispatcher
from .deepep_low_latency import DeepEPLowLatencyDispatcher
from .deepep_npu import NPU_BF16, NPU_INT8, NPU_MXFP8, DeepEPLLNpuDispatcher, DeepEPNormalNpuDispatcher, NpuWire
from .deepep_v2 import DeepEPv2ExpandedDispatcher, DeepEPv2MaskedDispatcher, DeepEPv2PlainDispatcher
from .elastic import DeepEPElasticBuffer, ElasticDispatcher, ElasticHandle
from .errors import ArenaError, CapacityError, LibraryError, ReceiveCapError
from .low_latency import LL_BF16, LL_FP8, LL_FP8_ROWS, LL_FP8_UE8M0, LowLatencyWire, SlabDispatcher
from .low_latency_buffer import LowLatencyBuffer
from .mooncake import MooncakeBuffer, MooncakeDispatcher
from .mori import MoriLowLatencyDispatcher, MoriNormalDispatcher, MoriOp
from .mori_base import MoriDispatcher
from .mori_config import MoriConfig, MoriV1Config, MoriV2Config
from .mori_v2 import MoriV2Dispatcher, MoriV2Op
from .nixl import NixlDispatcher
from .pending import PendingCombine, PendingDispatch
from .receive import BySenders, ReceiveCap, VerifiedCap, WholeArena
from .spread import ExpertSpread
from .standard import StandardDispatcher

__all__ = [
    "LL_BF16",
    "LL_FP8",
    "LL_FP8_ROWS",
    "LL_FP8_UE8M0",
    "NPU_BF16",
    "NPU_INT8",
    "NPU_MXFP8",
    "ArenaError",
    "AscendTPDispatcher",
    "BySenders",
    "CapacityError",
    "DeepEPElasticBuffer",
    "DeepEPLLNpuDispatcher",
    "DeepEPLowLatencyDispatcher",
    "DeepEPNormalBuffer",
    "DeepEPNormalDispatcher",
    "DeepEPNormalNpuDispatcher",
    "DeepEPv2ExpandedDispatcher",
    "DeepEPv2MaskedDispatcher",
    "DeepEPv2PlainDispatcher",
    "Dispatcher",
    "ElasticDispatcher",
    "ElasticHandle",
    "ExpertSpread",
    "LibraryError",
    "LowLatencyBuffer",
    "LowLatencyWire",
    "MoELayer",
    "MooncakeBuffer",
    "MooncakeDispatcher",
    "MoriConfig",
    "MoriDispatcher",
    "MoriLowLatencyDispatcher",
    "MoriNormalDispatcher",
    "MoriOp",
    "MoriV1Config",
    "MoriV2Config",
    "MoriV2Dispatcher",
    "MoriV2Op",
    "NixlDispatcher",
    "NpuWire",
    "PairedArena",
    "PendingCombine",
    "PendingDispatch",
    "ReceiveCap",
    "ReceiveCapError",
    "RingArena",
    "SlabDispatcher",
    "Sorted",
    "StandardDispatcher",
    "TPRouting",
    "VerifiedCap",
    "WholeArena",
    "as_int8",
    "as_mxfp8",
    "as_they_are",
    "as_they_are_v1",
    "on_310p",
]

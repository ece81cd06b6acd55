"""Which experts a row goes to: id spaces, routings, selection rules, placements, shared experts, and where the routed scaling factor is."""

from .ids import Ids, LocalIds, LocalSinkIds, LogicalIds, PaddedPhysicalIds, PhysicalIds, SlotIds
from .loads import Load, OneHotLoad, RecordedLoad, RoundRobinLoad, UniformLoad, ZipfLoad
from .padded import mask_padded
from .placement import BalancedPlacement, HashedPlacement, Placement, StaticPlacement, fill_nowhere, in_order
from .residence import (
    ExpertMap,
    ExpertMask,
    Residence,
    SinkMask,
    contiguous_map,
    contiguous_residence,
    from_sink,
    localize_by_map,
    map_of,
    mask_of,
    sink_mask,
    to_sink,
)
from .routing import DeviceCount, Routing, from_int64_topk, from_topk, int64_ids, live_mask, live_tensor, localize
from .scaling import Pending, RoutedScaling, Settled
from .shared import RankSharedSlots, SharedSlots, append_rank_shared, append_shared
from .topk import GroupedTopK, HashTopK, Router, ScoredTopK, Selection, SoftmaxTopK, TopKSoftmax
from .weigh import weigh_input

__all__ = [
    "BalancedPlacement",
    "DeviceCount",
    "ExpertMap",
    "ExpertMask",
    "GroupedTopK",
    "HashTopK",
    "HashedPlacement",
    "Ids",
    "Load",
    "LocalIds",
    "LocalSinkIds",
    "LogicalIds",
    "OneHotLoad",
    "PaddedPhysicalIds",
    "Pending",
    "PhysicalIds",
    "Placement",
    "RankSharedSlots",
    "RecordedLoad",
    "Residence",
    "RoundRobinLoad",
    "RoutedScaling",
    "Router",
    "Routing",
    "ScoredTopK",
    "Selection",
    "Settled",
    "SharedSlots",
    "SinkMask",
    "SlotIds",
    "SoftmaxTopK",
    "StaticPlacement",
    "TopKSoftmax",
    "UniformLoad",
    "ZipfLoad",
    "append_rank_shared",
    "append_shared",
    "contiguous_map",
    "contiguous_residence",
    "fill_nowhere",
    "from_int64_topk",
    "from_sink",
    "from_topk",
    "in_order",
    "int64_ids",
    "live_mask",
    "live_tensor",
    "localize",
    "localize_by_map",
    "map_of",
    "mask_of",
    "mask_padded",
    "sink_mask",
    "to_sink",
    "weigh_input",
]

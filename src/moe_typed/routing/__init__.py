"""Which experts a row goes to: id spaces, routings, selection rules, and where the routed scaling factor is."""

from .ids import Ids, LocalIds, LocalSinkIds, LogicalIds, PhysicalIds
from .routing import DeviceCount, Routing, from_topk, live_mask, localize
from .scaling import Pending, RoutedScaling, Settled
from .topk import GroupedSigmoidTopK, Selection, SoftmaxTopK, TopKSoftmax, stable_topk

__all__ = [
    "DeviceCount",
    "GroupedSigmoidTopK",
    "Ids",
    "LocalIds",
    "LocalSinkIds",
    "LogicalIds",
    "Pending",
    "PhysicalIds",
    "RoutedScaling",
    "Routing",
    "Selection",
    "Settled",
    "SoftmaxTopK",
    "TopKSoftmax",
    "from_topk",
    "live_mask",
    "localize",
    "stable_topk",
]

"""Padding rows, marked in the routing itself for consumers that look at ids and weights alone."""

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from ..ops.padded_rows import reference
from .ids import Ids
from .routing import DeviceCount, Routing, live_tensor
from .scaling import RoutedScaling

I = TypeVar("I", bound=Ids)  # noqa: E741  the id space, as everywhere
S = TypeVar("S", bound=RoutedScaling)

Fill: TypeAlias = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor]]


def mask_padded(routing: Routing[I, S], count: Tensor) -> Routing[I, S]:
    """Return the routing whose rows from ``count`` on go nowhere: the sentinel of its id space, and weight 0.

    ``count``: int32 or int64, one element, on the device of the ids; it is read there, so a CUDA graph may replay with another.
    Raises: TypeError or ValueError for any other count; ValueError for an id space without a sentinel.
    """
    return mask_with(reference.fill_padded_rows, routing, count)


def mask_with(function: Fill, routing: Routing[I, S], count: Tensor) -> Routing[I, S]:
    """Do ``mask_padded`` by an implementation of the kernel."""
    reference.check_count(count, routing.topk_ids)
    sentinel = routing.space.sentinel(routing.num_experts)
    if sentinel is None:
        raise ValueError(f"{routing.space.title} ids have no sentinel for rows that go nowhere; mask the rows before the ids become such")
    live = live_tensor(routing.live, routing.topk_ids)
    count = count.view(1) if live is None else torch.minimum(count.view(1), live)  # what was padding already stays padding
    ids, weights = function(routing.topk_ids, routing.topk_weights, count, sentinel)
    return routing.limited(ids, weights, DeviceCount(count.to(torch.int32)))

"""Tensor parallelism: the part of each expert's width that one rank holds."""

from collections.abc import Callable
from typing import TypeVar, cast

import torch

from ...boundary import fields_of
from ..gate_up import GateUpOrder, Interleaved
from .base import ExpertWeights, Shard

W = TypeVar("W", bound=ExpertWeights[GateUpOrder])


def shard_inter(weights: W, rank: int, size: int) -> W:
    """Return the experts that rank ``rank`` of ``size`` holds: the same class, with ``inter`` divided by ``size``.

    Each rank's result is a partial sum of the layer's. ``b2`` is added by rank 0 alone, and is zero on the others.
    Raises: ValueError when ``size`` does not divide inter, or a rank's part would cut a scale block or a packed word; nothing is copied then.
    """
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} of {size}")
    inter, shards = weights.inter, weights.shards
    if inter % size:
        raise ValueError(f"inter = {inter} cannot be divided among {size} ranks")
    for name, shard in shards.items():
        unit = _unit(shard, weights.order)
        if getattr(weights, name) is not None and (inter // size) % unit:
            raise ValueError(
                f"inter = {inter} on {size} ranks is {inter // size} each, which is not a multiple of {unit}: {name} has one entry for {unit} of it"
            )
    changes = {name: _part(getattr(weights, name), shard, weights.order, rank, size) for name, shard in shards.items()}
    if weights.b2 is not None and rank != 0:
        changes["b2"] = torch.zeros_like(weights.b2)
    make = cast("Callable[..., W]", type(weights))
    return make(**{field.name: changes.get(field.name, getattr(weights, field.name)) for field in fields_of(type(weights))})


def _unit(shard: Shard, order: type[GateUpOrder]) -> int:
    """Return how much of inter one entry stands for: half as much where gate and up lie within one entry's rows."""
    return shard.unit // 2 if shard.joined and order is Interleaved and shard.unit > 1 else shard.unit


def _part(tensor: torch.Tensor | None, shard: Shard, order: type[GateUpOrder], rank: int, size: int) -> torch.Tensor | None:
    if tensor is None:
        return None
    if shard.joined and order is not Interleaved:
        return order.part(tensor, shard.dim, rank, size)
    # Interleaved gate and up of one rank are neighbours already.
    per = tensor.shape[shard.dim] // size
    return tensor.narrow(shard.dim, rank * per, per).contiguous()

"""Routings for the tests of this room, and what is said of a routing in one line."""

import torch
from torch import Tensor

from moe_typed import DeviceCount, LogicalIds, Pending, Routing, Settled
from moe_typed.routing import Ids, PaddedPhysicalIds, RoutedScaling, in_order

NAN = float("nan")

# All bfloat16 numbers with magnitudes from 1/8 up to 8: float16 and float32 hold the same.
_MAGNITUDES = torch.arange(0x3E00, 0x4100, dtype=torch.int16).view(torch.bfloat16)
_NUMBERS = torch.cat((_MAGNITUDES, -_MAGNITUDES)).float()


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def vector(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def floats(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float32)


def count(live: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([live], dtype=dtype)


def logical(topk_ids: Tensor, experts: int, live: int | DeviceCount | None = None) -> Routing[LogicalIds, Settled]:
    """Return a routing with a weight of its own for every route."""
    weights = torch.arange(1, topk_ids.numel() + 1, dtype=torch.float32).view(topk_ids.shape)
    return Routing(topk_ids, weights, LogicalIds, experts, Settled(), True, topk_ids.shape[0] if live is None else live)


def physical(topk_ids: Tensor, slots: int, live: int | DeviceCount | None = None) -> Routing[PaddedPhysicalIds, Settled]:
    return in_order(logical(topk_ids, slots, live))


def random(rows: int, k: int, experts: int, *, seed: int = 0, lowest: int = -1) -> Tensor:
    return torch.randint(lowest, experts, (rows, k), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def distinct(rows: int, experts: int, seed: int = 0) -> Tensor:
    """Return logits that differ within each row in every dtype, so that the choice is not a matter of rounding."""
    generator = torch.Generator().manual_seed(seed)
    return _NUMBERS[torch.rand(rows, len(_NUMBERS), generator=generator).argsort(1)[:, :experts]]


def pending(routing: Routing[LogicalIds, Settled], factor: float) -> Routing[LogicalIds, Pending]:
    """Return the same routes with the factor still to be applied."""
    return Routing(routing.topk_ids, routing.topk_weights, routing.space, routing.num_experts, Pending(factor), routing.renormalized, routing.live)


def same(routing: Routing[Ids, RoutedScaling], topk_ids: Tensor, topk_weights: Tensor) -> None:
    """Say that a routing holds just these ids and weights, in the dtypes of every routing."""
    assert (routing.topk_ids.dtype, routing.topk_weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(routing.topk_ids, topk_ids)
    assert torch.equal(routing.topk_weights, topk_weights)

"""Padded rows in torch operations, and the checks that both implementations make."""

import torch
from torch import Tensor


def check_count(count: object, ids: Tensor) -> None:
    """Raise TypeError unless ``count`` is an integer tensor, and ValueError unless it has one element and lives where ``ids`` does."""
    if not isinstance(count, Tensor):
        raise TypeError(f"the count of live rows must be a tensor of one integer on {ids.device}; got {type(count).__name__}")
    if count.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"the count of live rows must be int32 or int64; got {count.dtype}")
    if count.numel() != 1:
        raise ValueError(f"the count of live rows must have one element; got {list(count.shape)}")
    if count.device != ids.device:
        raise ValueError(f"the count of live rows is on {count.device}, but the ids are on {ids.device}")


def fill_padded_rows(ids: Tensor, weights: Tensor, count: Tensor, fill: int = -1) -> tuple[Tensor, Tensor]:
    """Return ids int32 and weights float32 (rows, k) whose rows from ``count`` on hold ``fill``, a sentinel or a sink, and weight 0.

    ``count``: int32 or int64, one element. Raises: TypeError or ValueError for any other count.
    """
    check_count(count, ids)
    is_padding = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) >= count.view(1, 1)
    return ids.masked_fill(is_padding, fill), weights.masked_fill(is_padding, 0.0)


def fill_padded_rows_(ids: Tensor, weights: Tensor, count: Tensor, fill: int = -1) -> None:
    """Do the same in place."""
    check_count(count, ids)
    is_padding = torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) >= count.view(1, 1)
    ids.masked_fill_(is_padding, fill)
    weights.masked_fill_(is_padding, 0.0)

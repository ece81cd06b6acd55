"""Shared-expert columns in torch operations: append, remap, mask."""

import torch
from torch import Tensor


def append_shared(
    ids: Tensor, weights: Tensor, num_shared: int, first_shared_id: int, scale: float, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ids int32 and weights float32 (rows, k + num_shared): the routed columns, then the ids from ``first_shared_id`` on, weighing ``scale``.

    With global slots ``first_shared_id`` is the number of routed experts. ``live``: int32 (1,), the leading rows that count, None for all; the
    rest get ids -1 and weights 0 in every column. Where ``num_shared`` <= 0, ids and weights come back as they are.
    """
    if num_shared <= 0:
        return ids, weights
    rows = ids.shape[0]
    shared = torch.arange(first_shared_id, first_shared_id + num_shared, dtype=torch.int32, device=ids.device).expand(rows, -1)
    ids = torch.cat((ids, shared), 1)
    weights = torch.cat((weights, weights.new_full((rows, num_shared), scale)), 1)
    if live is None:
        return ids, weights
    is_live = torch.arange(rows, device=ids.device).unsqueeze(1) < live
    return torch.where(is_live, ids, -1), torch.where(is_live, weights, 0.0)


def append_shared_interleaved(
    ids: Tensor, weights: Tensor, num_shared: int, num_local_routed: int, ep_rank: int, scale: float, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Do the same where every rank numbers ``num_local_routed`` routed slots and then its own ``num_shared`` shared ones (DeepEP's layout).

    A routed id moves up by the shared slots of the ranks before it; -1 stays. The shared ids are those of ``ep_rank``.
    """
    if num_shared <= 0:
        return ids, weights
    moved = torch.where(ids < 0, ids, ids + ids // num_local_routed * num_shared)
    return append_shared(moved, weights, num_shared, first_local_shared_id(num_local_routed, num_shared, ep_rank), scale, live)


def first_local_shared_id(num_local_routed: int, num_shared: int, ep_rank: int) -> int:
    """Return where the shared slots of ``ep_rank`` begin in the interleaved layout: behind its routed slots."""
    return ep_rank * (num_local_routed + num_shared) + num_local_routed

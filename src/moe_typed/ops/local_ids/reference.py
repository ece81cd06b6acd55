"""Local ids in torch operations."""

import torch
from torch import Tensor


def local_ids(topk_ids: Tensor, topk_weights: Tensor, first: int, count: int, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ids int32 and weights float32 (rows, k) over the ``count`` experts from ``first`` on; routes elsewhere hold -1 and weight 0.

    ``topk_ids``: int32 or int64. ``topk_weights``: any floating dtype. ``live``: int32 (1,), the leading rows that count; None for all.
    """
    ids = topk_ids - first
    here = (ids >= 0) & (ids < count)
    if live is not None:
        here = here & (torch.arange(ids.shape[0], device=ids.device).unsqueeze(1) < live)
    return torch.where(here, ids, -1).to(torch.int32), torch.where(here, topk_weights, 0.0).to(torch.float32)

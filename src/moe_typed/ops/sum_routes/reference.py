"""Sum routes in torch operations."""

import torch
from torch import Tensor


def sum_routes(results: Tensor, topk_ids: Tensor, topk_weights: Tensor, live: Tensor | None, num_experts: int, out_dtype: torch.dtype) -> Tensor:
    """Return for each row the sum of weight * result over its routes, in float32 and in the order of the columns, as ``out_dtype`` (rows, hidden).

    ``results``: (rows * k, hidden), by route; what stands at a dropped route is never looked at. ``topk_ids``: int32 (rows, k).
    ``topk_weights``: float32 (rows, k). ``live``: int32 (1,), or None for all. Routes are dropped as by ``align``; a row without any is zero.
    """
    rows, k = topk_ids.shape
    kept = (topk_ids >= 0) & (topk_ids < num_experts)
    if live is not None:
        kept = kept & (torch.arange(rows, device=topk_ids.device).unsqueeze(1) < live)
    total = torch.zeros(rows, results.shape[1], device=results.device)
    for column, result in enumerate(results.view(rows, k, results.shape[1]).unbind(1)):
        weighted = topk_weights[:, column, None] * result.to(torch.float32)
        total = total + torch.where(kept[:, column, None], weighted, 0.0)
    return total.to(out_dtype)

"""Sort routes by expert in torch operations: static shapes, no host sync, the same order every time."""

import torch
from torch import Tensor


def capacity(routes: int, num_experts: int, block_m: int) -> int:
    """Return the most slots that ``routes`` routes can need: every expert that is hit may leave all but one slot of a block empty."""
    worst = routes + min(routes, num_experts) * (block_m - 1)
    return worst // block_m * block_m  # whole blocks; the slots needed are whole blocks too, so rounding down loses none


def align(topk_ids: Tensor, live: Tensor | None, num_experts: int, block_m: int) -> tuple[Tensor, Tensor]:
    """Return (slots int32 (capacity,), block_expert int32 (capacity / block_m,)).

    ``topk_ids``: int32 (rows, k); a route outside 0..num_experts-1 is dropped. ``live``: int32 (1,), the leading rows that count; None for all.
    A slot holds its route, or rows * k where it is padding. A block holds its expert, or -1 where no expert needs it; used blocks come first.
    """
    rows, k = topk_ids.shape
    routes, device = rows * k, topk_ids.device
    kept = (topk_ids >= 0) & (topk_ids < num_experts)
    if live is not None:
        kept = kept & (torch.arange(rows, device=device).unsqueeze(1) < live)
    by_expert, order = torch.sort(torch.where(kept, topk_ids, num_experts).flatten(), stable=True)
    # Dropped routes sort behind the last expert. first[e] is where expert e begins, end[e] the slot where its last block ends.
    first = torch.searchsorted(by_expert, torch.arange(num_experts + 1, dtype=torch.int32, device=device))
    count = first.diff()
    padded = (count + block_m - 1) // block_m * block_m
    end = padded.cumsum(0)

    slot = torch.arange(capacity(routes, num_experts, block_m), device=device)
    owner = torch.searchsorted(end, slot, right=True)
    expert = owner.clamp(max=num_experts - 1)
    offset = slot - (end - padded)[expert]
    is_real = (owner < num_experts) & (offset < count[expert])
    route = order[torch.where(is_real, first[expert] + offset, 0)]
    slots = torch.where(is_real, route, routes).to(torch.int32)
    return slots, torch.where(owner < num_experts, owner, -1)[::block_m].to(torch.int32)

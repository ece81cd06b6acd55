"""Local ids in one launch."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op

_BLOCK: Final = 256


def local_ids(topk_ids: Tensor, topk_weights: Tensor, first: int, count: int, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.local_ids."""
    ids = torch.empty(topk_ids.shape, dtype=torch.int32, device=topk_ids.device)
    weights = torch.empty(topk_ids.shape, dtype=torch.float32, device=topk_ids.device)
    if ids.numel():
        _launch(topk_ids, topk_weights, live, first, count, ids, weights)
    return ids, weights


@custom_op("local_ids", writes=("ids", "weights"))
def _launch(topk_ids: Tensor, topk_weights: Tensor, live: Tensor | None, first: int, count: int, ids: Tensor, weights: Tensor) -> None:
    constants = {
        "IDS_STRIDE": topk_ids.stride(0),
        "IDS_STEP": topk_ids.stride(1),
        "WEIGHTS_STRIDE": topk_weights.stride(0),
        "WEIGHTS_STEP": topk_weights.stride(1),
        "K": topk_ids.shape[1],
        "BLOCK": _BLOCK,
    }
    size = ids.numel()
    _local(triton.cdiv(size, _BLOCK), (topk_ids, topk_weights, live, ids, weights), (size, first, count), constants, num_warps=4)


@Launcher
@triton.jit(do_not_specialize=["size", "first", "count"])
def _local(
    topk_ids_ptr: tl.tensor,
    topk_weights_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    size: tl.tensor,
    first: tl.tensor,
    count: tl.tensor,
    IDS_STRIDE: tl.constexpr,
    IDS_STEP: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr,
    WEIGHTS_STEP: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = (place // K).to(tl.int64)
    column = place % K
    mask = place < size
    local = tl.load(topk_ids_ptr + row * IDS_STRIDE + column * IDS_STEP, mask=mask, other=-1).to(tl.int64) - first
    here = mask & (local >= 0) & (local < count)
    if live_ptr is not None:
        here = here & (row < tl.load(live_ptr))
    weight = tl.load(topk_weights_ptr + row * WEIGHTS_STRIDE + column * WEIGHTS_STEP, mask=here, other=0.0).to(tl.float32)
    tl.store(ids_ptr + place, tl.where(here, local, -1).to(tl.int32), mask=mask)
    tl.store(weights_ptr + place, weight, mask=mask)

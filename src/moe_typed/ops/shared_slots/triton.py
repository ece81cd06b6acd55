"""Shared-expert columns in one launch: one thread for each id and weight that comes out."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from .reference import first_local_shared_id

_BLOCK: Final = 256  # values a program; with 4 warps that is two a thread. On an H200, 128 to 512 differ by 5 %, 2048 costs 20 % more
_WARPS: Final = 4


def append_shared(
    ids: Tensor, weights: Tensor, num_shared: int, first_shared_id: int, scale: float, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.append_shared."""
    return _append(ids, weights, live, num_shared, first_shared_id, 0, scale)


def append_shared_interleaved(
    ids: Tensor, weights: Tensor, num_shared: int, num_local_routed: int, ep_rank: int, scale: float, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.append_shared_interleaved."""
    return _append(ids, weights, live, num_shared, first_local_shared_id(num_local_routed, num_shared, ep_rank), num_local_routed, scale)


def _append(
    ids: Tensor, weights: Tensor, live: Tensor | None, num_shared: int, first_shared_id: int, num_local_routed: int, scale: float
) -> tuple[Tensor, Tensor]:
    if num_shared <= 0:
        return ids, weights
    rows, k = ids.shape
    out_ids = torch.empty((rows, k + num_shared), dtype=torch.int32, device=ids.device)
    out_weights = torch.empty((rows, k + num_shared), dtype=torch.float32, device=ids.device)
    if rows:
        _append_shared(ids, weights, live, out_ids, out_weights, first_shared_id, num_local_routed, scale)
    return out_ids, out_weights


@custom_op("append_shared", writes=("out_ids", "out_weights"))
def _append_shared(
    ids: Tensor,
    weights: Tensor,
    live: Tensor | None,
    out_ids: Tensor,
    out_weights: Tensor,
    first_shared_id: int,
    num_local_routed: int,
    scale: float,
) -> None:
    k = ids.shape[1]
    constants = {
        "IDS_STRIDE": ids.stride(0),
        "IDS_COLUMN_STRIDE": ids.stride(1),
        "WEIGHTS_STRIDE": weights.stride(0),
        "WEIGHTS_COLUMN_STRIDE": weights.stride(1),
        "K": k,
        "NUM_SHARED": out_ids.shape[1] - k,
        "NUM_LOCAL_ROUTED": num_local_routed,
        "BLOCK": _BLOCK,
    }
    size = out_ids.numel()
    tensors = (ids, weights, live, out_ids, out_weights)
    _append_kernel(triton.cdiv(size, _BLOCK), tensors, (size, first_shared_id, scale), constants, num_warps=_WARPS)


@Launcher
@triton.jit(do_not_specialize=["size", "first_shared_id"])
def _append_kernel(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    out_ids_ptr: tl.tensor,
    out_weights_ptr: tl.tensor,
    size: tl.tensor,
    first_shared_id: tl.tensor,
    scale: tl.tensor,
    IDS_STRIDE: tl.constexpr,
    IDS_COLUMN_STRIDE: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr,
    WEIGHTS_COLUMN_STRIDE: tl.constexpr,
    K: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    NUM_LOCAL_ROUTED: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = out < size
    row = out // (K + NUM_SHARED)
    column = out % (K + NUM_SHARED)
    is_live = mask
    if live_ptr is not None:
        is_live = mask & (row < tl.load(live_ptr))
    routed = is_live & (column < K)
    expert = tl.load(ids_ptr + row.to(tl.int64) * IDS_STRIDE + column * IDS_COLUMN_STRIDE, mask=routed, other=-1)
    weight = tl.load(weights_ptr + row.to(tl.int64) * WEIGHTS_STRIDE + column * WEIGHTS_COLUMN_STRIDE, mask=routed, other=0.0)
    if NUM_LOCAL_ROUTED > 0:
        # Triton's division of a negative id would round towards zero, torch's down; no id below zero moves at all.
        expert = tl.where(expert < 0, expert, expert + expert // NUM_LOCAL_ROUTED * NUM_SHARED)
    is_shared = is_live & (column >= K)
    tl.store(out_ids_ptr + out, tl.where(is_shared, first_shared_id + column - K, expert), mask=mask)
    tl.store(out_weights_ptr + out, tl.where(is_shared, scale, weight), mask=mask)

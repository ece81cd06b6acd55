"""Sum routes: one program for a piece of one row, which reads only the results that count."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._library import custom_op, device_of

_BLOCK_H: Final = 1024  # 16 values for each thread of 2 warps: two 16-byte loads a route


def sum_routes(results: Tensor, topk_ids: Tensor, topk_weights: Tensor, live: Tensor | None, num_experts: int, out_dtype: torch.dtype) -> Tensor:
    """See reference.sum_routes."""
    out = results.new_empty((topk_ids.shape[0], results.shape[1]), dtype=out_dtype)
    _launch(results, topk_ids.contiguous(), topk_weights.contiguous(), live, num_experts, out)
    return out


@custom_op("sum_routes", writes=("out",))
def _launch(results: Tensor, topk_ids: Tensor, topk_weights: Tensor, live: Tensor | None, num_experts: int, out: Tensor) -> None:
    rows, hidden = out.shape
    if not rows or out.is_meta:  # without memory there is nothing to sum
        return
    with device_of(out):
        _sum_routes[(rows, triton.cdiv(hidden, _BLOCK_H))](
            results, topk_ids, topk_weights, live, out, num_experts, hidden, K=topk_ids.shape[1], BLOCK_H=_BLOCK_H, num_warps=2
        )


@triton.jit
def _sum_routes(
    results_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    num_experts: tl.tensor,
    hidden: tl.tensor,
    K: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    if live_ptr is not None:
        num_experts = tl.where(row < tl.load(live_ptr), num_experts, 0)  # no id is an expert's in a row that does not count
    total = tl.zeros((BLOCK_H,), tl.float32)
    for index in range(K):
        route = row * K + index
        expert = tl.load(ids_ptr + route)
        kept = (expert >= 0) & (expert < num_experts)
        # Masked loads, not products with zero: what stands at a dropped route, and its weight, may be NaN.
        weight = tl.load(weights_ptr + route, mask=kept, other=0.0)
        width = tl.where(kept, hidden, 0)  # not "kept & in_row": Triton's interpreter broadcasts a bool to int32, and takes no such mask
        total += weight * tl.load(results_ptr + route * hidden + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden + column, total.to(out_ptr.dtype.element_ty), mask=column < hidden)

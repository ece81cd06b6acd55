"""Grouped GEMMs in torch operations, block after block; float32 throughout."""

import torch
from torch import Tensor

from .tiles import SCALE_BLOCK


def gather_gemm(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    top_k: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return (slots, N): slot s holds row slots[s] // top_k times the transposed weights of its block's expert, plus the expert's bias.

    ``rows`` (rows, K) and ``weights`` (experts, N, K), both of one dtype; for float8_e4m3fn with float32 scales (rows, K / 128) and
    (experts, N / 128, K / 128). ``bias``: (experts, N). A padding slot holds the bias alone; blocks that no expert needs hold anything.
    """
    values = _scaled(rows, rows_scale, 1)
    padded = torch.cat((values, values.new_zeros(1, values.shape[1])))
    return _products(padded[slots.long() // top_k], weights, weights_scale, bias, block_expert).to(out_dtype)


def scatter_gemm(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    routes: int,
    out_dtype: torch.dtype,
) -> Tensor:
    """Return (routes, N): route slots[s] holds row s times the weights of its block's expert. ``rows``: (slots, K). Dropped routes hold anything."""
    products = _products(_scaled(rows, rows_scale, 1), weights, weights_scale, bias, block_expert)
    out = products.new_zeros(routes + 1, products.shape[1])
    out[slots.long()] = products
    return out[:routes].to(out_dtype)


def _products(rows: Tensor, weights: Tensor, scale: Tensor | None, bias: Tensor | None, block_expert: Tensor) -> Tensor:
    blocks = block_expert.shape[0]
    out = rows.new_zeros(blocks, rows.shape[0] // max(blocks, 1), weights.shape[1])
    for block in range(blocks):
        expert = int(block_expert[block])
        if expert >= 0:
            matrix = _scaled(weights[expert], None if scale is None else scale[expert], SCALE_BLOCK)
            out[block] = rows.view(blocks, -1, rows.shape[1])[block] @ matrix.T
            if bias is not None:
                out[block] += bias[expert].to(torch.float32)
    return out.flatten(0, 1)


def _scaled(data: Tensor, scale: Tensor | None, block_rows: int) -> Tensor:
    values = data.to(torch.float32)
    return values if scale is None else values * scale.repeat_interleave(block_rows, 0).repeat_interleave(SCALE_BLOCK, 1)

"""Grouped GEMMs: one program for one tile of one block. The first product gathers its rows by route; the second scatters its results to routes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._library import custom_op, device_of
from .tiles import SCALE_BLOCK, choose_tile


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
    """See reference.gather_gemm. ``rows`` may have any strides. Raises: ValueError for operands that do not fit each other."""
    _require_fit(rows, rows_scale, weights, weights_scale, bias)
    out = rows.new_empty((slots.shape[0], weights.shape[1]), dtype=out_dtype)
    _launch(rows, rows_scale, weights, weights_scale, bias, slots, block_expert, rows.shape[0] * top_k, top_k, True, out)
    return out


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
    """See reference.scatter_gemm. ``rows`` may have any strides. Raises: ValueError for operands that do not fit each other."""
    _require_fit(rows, rows_scale, weights, weights_scale, bias)
    out = rows.new_empty((routes, weights.shape[1]), dtype=out_dtype)
    _launch(rows, rows_scale, weights, weights_scale, bias, slots, block_expert, routes, 1, False, out)
    return out


@custom_op("grouped_gemm", writes=("out",))
def _launch(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    routes: int,
    top_k: int,
    gather: bool,
    out: Tensor,
) -> None:
    blocks = block_expert.shape[0]
    if not blocks:
        return
    block_m = slots.shape[0] // blocks
    tile = choose_tile(weights.dtype, block_m)
    _, columns, depth = weights.shape
    with device_of(out):
        _grouped_gemm[(blocks * triton.cdiv(columns, tile.block_n),)](
            rows,
            rows_scale,
            weights,
            weights_scale,
            bias,
            slots,
            block_expert,
            out,
            routes,
            top_k,
            columns,
            depth,
            rows.stride(0),
            rows.stride(1),
            GATHER=gather,
            BLOCK_M=block_m,
            BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _require_fit(rows: Tensor, rows_scale: Tensor | None, weights: Tensor, weights_scale: Tensor | None, bias: Tensor | None) -> None:
    experts, columns, depth = weights.shape
    if rows.dtype != weights.dtype or rows.shape[1] != depth:
        raise ValueError(f"rows are {rows.dtype} of width {rows.shape[1]}, but the weights take {weights.dtype} of width {depth}")
    is_fp8 = weights.dtype == torch.float8_e4m3fn
    row_scales, weight_scales = (rows.shape[0], depth // SCALE_BLOCK), (experts, columns // SCALE_BLOCK, depth // SCALE_BLOCK)
    if is_fp8 and (columns % SCALE_BLOCK or depth % SCALE_BLOCK):
        raise ValueError(f"fp8 weights are {columns} x {depth}, and {SCALE_BLOCK} must divide both")
    for name, scale, shape in (("rows", rows_scale, row_scales), ("weights", weights_scale, weight_scales)):
        if is_fp8 is (scale is None) or (scale is not None and scale.shape != shape):
            found = "none" if scale is None else list(scale.shape)
            raise ValueError(f"scales of the {name}: {found}; {weights.dtype} takes {list(shape) if is_fp8 else 'none'}")
    if bias is not None and bias.shape != (experts, columns):
        raise ValueError(f"bias is {list(bias.shape)}, expected {[experts, columns]}")
    if not all(tensor is None or tensor.is_contiguous() for tensor in (rows_scale, weights, weights_scale, bias)):
        raise ValueError("weights, scales and biases must be contiguous")


@triton.jit
def _grouped_gemm(
    rows_ptr: tl.tensor,
    rows_scale_ptr: tl.tensor | None,
    weights_ptr: tl.tensor,
    weights_scale_ptr: tl.tensor,  # None where rows_scale_ptr is
    bias_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    out_ptr: tl.tensor,
    routes: tl.tensor,
    top_k: tl.tensor,
    N: tl.tensor,
    K: tl.tensor,
    row_stride: tl.tensor,
    column_stride: tl.tensor,
    GATHER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    tiles_n = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // tiles_n
    tile_n = tl.program_id(0) % tiles_n
    # int64 before any product: experts * N * K and rows * N pass 2^31.
    expert = tl.load(block_expert_ptr + block).to(tl.int64)
    if expert < 0:
        return
    slot = (block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    route = tl.load(slots_ptr + slot).to(tl.int64)
    is_route = route < routes
    source = route // top_k if GATHER else slot
    target = slot if GATHER else route
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = column < N
    depth = tl.arange(0, BLOCK_K).to(tl.int64)
    a = rows_ptr + source[:, None] * row_stride + depth[None, :] * column_stride
    b = weights_ptr + (expert * N + column)[None, :] * K + depth[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        # Both operands are masked along k: zero times what lies beyond would still be NaN if that is.
        in_k = depth < K - start
        a_tile = tl.load(a, mask=is_route[:, None] & in_k[None, :], other=0.0)
        b_tile = tl.load(b, mask=in_k[:, None] & in_n[None, :], other=0.0)
        if rows_scale_ptr is not None:
            # BLOCK_N = BLOCK_K = 128, the scale block: the tile has one weight scale, each of its rows one scale.
            group = start // BLOCK_K
            groups = K // BLOCK_K
            a_scale = tl.load(rows_scale_ptr + source * groups + group, mask=is_route, other=0.0)
            b_scale = tl.load(weights_scale_ptr + (expert * tiles_n + tile_n) * groups + group)
            acc += tl.dot(a_tile, b_tile) * (a_scale * b_scale)[:, None]
        else:
            acc = tl.dot(a_tile, b_tile, acc, input_precision="ieee")
        a += BLOCK_K * column_stride
        b += BLOCK_K
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + expert * N + column, mask=in_n, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + target[:, None] * N + column[None, :]
    # A slot without a route is written, so that what follows reads no uninitialised memory; a route that is none has no place to be written to.
    written = in_n[None, :] if GATHER else is_route[:, None] & in_n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=written)

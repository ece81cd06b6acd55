"""A layer by the streaming kernel."""

from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from .._hopper import multiprocessors, pieces
from .._launch import Launcher
from .._library import custom_op
from ..activation.spec import Gate, Split
from ..align.triton import align
from ..product_plans.fit import require_rows, require_weights
from ..product_plans.spec import STREAM_COLUMNS, Tile
from ..product_plans.takes import stream_fault
from ..sum_routes.triton import sum_routes
from .kernel import stream

_PIECE: Final = 64  # rows of weights of a piece, and channels of a scale between the products
_COUNTERS: Final = 2  # besides those of the blocks: see the kernel
_SUMMED: Final = 64  # tokens; beyond, a launch of its own sums faster
_DIRECT: Final = 16  # rows of a block; results of more go through shared memory, so that what is stored lies together
# Registers of a thread: what twelve warps start from, and those that bring rows go on with, by the programs of a multiprocessor.
_REGISTERS: Final = {1: (168, 152), 2: (80, 80)}


class Operands(NamedTuple):
    """Rows and both matrices, with their scales and biases, and the routes.

    See up_product.triton.up_product and down_product.triton.down_product, and product_plans.choose.Plans.streams. Rows have no gaps, and 16 divides
    their stride in bytes.
    """

    rows: Tensor
    rows_scale: Tensor | None
    w13: Tensor
    s13: Tensor | None
    b13: Tensor | None
    w2: Tensor
    s2: Tensor | None
    b2: Tensor | None
    topk_ids: Tensor
    live: Tensor | None


def layer(operands: Operands, topk_weights: Tensor, split: Split, gate: Gate, out_dtype: torch.dtype, up: Tile, down: Tile) -> Tensor:
    """Return (tokens, N): for each token the sum over its routes of router weight times result, as sum_routes has it. See product_plans.spec.Tile."""
    tokens, columns = operands.topk_ids.shape[0], operands.w2.shape[1]
    if tokens > _SUMMED or not operands.topk_ids.numel():  # without routes nothing is launched, and the sum is zero
        results = products(operands, split, gate, out_dtype, up, down)
        return sum_routes(results, operands.topk_ids, topk_weights, operands.live, operands.w2.shape[0], out_dtype)
    out = operands.rows.new_empty((tokens, columns), dtype=out_dtype)
    _run(operands, topk_weights, split, gate, out_dtype, up, down, out)
    return out


def products(operands: Operands, split: Split, gate: Gate, out_dtype: torch.dtype, up: Tile, down: Tile) -> Tensor:
    """Return (routes, N): the result of each route; dropped routes hold anything."""
    return _run(operands, None, split, gate, out_dtype, up, down, None)


def _run(
    operands: Operands, topk_weights: Tensor | None, split: Split, gate: Gate, out_dtype: torch.dtype, up: Tile, down: Tile, out: Tensor | None
) -> Tensor:
    rows, rows_scale, w13, s13, b13, w2, s2, b2, topk_ids, live = operands
    require_rows(rows, rows_scale, w13)
    require_weights(w13, s13, b13)
    require_weights(w2, s2, b2)
    experts, columns, inter = w2.shape
    fault = stream_fault(up, down, columns)
    if fault is not None:
        raise ValueError(fault)
    if split.step != 1:
        raise ValueError("the streaming kernel takes gate and up apart, not in turns")
    counters = topk_ids.new_empty(_COUNTERS + topk_ids.numel())  # as many blocks as routes at the most
    slots, block_expert = align(topk_ids, live, experts, up.rows, counters)
    inner = rows.new_empty((slots.shape[0], inter), dtype=out_dtype if rows_scale is None else rows.dtype)
    inner_scale = None if rows_scale is None else rows.new_empty((slots.shape[0], inter // _PIECE), dtype=torch.float32)
    results = rows.new_empty((topk_ids.numel(), columns), dtype=out_dtype)
    sizes = (up.rows, up.group, up.stages, down.columns)
    _launch(*operands, topk_weights, split.gate, split.up, *gate, *sizes, slots, block_expert, counters, inner, inner_scale, results, out)
    return results


@custom_op("stream_layer", writes=("counters", "inner", "inner_scale", "results", "out"))
def _launch(
    rows: Tensor,
    rows_scale: Tensor | None,
    w13: Tensor,
    s13: Tensor | None,
    b13: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    b2: Tensor | None,
    topk_ids: Tensor,
    live: Tensor | None,
    topk_weights: Tensor | None,
    gate: int,
    up: int,
    alpha: float,
    limit: float,
    shift: float,
    block: int,
    each: int,  # programs of a multiprocessor
    stages: int,
    down_columns: int,
    slots: Tensor,
    block_expert: Tensor,
    counters: Tensor,
    inner: Tensor,
    inner_scale: Tensor | None,
    results: Tensor,
    out: Tensor | None,
) -> None:
    routes, columns = results.shape
    if not routes:
        return
    if rows.data_ptr() % 16:
        rows = rows.clone()  # rare; the copies are of 16 bytes
    tensors = (
        *(rows, rows_scale, pieces(w13.view(-1, w13.shape[2]), _PIECE), s13, b13, pieces(w2.view(-1, w2.shape[2]), _PIECE), s2, b2),
        *(slots, block_expert, counters, inner, inner_scale, results, topk_ids, topk_weights, live, out),
    )
    scalars = (routes, block_expert.shape[0], w2.shape[0], alpha, limit, shift)
    at_start, bringing = _REGISTERS[each]
    constants = {
        "FP8": rows_scale is not None,
        "TOP_K": topk_ids.shape[1],
        "N": columns,
        "INTER": w2.shape[2],
        "ROW_STRIDE": rows.stride(0),
        "GATE": gate,
        "BESIDE": up,
        "ROWS": block,
        "SPAN": down_columns // STREAM_COLUMNS,
        "STAGES": stages,
        "SLOTS": triton.next_power_of_2(topk_ids.shape[1]),
        "DIRECT": block <= _DIRECT,
        "SUMS": out is not None,
        "BRINGING": bringing,
    }
    programs = multiprocessors(results) * each
    _STREAM(programs, tensors, scalars, constants, num_warps=4, maxnreg=at_start, launch_cooperative_grid=True)


_STREAM: Final = Launcher(stream)

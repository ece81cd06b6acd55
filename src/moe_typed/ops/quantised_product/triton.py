"""One program multiplies a block of one expert's routes with some columns: weights are read as they are held, and decoded in registers.

What a scale multiplies is the cheapest that is exact. E8m0 scales multiply the codes, in bfloat16 or float32, where a power of two loses nothing. All
others multiply what was summed: once where a scale is for the whole depth, else after each group; so integers stay integers until then.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..activation.spec import Split
from ..product_plans.spec import Tile
from .held import as_held, constants_of, held
from .kernel import multiply
from .spec import NOTHING, Epilogue, Matrix, Rows, check


def product(
    rows: Rows,
    matrix: Matrix,
    slots: Tensor,
    block_expert: Tensor | None,
    routes: int,
    top_k: int,
    out_dtype: torch.dtype,
    tile: Tile,
    split: Split | None = None,
    epilogue: Epilogue = NOTHING,
    route_weights: Tensor | None = None,
    live: Tensor | None = None,
) -> Tensor:
    """See reference.product. ``slots``, ``block_expert``: as align returns them for blocks of ``tile.rows``. Dropped routes hold anything.

    Without ``block_expert``, ``slots`` is topk_ids, int32 (tokens, k), of which ``live`` tokens count, and every program looks for its routes there.
    ``route_weights``: float32 (routes,), by which results are multiplied before they are rounded.
    ``tile.depth`` divides the groups of scales that are no powers of two (``plan.choose_tile``). Raises: ValueError for rows and weights that are
    not multiplied with each other.
    """
    check(rows, matrix)
    columns = matrix.data.shape[1] // (1 if split is None else 2)
    out = rows.data.new_empty((routes, columns), dtype=out_dtype)
    data, scale, zero, bias, code, is_e8m0, in_registers = held(matrix, rows.data.dtype)
    place = [0, 0, 1] if split is None else list(split)
    _launch(
        as_held(rows.data if rows.data.stride(1) == 1 else rows.data.contiguous()),
        rows.scale if rows.scale is None else as_held(rows.scale),
        data,
        scale,
        zero,
        bias,
        slots,
        block_expert,
        live,
        top_k,
        1 if block_expert is not None else slots.shape[1],
        split is not None,
        place,
        epilogue.formula.value,
        epilogue.alpha,
        epilogue.limit,
        epilogue.shift,
        code,
        is_e8m0,
        in_registers,
        list(tile),
        route_weights,
        out,
    )
    return out


@custom_op("quantised_product", writes=("out",))
def _launch(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    weights_zero: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor | None,
    live: Tensor | None,
    top_k: int,
    picks: int,
    paired: bool,
    split: Sequence[int],
    formula: int,
    alpha: float,
    limit: float,
    shift: float,
    code: int,
    is_e8m0: bool,
    in_registers: bool,
    tile: Sequence[int],
    route_weights: Tensor | None,
    out: Tensor,
) -> None:
    block_m, block_n, block_k, warps, stages, group = tile
    routes, columns = out.shape
    blocks = routes if block_expert is None else block_expert.shape[0]
    if not blocks:
        return
    depth = rows.shape[1]
    row_group = depth if rows_scale is None else depth // rows_scale.shape[1]
    rows_e8m0 = rows_scale is not None and rows_scale.dtype == torch.uint8
    constants = {
        "TOP_K": top_k,
        "PICKS": picks,
        "EXPERTS": weights.shape[0],
        "ROUTES": triton.next_power_of_2(routes) if block_expert is None else 0,
        "N": columns,
        "K": depth,
        "ROW_STRIDE": rows.stride(0),
        "ROWS_E8M0": rows_e8m0,
        "ROW_GROUP": row_group,
        "ROW_SCALE_STRIDE": 0 if rows_scale is None else rows_scale.stride(0),
        "ROW_SCALE_STEP": 0 if rows_scale is None else rows_scale.stride(1),
        **constants_of(weights, weights_scale, code, is_e8m0, in_registers, depth),
        "PAIRED": paired,
        "GATE": split[0],
        "UP": split[1],
        "STEP": split[2],
        "FORMULA": formula,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "GROUP_M": group,
    }
    tensors = (rows, rows_scale, weights, weights_scale, weights_zero, bias, slots, block_expert, live, route_weights, out)
    scalars = (routes, blocks, alpha, limit, shift)
    _PRODUCT(blocks * triton.cdiv(columns, block_n), tensors, scalars, constants, num_warps=warps, num_stages=stages)


_PRODUCT: Final = Launcher(multiply)

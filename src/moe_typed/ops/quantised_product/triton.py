"""One program multiplies a block of one expert's routes with some columns: weights are read as they are held, and decoded in registers.

What a scale multiplies is the cheapest that is exact. E8m0 scales multiply the codes, in bfloat16 or float32, where a power of two loses nothing. All
others multiply what was summed: once where a scale is for the whole depth, else after each group; so integers stay integers until then.
"""

from collections.abc import Sequence
from typing import Final

import torch
import triton
from torch import Tensor
from triton import knobs

from .._launch import Launcher
from .._library import custom_op
from ..activation.spec import Split
from ..product_plans.spec import Tile
from .kernel import multiply
from .spec import NOTHING, Code, Epilogue, Matrix, Rows, check, scales_codes

_PACKED: Final = (Code.FP4, Code.INT4)
_INTERPRETED: Final = knobs.runtime.interpret  # as when the kernels were made
_E8M0: Final = torch.float8_e8m0fnu


def product(
    rows: Rows,
    matrix: Matrix,
    slots: Tensor,
    block_expert: Tensor,
    routes: int,
    top_k: int,
    out_dtype: torch.dtype,
    tile: Tile,
    split: Split | None = None,
    epilogue: Epilogue = NOTHING,
    route_weights: Tensor | None = None,
) -> Tensor:
    """See reference.product. ``slots``, ``block_expert``: as align returns them for blocks of ``tile.rows``. Dropped routes hold anything.

    ``route_weights``: float32 (routes,), by which results are multiplied before they are rounded.
    ``tile.depth`` divides the groups of scales that are no powers of two (``plan.choose_tile``). Raises: ValueError for rows and weights that are
    not multiplied with each other.
    """
    check(rows, matrix)
    columns = matrix.data.shape[1] // (1 if split is None else 2)
    out = rows.data.new_empty((routes, columns), dtype=out_dtype)
    scale, zero = matrix.scale, matrix.zero
    if scale is not None and zero is not None and scale.stride() != zero.stride():
        raise ValueError(f"zeros have the strides {zero.stride()}, their scales {scale.stride()}")
    place = [0, 0, 1] if split is None else list(split)
    _launch(
        as_held(rows.data if rows.data.stride(1) == 1 else rows.data.contiguous()),
        rows.scale if rows.scale is None else as_held(rows.scale),
        as_held(matrix.data),
        scale if scale is None else as_held(scale),
        zero,
        matrix.bias,
        slots,
        block_expert,
        top_k,
        split is not None,
        place,
        epilogue.formula.value,
        epilogue.alpha,
        epilogue.limit,
        epilogue.shift,
        matrix.code.value,
        scale is not None and scale.dtype == _E8M0,
        scales_codes(rows.data.dtype, matrix),
        list(tile),
        route_weights,
        out,
    )
    return out


def as_held(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that kernels load: e8m0 and e2m1 as bytes, and for the interpreter, which cannot convert it, e4m3 too."""
    if tensor.dtype in (_E8M0, torch.float4_e2m1fn_x2) or (tensor.dtype == torch.float8_e4m3fn and _INTERPRETED):
        return tensor.view(torch.uint8)
    return tensor


@custom_op("quantised_product", writes=("out",))
def _launch(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    weights_zero: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    top_k: int,
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
    blocks = block_expert.shape[0]
    if not blocks:
        return
    depth = rows.shape[1]
    row_group = depth if rows_scale is None else depth // rows_scale.shape[1]
    rows_e8m0 = rows_scale is not None and rows_scale.dtype == torch.uint8
    constants = {
        "TOP_K": top_k,
        "N": columns,
        "K": depth,
        "ROW_STRIDE": rows.stride(0),
        "ROWS_E8M0": rows_e8m0,
        "ROW_GROUP": row_group,
        "ROW_SCALE_STRIDE": 0 if rows_scale is None else rows_scale.stride(0),
        "ROW_SCALE_STEP": 0 if rows_scale is None else rows_scale.stride(1),
        "CODE": code,
        "PER_BYTE": 2 if code in _PACKED else 1,
        "EXPERT_STRIDE": weights.stride(0),
        "WEIGHT_STRIDE": weights.stride(1),
        "WEIGHT_STEP": weights.stride(2),
        "E8M0": is_e8m0,
        "IN_REGISTERS": in_registers,
        "GROUP": depth if weights_scale is None else depth // weights_scale.shape[2],
        "SCALE_ROWS": 1 if weights_scale is None else weights.shape[1] // weights_scale.shape[1],
        "SCALE_EXPERT": 0 if weights_scale is None else weights_scale.stride(0),
        "SCALE_STRIDE": 0 if weights_scale is None else weights_scale.stride(1),
        "SCALE_STEP": 0 if weights_scale is None else weights_scale.stride(2),
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
    tensors = (rows, rows_scale, weights, weights_scale, weights_zero, bias, slots, block_expert, route_weights, out)
    scalars = (routes, blocks, alpha, limit, shift)
    _PRODUCT(blocks * triton.cdiv(columns, block_n), tensors, scalars, constants, num_warps=warps, num_stages=stages)


_PRODUCT: Final = Launcher(multiply)

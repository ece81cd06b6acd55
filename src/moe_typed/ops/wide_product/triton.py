"""Both products by the wide kernel."""

from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from .._hopper import multiprocessors, pieces
from .._library import custom_op, device_of
from ..activation.spec import GROUP, Gate, Split
from ..product_plans.fit import require_rows, require_weights
from .kernel import wide

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

_COLUMNS: Final = 128  # of gate and of up; of the second product twice that
_STAGES: Final = 4  # 48 KiB each
# Registers of a thread: 2 * 128 * 232 + 128 * 40 is what an SM has. A compiled limit of 168 for all three warpgroups is where it starts from.
_MULTIPLYING, _COPYING, _AT_START = 232, 40, 168


def up_product(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    top_k: int,
    split: Split,
    gate: Gate,
    out_dtype: torch.dtype,
    group: int,
) -> tuple[Tensor, Tensor | None]:
    """See up_product.triton.up_product, for blocks of 128 rows, and product_plans.choose.wide_takes.

    A row has no gaps, and 16 divides its stride in bytes. ``group``: this many blocks go through the columns side by side.
    """
    require_rows(rows, rows_scale, weights)
    require_weights(weights, weights_scale, bias)
    inter = weights.shape[1] // 2
    out = rows.new_empty((slots.shape[0], inter), dtype=out_dtype if rows_scale is None else rows.dtype)
    scale = None if rows_scale is None else rows.new_empty((inter // GROUP, slots.shape[0]), dtype=torch.float32)
    _launch_up(rows, rows_scale, weights, weights_scale, bias, slots, block_expert, top_k, *split, *gate, group, out, scale)
    return out, scale


def down_product(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    routes: int,
    out_dtype: torch.dtype,
    group: int,
    route_weights: Tensor | None = None,
) -> Tensor:
    """See down_product.triton.down_product, for blocks of 128 rows."""
    require_weights(weights, weights_scale, bias)
    out = rows.new_empty((routes, weights.shape[1]), dtype=out_dtype)
    _launch_down(rows, rows_scale, weights, weights_scale, bias, slots, block_expert, group, route_weights, out)
    return out


@custom_op("wide_up_product", writes=("out", "out_scale"))
def _launch_up(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    top_k: int,
    gate: int,
    up: int,
    step: int,
    alpha: float,
    limit: float,
    shift: float,
    group: int,
    out: Tensor,
    out_scale: Tensor | None,
) -> None:
    if not block_expert.shape[0]:
        return
    if rows.data_ptr() % 16:
        rows = rows.clone()  # rare; the copies are of 16 bytes
    constants = {"UP": True, "TOP_K": top_k, "N": out.shape[1], "ROW_STRIDE": rows.stride(0), "GATE": gate, "BESIDE": up, "STEP": step}
    scalars = (rows.shape[0] * top_k, block_expert.shape[0], group, alpha, limit, shift)
    columns = _COLUMNS * step  # gate and up are brought apart, or where they come in turns, together
    _run(None, rows, rows_scale, weights, weights_scale, bias, slots, block_expert, None, out, out_scale, scalars, columns, constants)


@custom_op("wide_down_product", writes=("out",))
def _launch_down(
    rows: Tensor,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    group: int,
    route_weights: Tensor | None,
    out: Tensor,
) -> None:
    if not block_expert.shape[0]:
        return
    sorted_rows = pieces(rows, 64)
    constants = {"UP": False, "TOP_K": 1, "N": out.shape[1], "ROW_STRIDE": rows.stride(0), "GATE": 0, "BESIDE": 0, "STEP": 1}
    scalars = (out.shape[0], block_expert.shape[0], group, 1.0, 1.0, 1.0)
    _run(sorted_rows, None, rows_scale, weights, weights_scale, bias, slots, block_expert, route_weights, out, None, scalars, 2 * _COLUMNS, constants)


def _run(
    sorted_rows: "TensorDescriptor | None",
    rows: Tensor | None,
    rows_scale: Tensor | None,
    weights: Tensor,
    weights_scale: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    block_expert: Tensor,
    route_weights: Tensor | None,
    out: Tensor,
    out_scale: Tensor | None,
    scalars: tuple[float, ...],
    columns: int,
    constants: dict[str, int],
) -> None:
    tiles = pieces(weights.view(-1, weights.shape[2]), columns)
    depth = 128 // weights.element_size()
    tensors = (sorted_rows, rows, rows_scale, tiles, weights_scale, bias, slots, block_expert, route_weights, out, out_scale)
    known = {
        **constants,
        "K": weights.shape[2],
        "FP8": rows_scale is not None,
        "BLOCK_N": 128 if constants["UP"] else 256,
        "BLOCK_K": depth,
        "STAGES": _STAGES,
    }
    with device_of(out):
        wide[(multiprocessors(out),)](*tensors, *scalars, **known, MULTIPLYING=_MULTIPLYING, COPYING=_COPYING, num_warps=4, maxnreg=_AT_START)

"""Activations: one program for 16 slots by 128 channels, which is one group of scales. Slots of blocks that no expert needs stay unwritten."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._library import custom_op, device_of
from .spec import E4M3_MAX, GROUP, Gate, Split

_ROWS: Final = 16  # divides every block_m, since tl.dot takes no fewer rows
_E4M3_MAX = tl.constexpr(E4M3_MAX)  # the form in which a kernel may read a global


def activate(joined: Tensor, block_expert: Tensor, split: Split, gate: Gate) -> Tensor:
    """Return the activated rows (slots, inter) in the dtype of ``joined`` (slots, 2 * inter), contiguous; see reference.activate."""
    out = joined.new_empty((joined.shape[0], joined.shape[1] // 2))
    _launch(joined, block_expert, *split, *gate, out, None)
    return out


def activate_fp8(joined: Tensor, block_expert: Tensor, split: Split, gate: Gate) -> tuple[Tensor, Tensor]:
    """Return the activated rows in float8_e4m3fn with their float32 scales; see reference.activate_fp8. 128 divides inter."""
    slots, inter = joined.shape[0], joined.shape[1] // 2
    out = joined.new_empty((slots, inter), dtype=torch.float8_e4m3fn)
    scale = joined.new_empty((slots, inter // GROUP), dtype=torch.float32)
    _launch(joined, block_expert, *split, *gate, out, scale)
    return out, scale


@custom_op("activate", writes=("out", "scale"))
def _launch(
    joined: Tensor,
    block_expert: Tensor,
    gate_start: int,
    up_start: int,
    step: int,
    alpha: float,
    limit: float,
    shift: float,
    out: Tensor,
    scale: Tensor | None,
) -> None:
    slots, inter = out.shape
    if not slots:
        return
    block_m = slots // block_expert.shape[0]
    with device_of(out):
        _activation[(slots // _ROWS, triton.cdiv(inter, GROUP))](
            joined, block_expert, out, scale, block_m, inter, gate_start, up_start, step, alpha, limit, shift, ROWS=_ROWS, COLUMNS=GROUP
        )


@triton.jit
def _activation(
    joined_ptr: tl.tensor,
    block_expert_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor | None,
    block_m: tl.tensor,
    inter: tl.tensor,
    gate_start: tl.tensor,
    up_start: tl.tensor,
    step: tl.tensor,
    alpha: tl.tensor,
    limit: tl.tensor,
    shift: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,  # GROUP, so that a program has whole groups of scales
) -> None:
    first_slot = tl.program_id(0) * ROWS
    if tl.load(block_expert_ptr + first_slot // block_m) < 0:
        return
    group = tl.program_id(1)
    slot = (first_slot + tl.arange(0, ROWS)).to(tl.int64)
    column = group * COLUMNS + tl.arange(0, COLUMNS)
    mask = (column < inter)[None, :]
    joined = joined_ptr + slot[:, None] * (2 * inter) + (column * step)[None, :]
    gate = tl.load(joined + gate_start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(joined + up_start, mask=mask, other=0.0).to(tl.float32)
    # Comparisons instead of tl.minimum, so that NaN stays NaN.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = gate * tl.sigmoid(alpha * gate) * (up + shift)
    if scale_ptr is not None:
        # tl.max passes over NaN; here it must win, as an infinity does.
        amax = tl.max(tl.where(value == value, tl.abs(value), float("inf")), 1)
        scale = amax / _E4M3_MAX
        scale = tl.where(scale == 0.0, 1.0, tl.where(amax == float("inf"), float("nan"), scale))
        tl.store(scale_ptr + slot * (inter // COLUMNS) + group, scale)
        value = value / scale[:, None]
    tl.store(out_ptr + slot[:, None] * inter + column[None, :], value.to(out_ptr.dtype.element_ty), mask=mask)

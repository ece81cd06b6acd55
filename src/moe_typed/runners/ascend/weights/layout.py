"""What is done to matrices on the way from a checkpoint: gate before up, columns last, int4 packed along them, the physical format."""

from typing import Final

import torch
from torch import Tensor

from ....formats import ExpertWeights, GateUp, GateUpOrder
from ....formats.int4 import PER_WORD, pack_words
from ...base import UnsupportedError
from ...widths import Widths
from ..ops import AclFormat, AscendOps

# The sizes that FRACTAL_NZ tiles need, in elements; a tensor of others silently stays ND (SGLang 0.5.23, hardware_backend/npu/utils.py).
_NZ_HALF: Final = 16  # both of the last dims, of bf16 and fp16
_NZ_INT8: Final = 32  # the last dim
_NZ_INT4: Final = 64  # the columns
_MAX_INNER_W4A8: Final = 18432  # CANN ops-transformer, gmm/grouped_matmul
_PAIR_ROWS: Final = 64  # two scales of 32 rows of the reduction
_FUSED_COLUMNS: Final = 128  # divides N of npu_grouped_matmul_swiglu_quant_v2 in mxfp8

# Columns are 2 * inter of w13 and hidden of w2; the reductions are hidden and inter.
_NZ_WHY: Final = "in which int4 weights for integer rows lie in FRACTAL_NZ, without which these products do not read them"
W4A8_WIDTHS: Final = Widths(_NZ_INT4, _NZ_INT4 // 2, _MAX_INNER_W4A8, why=_NZ_WHY)
W4A4_WIDTHS: Final = Widths(_NZ_INT4, _NZ_INT4 // 2, why=_NZ_WHY)
W4A16_WIDTHS: Final = Widths(PER_WORD, PER_WORD // 2, why="so that columns of int4 fill whole words of eight")
MXFP8_WIDTHS: Final = Widths(_PAIR_ROWS, max(_PAIR_ROWS, _FUSED_COLUMNS // 2), why="in which the fused product of mxfp8 weights comes")
MXFP4_WIDTHS: Final = Widths(_PAIR_ROWS, _PAIR_ROWS, why="in which two scales of mxfp4 weights lie together")


def gate_first(joined: Tensor, order: type[GateUpOrder], dim: int = 1) -> Tensor:
    """Return rows, scales or biases with all of gate before all of up, which every activation of the NPU here reads."""
    if order is GateUp:
        return joined
    movable = joined.view(torch.uint8) if joined.element_size() == 1 else joined  # torch does not move every float8
    return GateUp.join(*order.split(movable, dim), dim).view(joined.dtype)


def require_no_bias(weights: ExpertWeights[GateUpOrder], why: str) -> None:
    """Raise UnsupportedError for biases that the products of a scheme cannot add."""
    if weights.b13 is not None or weights.b2 is not None:
        raise UnsupportedError(f"biases of {weights.format.name} weights cannot be added on the NPU: {why}")


def dense_matrices(ops: AscendOps, weight: Tensor) -> tuple[Tensor, AclFormat]:
    """Return (experts, outer, inner) as a transposed view (experts, inner, outer), and its format; cast first, as a cast makes a view contiguous."""
    aligned = not (weight.shape[1] % _NZ_HALF or weight.shape[2] % _NZ_HALF)
    cast = ops.npu_format_cast(weight, AclFormat.FRACTAL_NZ) if aligned else weight
    return cast.transpose(1, 2), AclFormat.FRACTAL_NZ if aligned else AclFormat.ND


def int8_matrices(ops: AscendOps, weight: Tensor) -> tuple[Tensor, AclFormat]:
    """Return int8 (experts, outer, inner) as (experts, inner, outer), contiguous, and its format."""
    turned = weight.transpose(1, 2).contiguous()
    if turned.shape[2] % _NZ_INT8:
        return turned, AclFormat.ND
    return ops.npu_format_cast(turned, AclFormat.FRACTAL_NZ), AclFormat.FRACTAL_NZ


def packed_matrices(values: list[Tensor]) -> Tensor:
    """Return values -8 to 7 (inner, outer), one tensor an expert, as int32 words (experts, inner, outer / 8)."""
    return torch.stack([pack_words(value) for value in values])


def biases(weights: ExpertWeights[GateUpOrder], dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Return both biases, gate before up, in the dtype that the products want beside rows of ``dtype``: float32 beside bf16, fp16 beside fp16."""
    wanted = torch.float32 if dtype == torch.bfloat16 else dtype
    b13 = None if weights.b13 is None else gate_first(weights.b13, weights.order).to(wanted).contiguous()
    return b13, None if weights.b2 is None else weights.b2.to(wanted).contiguous()

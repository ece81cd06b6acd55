"""Weights as kernels load them."""

from typing import Final, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from .spec import E8M0, Code, Matrix, scales_codes

_PACKED: Final = (Code.FP4, Code.INT4)  # two codes a byte
_INTERPRETED: Final = knobs.runtime.interpret  # as when the kernels were made


def as_held(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype that kernels load: e8m0 and e2m1 as bytes, and for the interpreter, which cannot convert it, e4m3 too."""
    if tensor.dtype in (E8M0, torch.float4_e2m1fn_x2) or (tensor.dtype == torch.float8_e4m3fn and _INTERPRETED):
        return tensor.view(torch.uint8)
    return tensor


class Held(NamedTuple):
    """A matrix as an operator takes it."""

    data: Tensor
    scale: Tensor | None
    zero: Tensor | None
    bias: Tensor | None
    code: int
    is_e8m0: bool
    in_registers: bool


def held(matrix: Matrix, rows: torch.dtype) -> Held:
    """Return a matrix for a product with rows of a dtype. Raises: ValueError for zeros that do not lie as their scales."""
    scale, zero = matrix.scale, matrix.zero
    if scale is not None and zero is not None and scale.stride() != zero.stride():
        raise ValueError(f"zeros have the strides {zero.stride()}, their scales {scale.stride()}")
    is_e8m0 = scale is not None and scale.dtype == E8M0
    by = None if scale is None else as_held(scale)
    return Held(as_held(matrix.data), by, zero, matrix.bias, matrix.code.value, is_e8m0, scales_codes(rows, matrix))


def constants_of(weights: Tensor, scale: Tensor | None, code: int, is_e8m0: bool, in_registers: bool, depth: int) -> dict[str, int]:
    """Return what kernels are told of a matrix that is held so."""
    return {
        "CODE": code,
        "PER_BYTE": 2 if code in _PACKED else 1,
        "EXPERT_STRIDE": weights.stride(0),
        "WEIGHT_STRIDE": weights.stride(1),
        "WEIGHT_STEP": weights.stride(2),
        "E8M0": is_e8m0,
        "IN_REGISTERS": in_registers,
        "GROUP": depth if scale is None else depth // scale.shape[2],
        "SCALE_ROWS": 1 if scale is None else weights.shape[1] // scale.shape[1],
        "SCALE_EXPERT": 0 if scale is None else scale.stride(0),
        "SCALE_STRIDE": 0 if scale is None else scale.stride(1),
        "SCALE_STEP": 0 if scale is None else scale.stride(2),
    }

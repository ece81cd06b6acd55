"""Int4 checkpoints become the operands of W4A8, W4A4 and W4A16."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ....formats import (
    AwqExpertWeights,
    CompressedInt4ExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
)
from ....formats.int4 import unpack_bytes
from ....formats.weights.compressed import decode_offset
from ..ops import AclFormat, AscendOps
from .layout import W4A4_WIDTHS, W4A8_WIDTHS, W4A16_WIDTHS, biases, gate_first, packed_matrices, require_no_bias
from .operands import W4A4Operand, W4A8Operand, W4A16Operand
from .scales import AddOffset, carry, carry_flat

Int4Groups: TypeAlias = AwqExpertWeights[GateUpOrder] | GptqExpertWeights[GateUpOrder]
W4A4Weights: TypeAlias = ModelSlimW4A4ExpertWeights[GateUpOrder] | ModelSlimW4A4PackedExpertWeights[GateUpOrder]

_MIDDLE = 8  # codes 0 to 15 are given as code - 8
_CORRECTION = 8  # x = 16 * high + low + 8: the product lacks 8 * sum of weight * scale


def w4a8_operands(weights: ModelSlimW4A8ExpertWeights[GateUpOrder], ops: AscendOps) -> tuple[W4A8Operand, W4A8Operand]:
    """Return both operands; a correction that the checkpoint lacks is computed. Raises: UnsupportedError for biases, and sizes of the operator."""
    require_no_bias(weights, "the product adds its correction where a bias would be, and then scales by row")
    W4A8_WIDTHS.require(weights)
    scale13 = gate_first(weights.w13_scale, weights.order)
    given13 = None if weights.w13_correction is None else gate_first(weights.w13_correction, weights.order)
    given2 = None if weights.w2_correction is None else weights.w2_correction.sum(2)
    return (
        _w4a8(ops, _rows13(weights.w13, weights.order, packed=True), scale13, given13),
        _w4a8(ops, _rows2(weights.w2, packed=True), weights.w2_scale, given2),
    )


def _w4a8(ops: AscendOps, values: list[Tensor], scale: Tensor, correction: Tensor | None) -> W4A8Operand:
    words = packed_matrices(values)
    if correction is None:
        correction = torch.stack([_CORRECTION * value.to(torch.float32).sum(0) for value in values]) * scale
    # SGLang casts the bytes, and looks at them as words afterwards.
    cast = ops.npu_format_cast(words.view(torch.int8), AclFormat.FRACTAL_NZ).view(torch.int32)
    return W4A8Operand(cast, carry(scale), correction.contiguous(), AclFormat.FRACTAL_NZ)


def w4a4_operands(weights: W4A4Weights, ops: AscendOps) -> tuple[W4A4Operand, W4A4Operand]:
    """Return both operands, of either packing. Raises: UnsupportedError for biases, and sizes of the operator."""
    require_no_bias(weights, "products of int4 rows take none")
    W4A4_WIDTHS.require(weights)
    packed = isinstance(weights, ModelSlimW4A4PackedExpertWeights)
    return (
        _w4a4(ops, _rows13(weights.w13, weights.order, packed=packed), gate_first(weights.w13_scale, weights.order)),
        _w4a4(ops, _rows2(weights.w2, packed=packed), weights.w2_scale),
    )


def _w4a4(ops: AscendOps, values: list[Tensor], scale: Tensor) -> W4A4Operand:
    words = ops.npu_format_cast(packed_matrices(values), AclFormat.FRACTAL_NZ)
    return W4A4Operand(words, carry_flat(scale), AclFormat.FRACTAL_NZ)


def _rows13(weight: Tensor, order: type[GateUpOrder], *, packed: bool) -> list[Tensor]:
    """Return the values of w13 of each expert, (hidden, 2 * inter), gate before up."""
    return [gate_first(unpack_bytes(held, 0) if packed else held, order, 0).T for held in weight]


def _rows2(weight: Tensor, *, packed: bool) -> list[Tensor]:
    """Return the values of w2 of each expert, (inter, hidden)."""
    return [(unpack_bytes(held, 0) if packed else held).T for held in weight]


# ---- rows of half precision -----------------------------------------------------------------------------------------------------------


def grouped_operands(weights: Int4Groups, dtype: torch.dtype) -> tuple[W4A16Operand, W4A16Operand]:
    """Return the operands of AWQ and GPTQ for rows of ``dtype``: both classes give zeros as they are subtracted, so one maker serves them.

    Raises: UnsupportedError for sizes.
    """
    W4A16_WIDTHS.require(weights)
    b13, b2 = biases(weights, dtype)
    first = _grouped(weights.codes_w13, weights.w13_scale, dtype, b13, weights.order)
    return first, _grouped(weights.codes_w2, weights.w2_scale, dtype, b2, None)


def _grouped(
    codes: Callable[[int], tuple[Tensor, Tensor | None]], scale: Tensor, dtype: torch.dtype, bias: Tensor | None, order: type[GateUpOrder] | None
) -> W4A16Operand:
    def columns(matrix: Tensor) -> Tensor:
        return matrix if order is None else gate_first(matrix, order, matrix.dim() - 1)

    values: list[Tensor] = []
    zeros: list[Tensor] = []
    for expert in range(scale.shape[0]):
        code, zero = codes(expert)
        values.append(columns(code - _MIDDLE))
        if zero is not None:
            zeros.append(columns(zero))
    scales = columns(scale).to(dtype).contiguous()
    offset = AddOffset.of_zeros(torch.stack(zeros), dtype) if zeros else AddOffset.none(scales)
    return W4A16Operand(packed_matrices(values), scales, offset, AclFormat.ND, bias)


def compressed_operands(weights: CompressedInt4ExpertWeights[GateUpOrder], dtype: torch.dtype) -> tuple[W4A16Operand, W4A16Operand]:
    """Return the operands of compressed-tensors for rows of ``dtype``: packed anew, along columns; symmetric.

    Raises: UnsupportedError for sizes.
    """
    W4A16_WIDTHS.require(weights)
    b13, b2 = biases(weights, dtype)
    first = [gate_first(decode_offset(held), weights.order, 0).T for held in weights.w13]
    second = [decode_offset(held).T for held in weights.w2]
    scale13 = gate_first(weights.w13_scale, weights.order)
    return _symmetric(first, scale13, dtype, b13), _symmetric(second, weights.w2_scale, dtype, b2)


def _symmetric(values: list[Tensor], scale: Tensor, dtype: torch.dtype, bias: Tensor | None) -> W4A16Operand:
    scales = scale.transpose(1, 2).to(dtype).contiguous()
    return W4A16Operand(packed_matrices(values), scales, AddOffset.none(scales), AclFormat.ND, bias)

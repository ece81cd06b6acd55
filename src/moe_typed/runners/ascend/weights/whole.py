"""Checkpoints with a value an element become operands: bf16, fp16, int8 with a scale a row, mxfp8, and what is dequantised of GGUF."""

from typing import Annotated, Final, final

import torch
from jaxtyping import BFloat16
from torch import Tensor

from ....boundary import Layout, boundary
from ....formats import Bf16ExpertWeights, Fp16ExpertWeights, GateUp, GateUpOrder, Int8ChannelExpertWeights, MxFp4ExpertWeights, MxFp8ExpertWeights
from ..ops import AclFormat, AscendOps
from .layout import MXFP4_WIDTHS, MXFP8_WIDTHS, biases, dense_matrices, gate_first, int8_matrices, require_no_bias
from .operands import Bf16Operand, Fp16Operand, MxFp4Operand, MxFp8Operand, W8A8Fp16Operand, W8A8Operand
from .scales import Bf16ChannelScale, Fp32ChannelScale, pair

_ROW_MAJOR: Final = Layout(contiguous=True)


def bf16_operands(weights: Bf16ExpertWeights[GateUpOrder], ops: AscendOps) -> tuple[Bf16Operand, Bf16Operand]:
    """Return both operands."""
    b13, b2 = biases(weights, torch.bfloat16)
    w13, w2 = dense_matrices(ops, gate_first(weights.w13, weights.order)), dense_matrices(ops, weights.w2)
    return Bf16Operand(*w13, b13), Bf16Operand(*w2, b2)


def fp16_operands(weights: Fp16ExpertWeights[GateUpOrder], ops: AscendOps) -> tuple[Fp16Operand, Fp16Operand]:
    """Return both operands."""
    b13, b2 = biases(weights, torch.float16)
    w13, w2 = dense_matrices(ops, gate_first(weights.w13, weights.order)), dense_matrices(ops, weights.w2)
    return Fp16Operand(*w13, b13), Fp16Operand(*w2, b2)


def w8a8_operands(weights: Int8ChannelExpertWeights[GateUpOrder], ops: AscendOps) -> tuple[W8A8Operand, W8A8Operand]:
    """Return both operands for results in bf16. Raises: UnsupportedError for biases."""

    def operand(weight: Tensor, scale: Tensor) -> W8A8Operand:
        matrices, layout = int8_matrices(ops, weight)
        return W8A8Operand(matrices, Bf16ChannelScale(scale.to(torch.bfloat16).contiguous()), layout)

    first, second = _int8_projections(weights)
    return operand(*first), operand(*second)


def w8a8_fp16_operands(weights: Int8ChannelExpertWeights[GateUpOrder], ops: AscendOps) -> tuple[W8A8Fp16Operand, W8A8Fp16Operand]:
    """Return both operands for results in fp16. Raises: UnsupportedError for biases."""

    def operand(weight: Tensor, scale: Tensor) -> W8A8Fp16Operand:
        matrices, layout = int8_matrices(ops, weight)
        return W8A8Fp16Operand(matrices, Fp32ChannelScale(scale.contiguous()), layout)

    first, second = _int8_projections(weights)
    return operand(*first), operand(*second)


def _int8_projections(weights: Int8ChannelExpertWeights[GateUpOrder]) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return the matrix and the scale of each projection, gate before up. Raises: UnsupportedError for biases."""
    require_no_bias(weights, "older versions of the product take integer biases alone, which a checkpoint has not")
    first = gate_first(weights.w13, weights.order), gate_first(weights.w13_scale, weights.order)
    return first, (weights.w2, weights.w2_scale)


def mxfp8_operands(weights: MxFp8ExpertWeights[GateUpOrder], ops: AscendOps) -> tuple[MxFp8Operand, MxFp8Operand]:
    """Return both operands: cast first and turned afterwards, since a cast would lose the strides. Raises: UnsupportedError for biases and sizes."""
    require_no_bias(weights, "the fused product takes none")
    MXFP8_WIDTHS.require(weights)

    def operand(weight: Tensor, scale: Tensor) -> MxFp8Operand:
        return MxFp8Operand(ops.npu_format_cast(weight, AclFormat.FRACTAL_NZ).transpose(1, 2), pair(scale), AclFormat.FRACTAL_NZ)

    first = operand(gate_first(weights.w13, weights.order), gate_first(weights.w13_scale, weights.order))
    return first, operand(weights.w2, weights.w2_scale)


def mxfp4_operands(weights: MxFp4ExpertWeights[GateUpOrder], ops: AscendOps) -> tuple[MxFp4Operand, MxFp4Operand]:
    """Return both operands, of mxfp8 and mxfp4 rows alike. Raises: UnsupportedError for biases and sizes."""
    require_no_bias(weights, "products of microscaled rows take none")
    MXFP4_WIDTHS.require(weights)

    def operand(weight: Tensor, scale: Tensor) -> MxFp4Operand:
        turned = ops.npu_format_cast(weight.view(torch.uint8), AclFormat.FRACTAL_NZ).transpose(1, 2)
        return MxFp4Operand(turned, pair(scale), AclFormat.FRACTAL_NZ)

    first = operand(gate_first(weights.w13, weights.order), gate_first(weights.w13_scale, weights.order))
    return first, operand(weights.w2, weights.w2_scale)


@final
@boundary
class GgufShard:
    """One rank's part of weights that were dequantised: both matrices cut along their *rows*, so that a second product gives whole columns.

    ``w13`` (experts, 2 * inter / ranks, hidden), gate before up; ``w2`` (experts, hidden / ranks, inter). Source: SGLang's GGUF loader, which cuts
    blocks of a quantised row for no rank.
    """

    w13: Annotated[BFloat16[Tensor, "experts rows hidden"], _ROW_MAJOR]
    w2: Annotated[BFloat16[Tensor, "experts columns inter"], _ROW_MAJOR]


def shard_gguf(weights: Bf16ExpertWeights[GateUpOrder], rank: int, size: int) -> GgufShard:
    """Return the part of rank ``rank`` of ``size``. Raises: ValueError where a width is not divided; UnsupportedError for biases."""
    require_no_bias(weights, "GGUF has none")
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} of {size}")
    if weights.inter % size or weights.hidden % size:
        raise ValueError(f"inter = {weights.inter} and hidden = {weights.hidden} cannot both be divided among {size} ranks")
    columns = weights.hidden // size
    w13 = GateUp.part(gate_first(weights.w13, weights.order), 1, rank, size)
    return GgufShard(w13.contiguous(), weights.w2[:, rank * columns : (rank + 1) * columns].contiguous())


def gguf_operands(shard: GgufShard, ops: AscendOps) -> tuple[Bf16Operand, Bf16Operand]:
    """Return both operands."""
    return Bf16Operand(*dense_matrices(ops, shard.w13)), Bf16Operand(*dense_matrices(ops, shard.w2))

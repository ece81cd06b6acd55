"""Checkpoint layouts as the kernels read them: views, but for what says else. Importing this does not import Triton."""

from typing import TypeAlias

from torch import Tensor

from ...formats import (
    Bf16ExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp16ExpertWeights,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32ExpertWeights,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GateUpOrder,
    Int8ChannelExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    Payload,
)
from ...ops.quantised_product.spec import Matrix

Payloads: TypeAlias = tuple[type[Payload], ...]
DenseCheckpoint: TypeAlias = Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Fp32ExpertWeights[GateUpOrder]
TransposedCheckpoint: TypeAlias = (
    Bf16TransposedExpertWeights[GateUpOrder] | Fp16TransposedExpertWeights[GateUpOrder] | Fp32TransposedExpertWeights[GateUpOrder]
)
UngatedCheckpoint: TypeAlias = Bf16UngatedExpertWeights | Fp16UngatedExpertWeights | Fp32UngatedExpertWeights
ScaledCheckpoint: TypeAlias = (
    Fp8TensorExpertWeights[GateUpOrder]
    | Fp8ChannelExpertWeights[GateUpOrder]
    | Fp8Block128ExpertWeights[GateUpOrder]
    | MxFp8ExpertWeights[GateUpOrder]
    | MxFp4ExpertWeights[GateUpOrder]
    | Int8ChannelExpertWeights[GateUpOrder]
)


def operands(weights: DenseCheckpoint | TransposedCheckpoint | UngatedCheckpoint | ScaledCheckpoint) -> tuple[Matrix, Matrix]:
    """Return both projections. Scales of whole matrices become one a row, in the order of the rows: a small copy."""
    w13, w2, s13, s2 = weights.w13, weights.w2, None, None
    match weights:
        case Bf16TransposedExpertWeights() | Fp16TransposedExpertWeights() | Fp32TransposedExpertWeights():
            w13, w2 = w13.transpose(1, 2), w2.transpose(1, 2)
        case Fp8TensorExpertWeights():
            gate, up = (weights.w13_scale[:, index, None].expand(-1, weights.inter) for index in (0, 1))
            s13 = weights.order.join(gate, up, 1).unsqueeze(2)
            s2 = weights.w2_scale.view(-1, 1, 1).expand(-1, weights.hidden, 1)
        case Fp8ChannelExpertWeights() | Int8ChannelExpertWeights():
            s13, s2 = weights.w13_scale.unsqueeze(2), weights.w2_scale.unsqueeze(2)
        case Fp8Block128ExpertWeights() | MxFp8ExpertWeights() | MxFp4ExpertWeights():
            s13, s2 = weights.w13_scale, weights.w2_scale
        case _:
            pass
    return Matrix(w13, s13, None, _contiguous(weights.b13)), Matrix(w2, s2, None, _contiguous(weights.b2))


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()

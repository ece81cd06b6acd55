"""Weights prepared for the reference runner: checkpoint layout as it is, in any gate/up order, without a copy.

The accept-sets are those of kernels in the field: rows without scales always, and the rows that a kernel for these weights multiplies as they are.
"""

from typing import TypeAlias, final, overload

import torch
from typing_extensions import override

from ...boundary import boundary
from ...formats import (
    AnyDenseRows,
    AnyExpertWeights,
    AwqExpertWeights,
    Bf16ExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    CompressedInt4ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp8TensorRows,
    Fp8TokenRows,
    Fp16ExpertWeights,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32ExpertWeights,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    Int4TokenRows,
    Int8ChannelExpertWeights,
    Int8TokenRows,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
    MxFp4ExpertWeights,
    MxFp4Rows,
    MxFp8ExpertWeights,
    MxFp8Rows,
    NvFp4ExpertWeights,
    NvFp4Rows,
)
from ..activations import Activation
from ..base import PreparedWeights
from .runner import ReferenceRunner, make_runner

DenseWeights: TypeAlias = Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Fp32ExpertWeights[GateUpOrder]
TransposedWeights: TypeAlias = (
    Bf16TransposedExpertWeights[GateUpOrder] | Fp16TransposedExpertWeights[GateUpOrder] | Fp32TransposedExpertWeights[GateUpOrder]
)
UngatedWeights: TypeAlias = Bf16UngatedExpertWeights | Fp16UngatedExpertWeights | Fp32UngatedExpertWeights
Int4Weights: TypeAlias = AwqExpertWeights[GateUpOrder] | GptqExpertWeights[GateUpOrder] | CompressedInt4ExpertWeights[GateUpOrder]
W4A4Weights: TypeAlias = ModelSlimW4A4ExpertWeights[GateUpOrder] | ModelSlimW4A4PackedExpertWeights[GateUpOrder]
ReferenceCheckpoint: TypeAlias = (
    AnyExpertWeights[GateUpOrder] | TransposedWeights | UngatedWeights | Int4Weights | ModelSlimW4A8ExpertWeights[GateUpOrder] | W4A4Weights
)


@final
@boundary
class ReferenceDenseWeights(PreparedWeights[ReferenceRunner, AnyDenseRows]):
    """Unquantised weights for the reference runner."""

    weights: DenseWeights

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, self.weights.format.data_dtype)


@final
@boundary
class ReferenceTransposedWeights(PreparedWeights[ReferenceRunner, AnyDenseRows]):
    """Unquantised weights whose matrices are stored with the reduction first, for the reference runner."""

    weights: TransposedWeights

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, self.weights.format.data_dtype)


@final
@boundary
class ReferenceUngatedWeights(PreparedWeights[ReferenceRunner, AnyDenseRows]):
    """Unquantised weights of experts without a gate, for the reference runner."""

    weights: UngatedWeights

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, self.weights.format.data_dtype)


@final
@boundary
class ReferenceFp8TensorWeights(PreparedWeights[ReferenceRunner, AnyDenseRows | Fp8TensorRows]):
    """Fp8 weights under one scale for the reference runner."""

    weights: Fp8TensorExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceFp8ChannelWeights(PreparedWeights[ReferenceRunner, AnyDenseRows | Fp8TokenRows]):
    """Fp8 weights with a scale a row for the reference runner."""

    weights: Fp8ChannelExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceFp8Block128Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | Fp8Block128Rows]):
    """Block-128 fp8 weights for the reference runner."""

    weights: Fp8Block128ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceMxFp8Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | MxFp8Rows]):
    """Mxfp8 weights for the reference runner."""

    weights: MxFp8ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceMxFp4Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | MxFp8Rows | MxFp4Rows]):
    """Mxfp4 weights for the reference runner."""

    weights: MxFp4ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceNvFp4Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | NvFp4Rows]):
    """Nvfp4 weights for the reference runner."""

    weights: NvFp4ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceInt8ChannelWeights(PreparedWeights[ReferenceRunner, AnyDenseRows | Int8TokenRows]):
    """Int8 weights with a scale a row for the reference runner."""

    weights: Int8ChannelExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceInt4Weights(PreparedWeights[ReferenceRunner, AnyDenseRows]):
    """Int4 weights in groups, packed in any order, for the reference runner."""

    weights: Int4Weights

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceW4A8Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | Int8TokenRows]):
    """ModelSlim's int4 weights that int8 rows are multiplied by, for the reference runner."""

    weights: ModelSlimW4A8ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class ReferenceW4A4Weights(PreparedWeights[ReferenceRunner, AnyDenseRows | Int4TokenRows]):
    """ModelSlim's int4 weights that int4 rows are multiplied by, packed or not, for the reference runner."""

    weights: W4A4Weights

    @override
    def runner(self, activation: Activation) -> ReferenceRunner:
        return make_runner(self.weights, activation, torch.bfloat16)


AnyReferenceWeights: TypeAlias = (
    ReferenceDenseWeights
    | ReferenceTransposedWeights
    | ReferenceUngatedWeights
    | ReferenceFp8TensorWeights
    | ReferenceFp8ChannelWeights
    | ReferenceFp8Block128Weights
    | ReferenceMxFp8Weights
    | ReferenceMxFp4Weights
    | ReferenceNvFp4Weights
    | ReferenceInt8ChannelWeights
    | ReferenceInt4Weights
    | ReferenceW4A8Weights
    | ReferenceW4A4Weights
)


@overload
def prepare_reference(weights: DenseWeights) -> ReferenceDenseWeights: ...
@overload
def prepare_reference(weights: TransposedWeights) -> ReferenceTransposedWeights: ...
@overload
def prepare_reference(weights: UngatedWeights) -> ReferenceUngatedWeights: ...
@overload
def prepare_reference(weights: Fp8TensorExpertWeights[GateUpOrder]) -> ReferenceFp8TensorWeights: ...
@overload
def prepare_reference(weights: Fp8ChannelExpertWeights[GateUpOrder]) -> ReferenceFp8ChannelWeights: ...
@overload
def prepare_reference(weights: Fp8Block128ExpertWeights[GateUpOrder]) -> ReferenceFp8Block128Weights: ...
@overload
def prepare_reference(weights: MxFp8ExpertWeights[GateUpOrder]) -> ReferenceMxFp8Weights: ...
@overload
def prepare_reference(weights: MxFp4ExpertWeights[GateUpOrder]) -> ReferenceMxFp4Weights: ...
@overload
def prepare_reference(weights: NvFp4ExpertWeights[GateUpOrder]) -> ReferenceNvFp4Weights: ...
@overload
def prepare_reference(weights: Int8ChannelExpertWeights[GateUpOrder]) -> ReferenceInt8ChannelWeights: ...
@overload
def prepare_reference(weights: ModelSlimW4A8ExpertWeights[GateUpOrder]) -> ReferenceW4A8Weights: ...
@overload
def prepare_reference(weights: W4A4Weights) -> ReferenceW4A4Weights: ...
@overload
def prepare_reference(weights: Int4Weights) -> ReferenceInt4Weights: ...
def prepare_reference(weights: ReferenceCheckpoint) -> AnyReferenceWeights:
    """Return checkpoint-layout weights as the reference runner takes them.

    Raises: TypeError for anything else, weights that are prepared already among them.
    """
    match weights:
        case Bf16ExpertWeights() | Fp16ExpertWeights() | Fp32ExpertWeights():
            return ReferenceDenseWeights(weights)
        case Bf16TransposedExpertWeights() | Fp16TransposedExpertWeights() | Fp32TransposedExpertWeights():
            return ReferenceTransposedWeights(weights)
        case Bf16UngatedExpertWeights() | Fp16UngatedExpertWeights() | Fp32UngatedExpertWeights():
            return ReferenceUngatedWeights(weights)
        case Fp8TensorExpertWeights():
            return ReferenceFp8TensorWeights(weights)
        case Fp8ChannelExpertWeights():
            return ReferenceFp8ChannelWeights(weights)
        case Fp8Block128ExpertWeights():
            return ReferenceFp8Block128Weights(weights)
        case MxFp8ExpertWeights():
            return ReferenceMxFp8Weights(weights)
        case MxFp4ExpertWeights():
            return ReferenceMxFp4Weights(weights)
        case NvFp4ExpertWeights():
            return ReferenceNvFp4Weights(weights)
        case Int8ChannelExpertWeights():
            return ReferenceInt8ChannelWeights(weights)
        case AwqExpertWeights() | GptqExpertWeights() | CompressedInt4ExpertWeights():
            return ReferenceInt4Weights(weights)
        case ModelSlimW4A8ExpertWeights():
            return ReferenceW4A8Weights(weights)
        case ModelSlimW4A4ExpertWeights() | ModelSlimW4A4PackedExpertWeights():
            return ReferenceW4A4Weights(weights)
        case _:
            raise TypeError(f"prepare_reference takes expert weights in checkpoint layout; got {type(weights).__qualname__}")

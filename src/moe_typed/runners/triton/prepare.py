"""From checkpoint layout to what the Triton runner takes. Triton is imported when weights are prepared, not with this module."""

from typing import TypeAlias, overload

from ...formats import (
    AwqExpertWeights,
    Bf16ExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    CompressedInt4ExpertWeights,
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
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
)
from .int4 import Int4Checkpoint, TritonInt4Weights, pack_int4
from .operands import DenseCheckpoint, ScaledCheckpoint, TransposedCheckpoint, UngatedCheckpoint
from .weights import TritonBf16Weights, TritonFp8Block128Weights, TritonFp16Weights, TritonFp32Weights
from .weights_dense import (
    TritonBf16TransposedWeights,
    TritonBf16UngatedWeights,
    TritonFp16TransposedWeights,
    TritonFp16UngatedWeights,
    TritonFp32TransposedWeights,
    TritonFp32UngatedWeights,
)
from .weights_scaled import TritonFp8ChannelWeights, TritonFp8TensorWeights, TritonInt8ChannelWeights, TritonMxFp4Weights, TritonMxFp8Weights

TritonCheckpoint: TypeAlias = DenseCheckpoint | TransposedCheckpoint | UngatedCheckpoint | ScaledCheckpoint | Int4Checkpoint
AnyTritonWeights: TypeAlias = (
    TritonBf16Weights
    | TritonFp16Weights
    | TritonFp32Weights
    | TritonFp8Block128Weights
    | TritonFp8TensorWeights
    | TritonFp8ChannelWeights
    | TritonInt8ChannelWeights
    | TritonMxFp8Weights
    | TritonMxFp4Weights
    | TritonBf16UngatedWeights
    | TritonFp16UngatedWeights
    | TritonFp32UngatedWeights
    | TritonBf16TransposedWeights
    | TritonFp16TransposedWeights
    | TritonFp32TransposedWeights
    | TritonInt4Weights
)


@overload
def prepare_triton(weights: Bf16ExpertWeights[GateUpOrder]) -> TritonBf16Weights: ...
@overload
def prepare_triton(weights: Fp16ExpertWeights[GateUpOrder]) -> TritonFp16Weights: ...
@overload
def prepare_triton(weights: Fp32ExpertWeights[GateUpOrder]) -> TritonFp32Weights: ...
@overload
def prepare_triton(weights: Fp8Block128ExpertWeights[GateUpOrder]) -> TritonFp8Block128Weights: ...
@overload
def prepare_triton(weights: Fp8TensorExpertWeights[GateUpOrder]) -> TritonFp8TensorWeights: ...
@overload
def prepare_triton(weights: Fp8ChannelExpertWeights[GateUpOrder]) -> TritonFp8ChannelWeights: ...
@overload
def prepare_triton(weights: Int8ChannelExpertWeights[GateUpOrder]) -> TritonInt8ChannelWeights: ...
@overload
def prepare_triton(weights: MxFp8ExpertWeights[GateUpOrder]) -> TritonMxFp8Weights: ...
@overload
def prepare_triton(weights: MxFp4ExpertWeights[GateUpOrder]) -> TritonMxFp4Weights: ...
@overload
def prepare_triton(weights: Bf16UngatedExpertWeights) -> TritonBf16UngatedWeights: ...
@overload
def prepare_triton(weights: Fp16UngatedExpertWeights) -> TritonFp16UngatedWeights: ...
@overload
def prepare_triton(weights: Fp32UngatedExpertWeights) -> TritonFp32UngatedWeights: ...
@overload
def prepare_triton(weights: Bf16TransposedExpertWeights[GateUpOrder]) -> TritonBf16TransposedWeights: ...
@overload
def prepare_triton(weights: Fp16TransposedExpertWeights[GateUpOrder]) -> TritonFp16TransposedWeights: ...
@overload
def prepare_triton(weights: Fp32TransposedExpertWeights[GateUpOrder]) -> TritonFp32TransposedWeights: ...
@overload
def prepare_triton(weights: Int4Checkpoint) -> TritonInt4Weights: ...
def prepare_triton(weights: TritonCheckpoint) -> AnyTritonWeights:
    """Return checkpoint-layout weights as the Triton runner takes them: in any gate/up order, and without a copy, but for int4, which is repacked.

    Raises: TypeError for anything else, weights that are prepared already among them. UnsupportedError where their device cannot multiply them.
    """
    prepared: AnyTritonWeights
    match weights:
        case Bf16ExpertWeights():
            prepared = TritonBf16Weights(weights)
        case Fp16ExpertWeights():
            prepared = TritonFp16Weights(weights)
        case Fp32ExpertWeights():
            prepared = TritonFp32Weights(weights)
        case Fp8Block128ExpertWeights():
            prepared = TritonFp8Block128Weights(weights)
        case Fp8TensorExpertWeights():
            prepared = TritonFp8TensorWeights(weights)
        case Fp8ChannelExpertWeights():
            prepared = TritonFp8ChannelWeights(weights)
        case Int8ChannelExpertWeights():
            prepared = TritonInt8ChannelWeights(weights)
        case MxFp8ExpertWeights():
            prepared = TritonMxFp8Weights(weights)
        case MxFp4ExpertWeights():
            prepared = TritonMxFp4Weights(weights)
        case Bf16UngatedExpertWeights():
            prepared = TritonBf16UngatedWeights(weights)
        case Fp16UngatedExpertWeights():
            prepared = TritonFp16UngatedWeights(weights)
        case Fp32UngatedExpertWeights():
            prepared = TritonFp32UngatedWeights(weights)
        case Bf16TransposedExpertWeights():
            prepared = TritonBf16TransposedWeights(weights)
        case Fp16TransposedExpertWeights():
            prepared = TritonFp16TransposedWeights(weights)
        case Fp32TransposedExpertWeights():
            prepared = TritonFp32TransposedWeights(weights)
        case AwqExpertWeights() | GptqExpertWeights() | CompressedInt4ExpertWeights():
            _require_device(weights)
            return _with_groups(pack_int4(weights))
        case _:
            raise TypeError(f"prepare_triton takes expert weights in checkpoint layout, but for nvfp4; got {type(weights).__qualname__}")
    _require_device(weights)
    return prepared


_MISSING = "the Triton runner needs Triton: pip install 'moe-typed[triton]'"


def _require_device(weights: TritonCheckpoint) -> None:
    try:
        from .general import require_general
        from .runner import require_device
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(_MISSING) from error
    match weights:
        case Bf16ExpertWeights() | Fp16ExpertWeights() | Fp32ExpertWeights() | Fp8Block128ExpertWeights():
            require_device(weights)
        case _:
            require_general(weights.w13, weights.format.name)


def _with_groups(weights: TritonInt4Weights) -> TritonInt4Weights:
    from .general import require_groups

    require_groups(weights.up, weights.down, weights.format.name)
    return weights

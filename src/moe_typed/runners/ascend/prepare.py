"""From checkpoint layout to weights prepared for the Ascend NPU."""

from typing import TypeAlias, cast, overload

import torch

from ...formats import (
    AwqExpertWeights,
    Bf16ExpertWeights,
    CompressedInt4ExpertWeights,
    ExpertWeights,
    Fp16ExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
)
from ...formats.weights.transposed import TransposedExpertWeights
from ...formats.weights.ungated import UngatedExpertWeights
from ...stages import TensorParallel
from ..base import UnsupportedError
from .library import library_of
from .ops import AscendExtensionOps, AscendOps
from .weights.int4 import compressed_operands, grouped_operands, w4a4_operands, w4a8_operands
from .weights.prepared import (
    AscendBf16Weights,
    AscendFp16Weights,
    AscendGgufWeights,
    AscendMxFp4A4Weights,
    AscendMxFp4A8Weights,
    AscendMxFp8Weights,
    AscendW4A4Weights,
    AscendW4A8Weights,
    AscendW4A16Fp16Weights,
    AscendW4A16Weights,
    AscendW8A8Fp16Weights,
    AscendW8A8Weights,
)
from .weights.whole import bf16_operands, fp16_operands, gguf_operands, mxfp4_operands, mxfp8_operands, shard_gguf, w8a8_fp16_operands, w8a8_operands

W4A16Checkpoint: TypeAlias = AwqExpertWeights[GateUpOrder] | GptqExpertWeights[GateUpOrder] | CompressedInt4ExpertWeights[GateUpOrder]
W4A4Checkpoint: TypeAlias = ModelSlimW4A4ExpertWeights[GateUpOrder] | ModelSlimW4A4PackedExpertWeights[GateUpOrder]
AscendCheckpoint: TypeAlias = (
    Bf16ExpertWeights[GateUpOrder]
    | Fp16ExpertWeights[GateUpOrder]
    | Int8ChannelExpertWeights[GateUpOrder]
    | ModelSlimW4A8ExpertWeights[GateUpOrder]
    | W4A4Checkpoint
    | W4A16Checkpoint
    | MxFp8ExpertWeights[GateUpOrder]
    | MxFp4ExpertWeights[GateUpOrder]
)
AnyAscendWeights: TypeAlias = (
    AscendBf16Weights
    | AscendFp16Weights
    | AscendW8A8Weights
    | AscendW4A8Weights
    | AscendW4A4Weights
    | AscendW4A16Weights
    | AscendMxFp8Weights
    | AscendMxFp4A8Weights
)


@overload
def prepare_ascend(
    weights: Bf16ExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendBf16Weights: ...
@overload
def prepare_ascend(
    weights: Fp16ExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendFp16Weights: ...
@overload
def prepare_ascend(
    weights: Int8ChannelExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendW8A8Weights: ...
@overload
def prepare_ascend(
    weights: ModelSlimW4A8ExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendW4A8Weights: ...
@overload
def prepare_ascend(weights: W4A4Checkpoint, ops: AscendOps | None = None, extension: AscendExtensionOps | None = None) -> AscendW4A4Weights: ...
@overload
def prepare_ascend(weights: W4A16Checkpoint, ops: AscendOps | None = None, extension: AscendExtensionOps | None = None) -> AscendW4A16Weights: ...
@overload
def prepare_ascend(
    weights: MxFp8ExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendMxFp8Weights: ...
@overload
def prepare_ascend(
    weights: MxFp4ExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendMxFp4A8Weights: ...
def prepare_ascend(weights: AscendCheckpoint, ops: AscendOps | None = None, extension: AscendExtensionOps | None = None) -> AnyAscendWeights:
    """Return weights as the Ascend runner takes them, for a bf16 model where the weights do not say (``prepare_ascend_fp16`` for an fp16 one).

    Gate goes before up, columns go last, int4 is packed along them. ``ops``: the operators to prepare and run with, None for those of torch_npu.
    ``extension``: those of sgl_kernel_npu; with them activations leave undefined rows alone, and round half up where they quantise.
    Raises: ImportError where torch_npu is not installed; TypeError for weights that are prepared already; UnsupportedError for those in a format that
    the runner has no product for, and for biases and sizes that the operators do not take.
    """
    match weights:
        case Bf16ExpertWeights():
            library = library_of(ops, extension)
            return AscendBf16Weights(library, *bf16_operands(weights, library.ops))
        case Fp16ExpertWeights():
            library = library_of(ops, extension)
            return AscendFp16Weights(library, *fp16_operands(weights, library.ops))
        case Int8ChannelExpertWeights():
            library = library_of(ops, extension)
            return AscendW8A8Weights(library, *w8a8_operands(weights, library.ops))
        case ModelSlimW4A8ExpertWeights():
            library = library_of(ops, extension)
            return AscendW4A8Weights(library, *w4a8_operands(weights, library.ops))
        case ModelSlimW4A4ExpertWeights() | ModelSlimW4A4PackedExpertWeights():
            library = library_of(ops, extension)
            return AscendW4A4Weights(library, *w4a4_operands(weights, library.ops))
        case AwqExpertWeights() | GptqExpertWeights():
            return AscendW4A16Weights(library_of(ops, extension), *grouped_operands(weights, torch.bfloat16))
        case CompressedInt4ExpertWeights():
            return AscendW4A16Weights(library_of(ops, extension), *compressed_operands(weights, torch.bfloat16))
        case MxFp8ExpertWeights():
            library = library_of(ops, extension)
            return AscendMxFp8Weights(library, *mxfp8_operands(weights, library.ops))
        case MxFp4ExpertWeights():
            library = library_of(ops, extension)
            return AscendMxFp4A8Weights(library, *mxfp4_operands(weights, library.ops))
        case _:
            raise _refuse(weights)


def _refuse(weights: object) -> Exception:
    """Return the error for what is none of the checkpoints above: by its class, and why."""
    name = type(weights).__qualname__
    match weights:
        case UngatedExpertWeights():
            return UnsupportedError(
                f"{name} have no gate, and every activation on the NPU reads gate and up columns; run them with prepare_reference"
            )
        case TransposedExpertWeights():
            fix = "give both matrices transposed, contiguous, as Bf16ExpertWeights or Fp16ExpertWeights"
            return UnsupportedError(f"{name} hold the reduction first, and prepare_ascend reads rows with the reduction last: {fix}")
        case ExpertWeights():
            return UnsupportedError(f"the Ascend runner has no product for {name}; run them with prepare_reference")
        case _:
            return TypeError(f"prepare_ascend takes expert weights in checkpoint layout; got {name}")


@overload
def prepare_ascend_fp16(
    weights: Int8ChannelExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendW8A8Fp16Weights: ...
@overload
def prepare_ascend_fp16(
    weights: W4A16Checkpoint, ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendW4A16Fp16Weights: ...
def prepare_ascend_fp16(
    weights: Int8ChannelExpertWeights[GateUpOrder] | W4A16Checkpoint, ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendW8A8Fp16Weights | AscendW4A16Fp16Weights:
    """Return quantised weights whose products are tied to the dtype of the model, for an fp16 one. Raises: as ``prepare_ascend``."""
    match weights:
        case Int8ChannelExpertWeights():
            library = library_of(ops, extension)
            return AscendW8A8Fp16Weights(library, *w8a8_fp16_operands(weights, library.ops))
        case AwqExpertWeights() | GptqExpertWeights():
            return AscendW4A16Fp16Weights(library_of(ops, extension), *grouped_operands(weights, torch.float16))
        case CompressedInt4ExpertWeights():
            return AscendW4A16Fp16Weights(library_of(ops, extension), *compressed_operands(weights, torch.float16))
        case _:
            raise TypeError(f"prepare_ascend_fp16 takes int8 and int4 weights in checkpoint layout; got {type(weights).__qualname__}")


def prepare_ascend_mxfp4(
    weights: MxFp4ExpertWeights[GateUpOrder], ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendMxFp4A4Weights:
    """Return mxfp4 weights for mxfp4 rows; ``prepare_ascend`` makes them for mxfp8 rows, which lose less. Raises: as ``prepare_ascend``."""
    library = library_of(ops, extension)
    return AscendMxFp4A4Weights(library, *mxfp4_operands(weights, library.ops))


def prepare_ascend_as(
    prepared: type[object], weights: AscendCheckpoint, ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AnyAscendWeights | AscendW8A8Fp16Weights | AscendW4A16Fp16Weights:
    """Return weights as the class that a plan names. Raises: as ``prepare_ascend``."""
    if prepared in (AscendW8A8Fp16Weights, AscendW4A16Fp16Weights):
        return prepare_ascend_fp16(cast("W4A16Checkpoint", weights), ops, extension)  # the plan found the class by these weights
    return prepare_ascend(cast("Bf16ExpertWeights[GateUpOrder]", weights), ops, extension)


def prepare_ascend_gguf(
    weights: Bf16ExpertWeights[GateUpOrder], ranks: TensorParallel, ops: AscendOps | None = None, extension: AscendExtensionOps | None = None
) -> AscendGgufWeights:
    """Return this rank's part of weights that were dequantised of a GGUF file, both matrices cut along their rows. Give the whole layer's weights.

    What such experts give is complete after combine, and not a summand: the group that gathers the activations gathers the result.
    Raises: as ``prepare_ascend``; ValueError where the ranks do not divide a width.
    """
    library = library_of(ops, extension)
    return AscendGgufWeights(library, *gguf_operands(shard_gguf(weights, ranks.rank, ranks.size), library.ops), ranks)

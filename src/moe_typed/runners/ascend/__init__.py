"""The Ascend runner, and the weights prepared for it. Importing this imports no torch_npu: ``prepare_ascend`` does, unless it is given operators."""

from .activations import ASCEND_ACTIVATIONS
from .prepare import (
    AnyAscendWeights,
    AscendCheckpoint,
    prepare_ascend,
    prepare_ascend_as,
    prepare_ascend_fp16,
    prepare_ascend_gguf,
    prepare_ascend_mxfp4,
)
from .runner import AscendRunner, AscendSlicedRunner
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

__all__ = [
    "ASCEND_ACTIVATIONS",
    "AnyAscendWeights",
    "AscendBf16Weights",
    "AscendCheckpoint",
    "AscendFp16Weights",
    "AscendGgufWeights",
    "AscendMxFp4A4Weights",
    "AscendMxFp4A8Weights",
    "AscendMxFp8Weights",
    "AscendRunner",
    "AscendSlicedRunner",
    "AscendW4A4Weights",
    "AscendW4A8Weights",
    "AscendW4A16Fp16Weights",
    "AscendW4A16Weights",
    "AscendW8A8Fp16Weights",
    "AscendW8A8Weights",
    "prepare_ascend",
    "prepare_ascend_as",
    "prepare_ascend_fp16",
    "prepare_ascend_gguf",
    "prepare_ascend_mxfp4",
]

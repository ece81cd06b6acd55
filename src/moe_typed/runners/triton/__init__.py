"""The Triton runner and the weights prepared for it. Importing this does not import Triton; preparing weights does."""

from .int4 import TritonInt4Weights
from .prepare import AnyTritonWeights, TritonCheckpoint, prepare_triton
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

__all__ = [
    "AnyTritonWeights",
    "TritonBf16TransposedWeights",
    "TritonBf16UngatedWeights",
    "TritonBf16Weights",
    "TritonCheckpoint",
    "TritonFp8Block128Weights",
    "TritonFp8ChannelWeights",
    "TritonFp8TensorWeights",
    "TritonFp16TransposedWeights",
    "TritonFp16UngatedWeights",
    "TritonFp16Weights",
    "TritonFp32TransposedWeights",
    "TritonFp32UngatedWeights",
    "TritonFp32Weights",
    "TritonInt4Weights",
    "TritonInt8ChannelWeights",
    "TritonMxFp4Weights",
    "TritonMxFp8Weights",
    "prepare_triton",
]

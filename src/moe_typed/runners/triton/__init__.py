"""The Triton runner and the weights prepared for it. Importing this does not import Triton; preparing weights does."""

from .weights import TritonBf16Weights, TritonFp8Block128Weights, TritonFp16Weights, TritonFp32Weights, prepare_triton

__all__ = ["TritonBf16Weights", "TritonFp8Block128Weights", "TritonFp16Weights", "TritonFp32Weights", "prepare_triton"]

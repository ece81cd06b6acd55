"""The reference runner: torch, float32, one expert after another; and the weights prepared for it."""

from .runner import ReferenceRunner, reference_experts
from .weights import (
    AnyReferenceWeights,
    ReferenceCheckpoint,
    ReferenceDenseWeights,
    ReferenceFp8Block128Weights,
    ReferenceFp8ChannelWeights,
    ReferenceFp8TensorWeights,
    ReferenceInt4Weights,
    ReferenceInt8ChannelWeights,
    ReferenceMxFp4Weights,
    ReferenceMxFp8Weights,
    ReferenceNvFp4Weights,
    ReferenceTransposedWeights,
    ReferenceUngatedWeights,
    ReferenceW4A4Weights,
    ReferenceW4A8Weights,
    prepare_reference,
)

__all__ = [
    "AnyReferenceWeights",
    "ReferenceCheckpoint",
    "ReferenceDenseWeights",
    "ReferenceFp8Block128Weights",
    "ReferenceFp8ChannelWeights",
    "ReferenceFp8TensorWeights",
    "ReferenceInt4Weights",
    "ReferenceInt8ChannelWeights",
    "ReferenceMxFp4Weights",
    "ReferenceMxFp8Weights",
    "ReferenceNvFp4Weights",
    "ReferenceRunner",
    "ReferenceTransposedWeights",
    "ReferenceUngatedWeights",
    "ReferenceW4A4Weights",
    "ReferenceW4A8Weights",
    "prepare_reference",
    "reference_experts",
]

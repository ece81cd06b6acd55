"""Runners: what turns dispatched rows into expert results, each with the weights prepared for it."""

from .activations import ACTIVATIONS, Activation, SiluAndMul, SwigluOai
from .base import PreparedWeights, Runner, UnsupportedError
from .reference import (
    AnyReferenceWeights,
    ReferenceDenseWeights,
    ReferenceFp8Block128Weights,
    ReferenceFp8ChannelWeights,
    ReferenceFp8TensorWeights,
    ReferenceInt4Weights,
    ReferenceInt8ChannelWeights,
    ReferenceMxFp4Weights,
    ReferenceMxFp8Weights,
    ReferenceNvFp4Weights,
    ReferenceRunner,
    prepare_reference,
    reference_experts,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "AnyReferenceWeights",
    "PreparedWeights",
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
    "Runner",
    "SiluAndMul",
    "SwigluOai",
    "UnsupportedError",
    "prepare_reference",
    "reference_experts",
]

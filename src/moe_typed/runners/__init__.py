"""Runners: what turns dispatched rows into expert results, each with the weights prepared for it."""

from .activations import ACTIVATIONS, Activation, SiluAndMul, SwigluOai
from .base import PreparedWeights, Runner, UnsupportedError
from .reference import (
    ReferenceDenseWeights,
    ReferenceFp8Block128Weights,
    ReferenceMxFp8Weights,
    ReferenceRunner,
    prepare_reference,
    reference_experts,
)

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "PreparedWeights",
    "ReferenceDenseWeights",
    "ReferenceFp8Block128Weights",
    "ReferenceMxFp8Weights",
    "ReferenceRunner",
    "Runner",
    "SiluAndMul",
    "SwigluOai",
    "UnsupportedError",
    "prepare_reference",
    "reference_experts",
]

"""Weights in the formats that the Triton runner has tuned kernels for. Triton is imported when weights are prepared, not with this module."""

from typing import TYPE_CHECKING, TypeAlias, final

import torch
from typing_extensions import override

from ...boundary import boundary
from ...formats import (
    Bf16ExpertWeights,
    Bf16Rows,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUpOrder,
)
from ..activations import Activation
from ..base import PreparedWeights
from .activations import is_gate
from .operands import Payloads, operands

if TYPE_CHECKING:
    from .general import TritonGeneralRunner
    from .runner import TritonRunner

    AnyTritonRunner: TypeAlias = TritonRunner | TritonGeneralRunner

TritonExpertWeights: TypeAlias = (
    Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Fp32ExpertWeights[GateUpOrder] | Fp8Block128ExpertWeights[GateUpOrder]
)


@final
@boundary
class TritonBf16Weights(PreparedWeights["AnyTritonRunner", Bf16Rows]):
    """Bfloat16 weights for the Triton runner."""

    weights: Bf16ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "AnyTritonRunner":
        return _make_runner(self.weights, activation, self.accepts(), torch.bfloat16)


@final
@boundary
class TritonFp16Weights(PreparedWeights["AnyTritonRunner", Fp16Rows]):
    """Float16 weights for the Triton runner."""

    weights: Fp16ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "AnyTritonRunner":
        return _make_runner(self.weights, activation, self.accepts(), torch.float16)


@final
@boundary
class TritonFp32Weights(PreparedWeights["AnyTritonRunner", Fp32Rows]):
    """Float32 weights for the Triton runner: exact products, without tensor cores."""

    weights: Fp32ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "AnyTritonRunner":
        return _make_runner(self.weights, activation, self.accepts(), torch.float32)


@final
@boundary
class TritonFp8Block128Weights(PreparedWeights["AnyTritonRunner", Fp8Block128Rows]):
    """Block-128 fp8 weights for the Triton runner, with rows in fp8 too (W8A8)."""

    weights: Fp8Block128ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "AnyTritonRunner":
        return _make_runner(self.weights, activation, self.accepts(), torch.bfloat16)


def _make_runner(weights: TritonExpertWeights, activation: Activation, accepts: Payloads, out_dtype: torch.dtype) -> "AnyTritonRunner":
    """Return the tuned runner for the activations that it does, and the general one for the others."""
    if is_gate(activation, weights.order):
        from .runner import make_runner

        return make_runner(weights, activation, out_dtype)
    from .general import make_general_runner

    return make_general_runner(weights, *operands(weights), activation, accepts, out_dtype)

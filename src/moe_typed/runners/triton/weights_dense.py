"""Weights without scales, without a gate or transposed, for the Triton runner, as checkpoints hold them. It imports no Triton."""

from typing import TYPE_CHECKING, final

from typing_extensions import override

from ...boundary import boundary
from ...formats import (
    Bf16Rows,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    Fp16Rows,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32Rows,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GateUpOrder,
)
from ..activations import Activation
from ..base import PreparedWeights
from .operands import Payloads, TransposedCheckpoint, UngatedCheckpoint, operands

if TYPE_CHECKING:
    from .general import TritonGeneralRunner


@final
@boundary
class TritonBf16UngatedWeights(PreparedWeights["TritonGeneralRunner", Bf16Rows]):
    """Bfloat16 weights of experts without a gate for the Triton runner."""

    weights: Bf16UngatedExpertWeights

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonFp16UngatedWeights(PreparedWeights["TritonGeneralRunner", Fp16Rows]):
    """Float16 weights of experts without a gate for the Triton runner."""

    weights: Fp16UngatedExpertWeights

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonFp32UngatedWeights(PreparedWeights["TritonGeneralRunner", Fp32Rows]):
    """Float32 weights of experts without a gate for the Triton runner."""

    weights: Fp32UngatedExpertWeights

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonBf16TransposedWeights(PreparedWeights["TritonGeneralRunner", Bf16Rows]):
    """Bfloat16 weights whose matrices are stored with the reduction first, for the Triton runner."""

    weights: Bf16TransposedExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonFp16TransposedWeights(PreparedWeights["TritonGeneralRunner", Fp16Rows]):
    """Float16 weights whose matrices are stored with the reduction first, for the Triton runner."""

    weights: Fp16TransposedExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonFp32TransposedWeights(PreparedWeights["TritonGeneralRunner", Fp32Rows]):
    """Float32 weights whose matrices are stored with the reduction first, for the Triton runner."""

    weights: Fp32TransposedExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


def _make_runner(weights: TransposedCheckpoint | UngatedCheckpoint, activation: Activation, accepts: Payloads) -> "TritonGeneralRunner":
    from .general import make_general_runner

    return make_general_runner(weights, *operands(weights), activation, accepts)

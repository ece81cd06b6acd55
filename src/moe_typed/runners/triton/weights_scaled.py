"""Weights with scales for the Triton runner, as checkpoints hold them, without a copy. It imports no Triton."""

from typing import TYPE_CHECKING, final

from typing_extensions import override

from ...boundary import boundary
from ...formats import (
    AnyDenseRows,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp8TensorRows,
    Fp8TokenRows,
    GateUpOrder,
    Int8ChannelExpertWeights,
    Int8TokenRows,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    MxFp8Rows,
)
from ..activations import Activation
from ..base import PreparedWeights
from .operands import Payloads, ScaledCheckpoint, operands

if TYPE_CHECKING:
    from .general import TritonGeneralRunner


@final
@boundary
class TritonFp8TensorWeights(PreparedWeights["TritonGeneralRunner", AnyDenseRows | Fp8TensorRows | Fp8TokenRows]):
    """Fp8 weights under one scale for the Triton runner: for rows in fp8 (W8A8), and for rows without scales (W8A16)."""

    weights: Fp8TensorExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonFp8ChannelWeights(PreparedWeights["TritonGeneralRunner", AnyDenseRows | Fp8TensorRows | Fp8TokenRows]):
    """Fp8 weights with a scale a row for the Triton runner: for rows in fp8 (W8A8), and for rows without scales (W8A16)."""

    weights: Fp8ChannelExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonInt8ChannelWeights(PreparedWeights["TritonGeneralRunner", AnyDenseRows | Int8TokenRows]):
    """Int8 weights with a scale a row for the Triton runner: for rows in int8, summed in int32 (W8A8), and for rows without scales (W8A16)."""

    weights: Int8ChannelExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonMxFp8Weights(PreparedWeights["TritonGeneralRunner", AnyDenseRows | MxFp8Rows]):
    """Mxfp8 weights for the Triton runner, which multiplies them, and mxfp8 rows, as bfloat16: that loses nothing."""

    weights: MxFp8ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


@final
@boundary
class TritonMxFp4Weights(PreparedWeights["TritonGeneralRunner", AnyDenseRows | MxFp8Rows]):
    """Mxfp4 weights for the Triton runner, which multiplies them, and mxfp8 rows, as bfloat16: that loses nothing."""

    weights: MxFp4ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonGeneralRunner":
        return _make_runner(self.weights, activation, self.accepts())


def _make_runner(weights: ScaledCheckpoint, activation: Activation, accepts: Payloads) -> "TritonGeneralRunner":
    from .general import make_general_runner

    return make_general_runner(weights, *operands(weights), activation, accepts)

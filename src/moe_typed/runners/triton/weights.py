"""Weights prepared for the Triton runner. Triton is imported when weights are prepared, not with this module."""

from typing import TYPE_CHECKING, TypeAlias, final, overload

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

if TYPE_CHECKING:
    from .runner import TritonRunner

TritonExpertWeights: TypeAlias = (
    Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Fp32ExpertWeights[GateUpOrder] | Fp8Block128ExpertWeights[GateUpOrder]
)


@final
@boundary
class TritonBf16Weights(PreparedWeights["TritonRunner", Bf16Rows]):
    """Bfloat16 weights for the Triton runner."""

    weights: Bf16ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonRunner":
        return _make_runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class TritonFp16Weights(PreparedWeights["TritonRunner", Fp16Rows]):
    """Float16 weights for the Triton runner."""

    weights: Fp16ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonRunner":
        return _make_runner(self.weights, activation, torch.float16)


@final
@boundary
class TritonFp32Weights(PreparedWeights["TritonRunner", Fp32Rows]):
    """Float32 weights for the Triton runner: exact products, without tensor cores."""

    weights: Fp32ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonRunner":
        return _make_runner(self.weights, activation, torch.float32)


@final
@boundary
class TritonFp8Block128Weights(PreparedWeights["TritonRunner", Fp8Block128Rows]):
    """Block-128 fp8 weights for the Triton runner, with rows in fp8 too (W8A8)."""

    weights: Fp8Block128ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> "TritonRunner":
        return _make_runner(self.weights, activation, torch.bfloat16)


@overload
def prepare_triton(weights: Bf16ExpertWeights[GateUpOrder]) -> TritonBf16Weights: ...
@overload
def prepare_triton(weights: Fp16ExpertWeights[GateUpOrder]) -> TritonFp16Weights: ...
@overload
def prepare_triton(weights: Fp32ExpertWeights[GateUpOrder]) -> TritonFp32Weights: ...
@overload
def prepare_triton(weights: Fp8Block128ExpertWeights[GateUpOrder]) -> TritonFp8Block128Weights: ...
def prepare_triton(
    weights: TritonExpertWeights,
) -> TritonBf16Weights | TritonFp16Weights | TritonFp32Weights | TritonFp8Block128Weights:
    """Return checkpoint-layout weights as the Triton runner takes them: in any gate/up order, without a copy.

    Raises: TypeError for anything else, weights that are prepared already among them. UnsupportedError where their device cannot multiply them.
    """
    prepared: TritonBf16Weights | TritonFp16Weights | TritonFp32Weights | TritonFp8Block128Weights
    match weights:
        case Bf16ExpertWeights():
            prepared = TritonBf16Weights(weights)
        case Fp16ExpertWeights():
            prepared = TritonFp16Weights(weights)
        case Fp32ExpertWeights():
            prepared = TritonFp32Weights(weights)
        case Fp8Block128ExpertWeights():
            prepared = TritonFp8Block128Weights(weights)
        case _:
            raise TypeError(f"prepare_triton takes bf16, fp16, fp32 or block-128 fp8 expert weights; got {type(weights).__qualname__}")
    _require_device(weights)
    return prepared


_MISSING = "the Triton runner needs Triton: pip install 'moe-typed[triton]'"


def _require_device(weights: TritonExpertWeights) -> None:
    try:
        from .runner import require_device
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise ImportError(_MISSING) from error
    require_device(weights)


def _make_runner(weights: TritonExpertWeights, activation: Activation, out_dtype: torch.dtype) -> "TritonRunner":
    from .runner import make_runner

    return make_runner(weights, activation, out_dtype)

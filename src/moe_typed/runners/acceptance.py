"""The acceptance table: (runner, weight format) -> prepared weights, whose class names the payloads they take.

Data alone: importing it imports no backend library.
"""

import enum
from collections.abc import Iterator
from typing import Final, Never, final

import attrs

from ..formats import (
    AwqExpertWeights,
    Bf16ExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    CompressedInt4ExpertWeights,
    ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp16ExpertWeights,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32ExpertWeights,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    NvFp4ExpertWeights,
    Payload,
)
from .aiter import (
    AiterBf16Weights,
    AiterFp8Block128Weights,
    AiterFp8FnuzBlock128Weights,
    AiterFp8FnuzTensorWeights,
    AiterFp8FnuzTokenWeights,
    AiterFp8TensorWeights,
    AiterFp8TokenWeights,
    AiterFp16Weights,
    AiterInt8TokenWeights,
    AiterMxFp4A4W4Weights,
    AiterMxFp4A8W4Weights,
    AiterMxFp4A16W4Weights,
    AiterMxFp8Weights,
)
from .ascend import (
    AscendBf16Weights,
    AscendFp16Weights,
    AscendMxFp4A8Weights,
    AscendMxFp8Weights,
    AscendW4A4Weights,
    AscendW4A8Weights,
    AscendW4A16Fp16Weights,
    AscendW4A16Weights,
    AscendW8A8Fp16Weights,
    AscendW8A8Weights,
)
from .base import PreparedWeights
from .reference import (
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
)
from .triton import (
    TritonBf16TransposedWeights,
    TritonBf16UngatedWeights,
    TritonBf16Weights,
    TritonFp8Block128Weights,
    TritonFp8ChannelWeights,
    TritonFp8TensorWeights,
    TritonFp16TransposedWeights,
    TritonFp16UngatedWeights,
    TritonFp16Weights,
    TritonFp32TransposedWeights,
    TritonFp32UngatedWeights,
    TritonFp32Weights,
    TritonInt4Weights,
    TritonInt8ChannelWeights,
    TritonMxFp4Weights,
    TritonMxFp8Weights,
)


@final
class RunnerName(enum.Enum):
    """Name the runners, the preferred one first; on AMD GPUs AITER comes before all."""

    TRITON = "triton"
    AITER = "aiter"
    ASCEND = "ascend"
    REFERENCE = "reference"


@final
@attrs.frozen
class Acceptance:
    """One row: weights of this format, prepared for this runner, take these payloads."""

    runner: RunnerName
    weights: type[ExpertWeights[GateUpOrder]]
    prepared: type[PreparedWeights[object, Never]]

    @property
    def payloads(self) -> tuple[type[Payload], ...]:
        """Return the accept-set."""
        return self.prepared.accepts()


ACCEPTANCE: Final = (
    Acceptance(RunnerName.TRITON, Bf16ExpertWeights, TritonBf16Weights),
    Acceptance(RunnerName.TRITON, Fp16ExpertWeights, TritonFp16Weights),
    Acceptance(RunnerName.TRITON, Fp32ExpertWeights, TritonFp32Weights),
    Acceptance(RunnerName.TRITON, Fp8Block128ExpertWeights, TritonFp8Block128Weights),
    Acceptance(RunnerName.TRITON, Bf16UngatedExpertWeights, TritonBf16UngatedWeights),
    Acceptance(RunnerName.TRITON, Fp16UngatedExpertWeights, TritonFp16UngatedWeights),
    Acceptance(RunnerName.TRITON, Fp32UngatedExpertWeights, TritonFp32UngatedWeights),
    Acceptance(RunnerName.TRITON, Bf16TransposedExpertWeights, TritonBf16TransposedWeights),
    Acceptance(RunnerName.TRITON, Fp16TransposedExpertWeights, TritonFp16TransposedWeights),
    Acceptance(RunnerName.TRITON, Fp32TransposedExpertWeights, TritonFp32TransposedWeights),
    Acceptance(RunnerName.TRITON, Fp8TensorExpertWeights, TritonFp8TensorWeights),
    Acceptance(RunnerName.TRITON, Fp8ChannelExpertWeights, TritonFp8ChannelWeights),
    Acceptance(RunnerName.TRITON, MxFp8ExpertWeights, TritonMxFp8Weights),
    Acceptance(RunnerName.TRITON, MxFp4ExpertWeights, TritonMxFp4Weights),
    Acceptance(RunnerName.TRITON, Int8ChannelExpertWeights, TritonInt8ChannelWeights),
    Acceptance(RunnerName.TRITON, AwqExpertWeights, TritonInt4Weights),
    Acceptance(RunnerName.TRITON, GptqExpertWeights, TritonInt4Weights),
    Acceptance(RunnerName.TRITON, CompressedInt4ExpertWeights, TritonInt4Weights),
    Acceptance(RunnerName.AITER, Bf16ExpertWeights, AiterBf16Weights),
    Acceptance(RunnerName.AITER, Fp16ExpertWeights, AiterFp16Weights),
    Acceptance(RunnerName.AITER, Fp8TensorExpertWeights, AiterFp8TensorWeights),
    Acceptance(RunnerName.AITER, Fp8TensorExpertWeights, AiterFp8FnuzTensorWeights),
    Acceptance(RunnerName.AITER, Fp8ChannelExpertWeights, AiterFp8TokenWeights),
    Acceptance(RunnerName.AITER, Fp8ChannelExpertWeights, AiterFp8FnuzTokenWeights),
    Acceptance(RunnerName.AITER, Fp8Block128ExpertWeights, AiterFp8Block128Weights),
    Acceptance(RunnerName.AITER, Fp8Block128ExpertWeights, AiterFp8FnuzBlock128Weights),
    Acceptance(RunnerName.AITER, MxFp8ExpertWeights, AiterMxFp8Weights),
    Acceptance(RunnerName.AITER, MxFp4ExpertWeights, AiterMxFp4A4W4Weights),
    Acceptance(RunnerName.AITER, MxFp4ExpertWeights, AiterMxFp4A8W4Weights),
    Acceptance(RunnerName.AITER, MxFp4ExpertWeights, AiterMxFp4A16W4Weights),
    Acceptance(RunnerName.AITER, Int8ChannelExpertWeights, AiterInt8TokenWeights),
    Acceptance(RunnerName.ASCEND, Bf16ExpertWeights, AscendBf16Weights),
    Acceptance(RunnerName.ASCEND, Fp16ExpertWeights, AscendFp16Weights),
    Acceptance(RunnerName.ASCEND, Int8ChannelExpertWeights, AscendW8A8Weights),
    Acceptance(RunnerName.ASCEND, Int8ChannelExpertWeights, AscendW8A8Fp16Weights),
    Acceptance(RunnerName.ASCEND, ModelSlimW4A8ExpertWeights, AscendW4A8Weights),
    Acceptance(RunnerName.ASCEND, ModelSlimW4A4ExpertWeights, AscendW4A4Weights),
    Acceptance(RunnerName.ASCEND, ModelSlimW4A4PackedExpertWeights, AscendW4A4Weights),
    Acceptance(RunnerName.ASCEND, AwqExpertWeights, AscendW4A16Weights),
    Acceptance(RunnerName.ASCEND, AwqExpertWeights, AscendW4A16Fp16Weights),
    Acceptance(RunnerName.ASCEND, GptqExpertWeights, AscendW4A16Weights),
    Acceptance(RunnerName.ASCEND, GptqExpertWeights, AscendW4A16Fp16Weights),
    Acceptance(RunnerName.ASCEND, CompressedInt4ExpertWeights, AscendW4A16Weights),
    Acceptance(RunnerName.ASCEND, CompressedInt4ExpertWeights, AscendW4A16Fp16Weights),
    Acceptance(RunnerName.ASCEND, MxFp8ExpertWeights, AscendMxFp8Weights),
    Acceptance(RunnerName.ASCEND, MxFp4ExpertWeights, AscendMxFp4A8Weights),
    Acceptance(RunnerName.REFERENCE, Bf16ExpertWeights, ReferenceDenseWeights),
    Acceptance(RunnerName.REFERENCE, Fp16ExpertWeights, ReferenceDenseWeights),
    Acceptance(RunnerName.REFERENCE, Fp32ExpertWeights, ReferenceDenseWeights),
    Acceptance(RunnerName.REFERENCE, Bf16TransposedExpertWeights, ReferenceTransposedWeights),
    Acceptance(RunnerName.REFERENCE, Fp16TransposedExpertWeights, ReferenceTransposedWeights),
    Acceptance(RunnerName.REFERENCE, Fp32TransposedExpertWeights, ReferenceTransposedWeights),
    Acceptance(RunnerName.REFERENCE, Bf16UngatedExpertWeights, ReferenceUngatedWeights),
    Acceptance(RunnerName.REFERENCE, Fp16UngatedExpertWeights, ReferenceUngatedWeights),
    Acceptance(RunnerName.REFERENCE, Fp32UngatedExpertWeights, ReferenceUngatedWeights),
    Acceptance(RunnerName.REFERENCE, Fp8TensorExpertWeights, ReferenceFp8TensorWeights),
    Acceptance(RunnerName.REFERENCE, Fp8ChannelExpertWeights, ReferenceFp8ChannelWeights),
    Acceptance(RunnerName.REFERENCE, Fp8Block128ExpertWeights, ReferenceFp8Block128Weights),
    Acceptance(RunnerName.REFERENCE, MxFp8ExpertWeights, ReferenceMxFp8Weights),
    Acceptance(RunnerName.REFERENCE, MxFp4ExpertWeights, ReferenceMxFp4Weights),
    Acceptance(RunnerName.REFERENCE, NvFp4ExpertWeights, ReferenceNvFp4Weights),
    Acceptance(RunnerName.REFERENCE, Int8ChannelExpertWeights, ReferenceInt8ChannelWeights),
    Acceptance(RunnerName.REFERENCE, AwqExpertWeights, ReferenceInt4Weights),
    Acceptance(RunnerName.REFERENCE, GptqExpertWeights, ReferenceInt4Weights),
    Acceptance(RunnerName.REFERENCE, CompressedInt4ExpertWeights, ReferenceInt4Weights),
    Acceptance(RunnerName.REFERENCE, ModelSlimW4A8ExpertWeights, ReferenceW4A8Weights),
    Acceptance(RunnerName.REFERENCE, ModelSlimW4A4ExpertWeights, ReferenceW4A4Weights),
    Acceptance(RunnerName.REFERENCE, ModelSlimW4A4PackedExpertWeights, ReferenceW4A4Weights),
)


def accepted_by(runner: RunnerName) -> Iterator[Acceptance]:
    """Yield the rows of one runner."""
    return (row for row in ACCEPTANCE if row.runner is runner)

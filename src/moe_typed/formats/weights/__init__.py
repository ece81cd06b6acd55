"""Expert weights in checkpoint layout: what a file holds, before any runner has prepared it."""

from typing import TypeAlias

from .base import ExpertWeights, O_co, Shard
from .compressed import CompressedInt4ExpertWeights
from .dense import Bf16ExpertWeights, Fp16ExpertWeights, Fp32ExpertWeights
from .fp4 import MxFp4ExpertWeights, NvFp4ExpertWeights
from .int4 import AwqExpertWeights, GptqExpertWeights
from .modelslim import ModelSlimW4A4ExpertWeights, ModelSlimW4A4PackedExpertWeights, ModelSlimW4A8ExpertWeights
from .scaled import (
    Fp8Block128ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Int8ChannelExpertWeights,
    MxFp8ExpertWeights,
)
from .sharding import shard_inter
from .transposed import Bf16TransposedExpertWeights, Fp16TransposedExpertWeights, Fp32TransposedExpertWeights, TransposedExpertWeights
from .ungated import Bf16UngatedExpertWeights, Fp16UngatedExpertWeights, Fp32UngatedExpertWeights, UngatedExpertWeights

AnyExpertWeights: TypeAlias = (
    Bf16ExpertWeights[O_co]
    | Fp16ExpertWeights[O_co]
    | Fp32ExpertWeights[O_co]
    | Fp8TensorExpertWeights[O_co]
    | Fp8ChannelExpertWeights[O_co]
    | Fp8Block128ExpertWeights[O_co]
    | MxFp8ExpertWeights[O_co]
    | MxFp4ExpertWeights[O_co]
    | NvFp4ExpertWeights[O_co]
    | Int8ChannelExpertWeights[O_co]
    | AwqExpertWeights[O_co]
    | GptqExpertWeights[O_co]
)

__all__ = [
    "AnyExpertWeights",
    "AwqExpertWeights",
    "Bf16ExpertWeights",
    "Bf16TransposedExpertWeights",
    "Bf16UngatedExpertWeights",
    "CompressedInt4ExpertWeights",
    "ExpertWeights",
    "Fp8Block128ExpertWeights",
    "Fp8ChannelExpertWeights",
    "Fp8TensorExpertWeights",
    "Fp16ExpertWeights",
    "Fp16TransposedExpertWeights",
    "Fp16UngatedExpertWeights",
    "Fp32ExpertWeights",
    "Fp32TransposedExpertWeights",
    "Fp32UngatedExpertWeights",
    "GptqExpertWeights",
    "Int8ChannelExpertWeights",
    "ModelSlimW4A4ExpertWeights",
    "ModelSlimW4A4PackedExpertWeights",
    "ModelSlimW4A8ExpertWeights",
    "MxFp4ExpertWeights",
    "MxFp8ExpertWeights",
    "NvFp4ExpertWeights",
    "Shard",
    "TransposedExpertWeights",
    "UngatedExpertWeights",
    "shard_inter",
]

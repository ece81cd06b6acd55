"""Expert weights without scales."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Float16, Float32
from torch import Tensor

from ...boundary import Layout, boundary
from ..spec import Format
from .base import DenseExpertWeights, O_co, Shard

_SHARDED: Final[Mapping[str, Shard]] = {"w13": Shard(1, 1, joined=True), "w2": Shard(2, 1), "b13": Shard(1, 1, joined=True)}


@final
@boundary
class Bf16ExpertWeights(DenseExpertWeights[O_co]):
    """Weights in bfloat16."""

    format: ClassVar[Format] = Format("bf16", torch.bfloat16)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[BFloat16[Tensor, "experts 2*inter hidden"], Layout(contiguous=True)]
    w2: Annotated[BFloat16[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp16ExpertWeights(DenseExpertWeights[O_co]):
    """Weights in float16."""

    format: ClassVar[Format] = Format("fp16", torch.float16)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[Float16[Tensor, "experts 2*inter hidden"], Layout(contiguous=True)]
    w2: Annotated[Float16[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    order: type[O_co]
    b13: Float16[Tensor, "experts 2*inter"] | None = None
    b2: Float16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp32ExpertWeights(DenseExpertWeights[O_co]):
    """Weights in float32."""

    format: ClassVar[Format] = Format("fp32", torch.float32)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[Float32[Tensor, "experts 2*inter hidden"], Layout(contiguous=True)]
    w2: Annotated[Float32[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    order: type[O_co]
    b13: Float32[Tensor, "experts 2*inter"] | None = None
    b2: Float32[Tensor, "experts hidden"] | None = None

"""Expert weights without scales of experts that have no gate: ``w13`` is their one first projection, of ``inter`` rows."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Float16, Float32
from torch import Tensor

from ...boundary import Layout, boundary
from ..gate_up import Ungated
from ..spec import Format
from .base import DenseExpertWeights, Shard

_SHARDED: Final[Mapping[str, Shard]] = {"w13": Shard(1, 1), "w2": Shard(2, 1), "b13": Shard(1, 1)}


class UngatedExpertWeights(DenseExpertWeights[Ungated]):
    """The base: ``w13`` (experts, inter, hidden), ``w2`` (experts, hidden, inter), ``b13`` (experts, inter)."""


@final
@boundary
class Bf16UngatedExpertWeights(UngatedExpertWeights):
    """Weights without a gate in bfloat16."""

    format: ClassVar[Format] = Format("bf16-ungated", torch.bfloat16)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[BFloat16[Tensor, "experts inter hidden"], Layout(contiguous=True)]
    w2: Annotated[BFloat16[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    order: type[Ungated]
    b13: BFloat16[Tensor, "experts inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp16UngatedExpertWeights(UngatedExpertWeights):
    """Weights without a gate in float16."""

    format: ClassVar[Format] = Format("fp16-ungated", torch.float16)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[Float16[Tensor, "experts inter hidden"], Layout(contiguous=True)]
    w2: Annotated[Float16[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    order: type[Ungated]
    b13: Float16[Tensor, "experts inter"] | None = None
    b2: Float16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp32UngatedExpertWeights(UngatedExpertWeights):
    """Weights without a gate in float32."""

    format: ClassVar[Format] = Format("fp32-ungated", torch.float32)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[Float32[Tensor, "experts inter hidden"], Layout(contiguous=True)]
    w2: Annotated[Float32[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    order: type[Ungated]
    b13: Float32[Tensor, "experts inter"] | None = None
    b2: Float32[Tensor, "experts hidden"] | None = None

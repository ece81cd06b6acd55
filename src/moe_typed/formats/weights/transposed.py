"""Expert weights without scales whose matrices are stored with the reduction first, as gpt-oss and Aria in transformers do: rows times matrix."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Float16, Float32
from torch import Tensor
from typing_extensions import override

from ...boundary import Layout, boundary
from ..spec import Format
from .base import ExpertWeights, O_co, Shard

_SHARDED: Final[Mapping[str, Shard]] = {"w13": Shard(2, 1, joined=True), "w2": Shard(1, 1), "b13": Shard(1, 1, joined=True)}


class TransposedExpertWeights(ExpertWeights[O_co]):
    """The base: ``w13`` (experts, hidden, 2 * inter), ``w2`` (experts, inter, hidden); gate and up are columns in the order of the class."""

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return self.w13[expert].T.to(torch.float32)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return self.w2[expert].T.to(torch.float32)

    @property
    @override
    def hidden(self) -> int:
        return self.w2.shape[2]

    @property
    @override
    def inter(self) -> int:
        return self.w2.shape[1]


@final
@boundary
class Bf16TransposedExpertWeights(TransposedExpertWeights[O_co]):
    """Transposed weights in bfloat16."""

    format: ClassVar[Format] = Format("bf16-transposed", torch.bfloat16)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[BFloat16[Tensor, "experts hidden 2*inter"], Layout(contiguous=True)]
    w2: Annotated[BFloat16[Tensor, "experts inter hidden"], Layout(contiguous=True)]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp16TransposedExpertWeights(TransposedExpertWeights[O_co]):
    """Transposed weights in float16."""

    format: ClassVar[Format] = Format("fp16-transposed", torch.float16)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[Float16[Tensor, "experts hidden 2*inter"], Layout(contiguous=True)]
    w2: Annotated[Float16[Tensor, "experts inter hidden"], Layout(contiguous=True)]
    order: type[O_co]
    b13: Float16[Tensor, "experts 2*inter"] | None = None
    b2: Float16[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp32TransposedExpertWeights(TransposedExpertWeights[O_co]):
    """Transposed weights in float32."""

    format: ClassVar[Format] = Format("fp32-transposed", torch.float32)
    sharded: ClassVar[Mapping[str, Shard]] = _SHARDED
    w13: Annotated[Float32[Tensor, "experts hidden 2*inter"], Layout(contiguous=True)]
    w2: Annotated[Float32[Tensor, "experts inter hidden"], Layout(contiguous=True)]
    order: type[O_co]
    b13: Float32[Tensor, "experts 2*inter"] | None = None
    b2: Float32[Tensor, "experts hidden"] | None = None

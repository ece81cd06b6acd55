"""Expert weights in checkpoint layout: what a file holds, before any runner has prepared it.

Every class holds ``w13`` (experts, 2 * inter, hidden) and ``w2`` (experts, hidden, inter), rows contiguous, and says in its type in which order
the gate and up rows of ``w13`` lie. Biases, where a model has them, are ``b13`` (experts, 2 * inter) in the same order and ``b2`` (experts, hidden).
"""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Generic, TypeAlias, TypeVar, final

import torch
from jaxtyping import BFloat16, Float8e4m3fn, Float16, Float32
from torch import Tensor
from typing_extensions import override

from ..boundary import E8M0, Layout, boundary
from . import e8m0
from .gate_up import GateUpOrder
from .payloads import BLOCK_128, MX_GROUP
from .spec import Format, ScaleOrder, ScaleRounding, ScaleSpec

O_co = TypeVar("O_co", bound=GateUpOrder, covariant=True)


class ExpertWeights(ABC, Generic[O_co]):
    """The base of all checkpoint-layout weights."""

    format: ClassVar[Format]
    w13: Tensor
    w2: Tensor
    order: type[O_co]
    b13: Tensor | None
    b2: Tensor | None

    @abstractmethod
    def dequantize_w13(self, expert: int) -> Tensor:
        """Return one expert's first projection as float32 (2 * inter, hidden), rows in the order of the class."""

    @abstractmethod
    def dequantize_w2(self, expert: int) -> Tensor:
        """Return one expert's second projection as float32 (hidden, inter)."""

    @property
    def num_experts(self) -> int:
        """Return how many experts there are."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """Return the width of the model."""
        return self.w2.shape[1]

    @property
    def inter(self) -> int:
        """Return the width of one expert."""
        return self.w2.shape[2]


class DenseExpertWeights(ExpertWeights[O_co]):
    """The base of weights without scales."""

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return self.w13[expert].to(torch.float32)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return self.w2[expert].to(torch.float32)


class ScaledExpertWeights(ExpertWeights[O_co]):
    """The base of weights with scales: value = data * scale."""

    w13_scale: Tensor
    w2_scale: Tensor


@final
@boundary
class Bf16ExpertWeights(DenseExpertWeights[O_co]):
    """Weights in bfloat16."""

    format: ClassVar[Format] = Format("bf16", torch.bfloat16)
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
    w13: Annotated[Float32[Tensor, "experts 2*inter hidden"], Layout(contiguous=True)]
    w2: Annotated[Float32[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    order: type[O_co]
    b13: Float32[Tensor, "experts 2*inter"] | None = None
    b2: Float32[Tensor, "experts hidden"] | None = None


@final
@boundary
class Fp8Block128ExpertWeights(ScaledExpertWeights[O_co]):
    """Weights in float8_e4m3fn, one float32 scale for each block of 128 x 128 (DeepSeek-V3's ``weight_scale_inv``, which multiplies).

    Gate and up have scale blocks of their own, hence ``2*(inter//128)``: 128 must divide ``inter`` itself.
    """

    format: ClassVar[Format] = Format(
        "fp8-block128", torch.float8_e4m3fn, ScaleSpec(torch.float32, (BLOCK_128, BLOCK_128), ScaleOrder.ROW_MAJOR, ScaleRounding.NONE)
    )
    w13: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], Layout(contiguous=True)]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    w13_scale: Annotated[Float32[Tensor, "experts 2*(inter//128) hidden//128"], Layout(contiguous=True)]
    w2_scale: Annotated[Float32[Tensor, "experts hidden//128 inter//128"], Layout(contiguous=True)]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return _apply_blocks(self.w13[expert], self.w13_scale[expert], BLOCK_128, BLOCK_128)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return _apply_blocks(self.w2[expert], self.w2_scale[expert], BLOCK_128, BLOCK_128)


@final
@boundary
class MxFp8ExpertWeights(ScaledExpertWeights[O_co]):
    """Weights in float8_e4m3fn, one e8m0 scale for each 32 values along the reduction."""

    format: ClassVar[Format] = Format(
        "mxfp8", torch.float8_e4m3fn, ScaleSpec(torch.float8_e8m0fnu, (1, MX_GROUP), ScaleOrder.ROW_MAJOR, ScaleRounding.POWER_OF_TWO_UP)
    )
    w13: Annotated[Float8e4m3fn[Tensor, "experts 2*inter hidden"], Layout(contiguous=True)]
    w2: Annotated[Float8e4m3fn[Tensor, "experts hidden inter"], Layout(contiguous=True)]
    w13_scale: Annotated[E8M0[Tensor, "experts 2*inter hidden//32"], Layout(contiguous=True)]
    w2_scale: Annotated[E8M0[Tensor, "experts hidden inter//32"], Layout(contiguous=True)]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return _apply_blocks(self.w13[expert], e8m0.decode(self.w13_scale[expert]), 1, MX_GROUP)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return _apply_blocks(self.w2[expert], e8m0.decode(self.w2_scale[expert]), 1, MX_GROUP)


AnyExpertWeights: TypeAlias = (
    Bf16ExpertWeights[O_co] | Fp16ExpertWeights[O_co] | Fp32ExpertWeights[O_co] | Fp8Block128ExpertWeights[O_co] | MxFp8ExpertWeights[O_co]
)


def _apply_blocks(data: Tensor, scale: Tensor, block_rows: int, block_columns: int) -> Tensor:
    rows, columns = data.shape
    blocks = data.to(torch.float32).view(rows // block_rows, block_rows, columns // block_columns, block_columns)
    return (blocks * scale[:, None, :, None]).view(rows, columns)

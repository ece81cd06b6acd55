"""The formula of each kind of grouped product, for the rows of one group. Integers are multiplied exactly, in float64; results are rounded once."""

from abc import ABC, abstractmethod
from typing import final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed.runners.ascend.ops import DtypeArg

from .groups import Span
from .misuse import require
from .numerics import to_int8
from .weights import Scaled


@final
@attrs.frozen(eq=False, kw_only=True)
class Operands:
    """What is multiplied: x [M, K], weight [E, K, N] as they are given."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None
    per_token_scale: Tensor | None
    antiquant_scale: Tensor | None
    antiquant_offset: Tensor | None
    x_dtype: DtypeArg | None
    weight_dtype: DtypeArg | None
    scale_dtype: DtypeArg | None
    per_token_scale_dtype: DtypeArg | None

    def token_scales(self) -> Tensor:
        """Return the scales of rows [M, 1]. Raises: EmulatedRefusal unless they are fp32 [M] or [M, 1]."""
        scales, rows = self.per_token_scale, len(self.x)
        assert scales is not None
        require(
            scales.dtype == torch.float32 and tuple(scales.shape) in ((rows,), (rows, 1)),
            f"scales of rows are fp32 [{rows}], not {scales.dtype} {list(scales.shape)}",
        )
        return scales.view(rows, 1).double()


class Product(ABC):
    """A product of x [M, K] with one matrix for each group."""

    dtype: torch.dtype

    @property
    @abstractmethod
    def columns(self) -> int:
        """Return N."""

    @abstractmethod
    def of_group(self, span: Span) -> Tensor:
        """Return the rows of a group, in the product's dtype."""


@final
@attrs.frozen(eq=False)
class Plain(Product):
    """``x W + b``."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    dtype: torch.dtype

    @property
    @override
    def columns(self) -> int:
        return self.weight.shape[-1]

    @override
    def of_group(self, span: Span) -> Tensor:
        y = self.x[span.start : span.stop].float() @ self.weight[span.group]
        return (y if self.bias is None else y + self.bias[span.group].float()).to(self.dtype)


def _integer_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``x W + b`` exactly, b of integers alone."""
    y = x.double() @ weight.double()
    return y + bias.double() if bias is not None and not bias.is_floating_point() else y


def _float_bias(bias: Tensor | None) -> Tensor | float:
    """Return a bias that is added after scaling."""
    return bias.double() if bias is not None and bias.is_floating_point() else 0.0


@final
@attrs.frozen(eq=False)
class Channel(Product):
    """``(x W + b) * s``, a float bias after the scale; to int8 rounded, with an offset."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor
    offset: Tensor | None
    dtype: torch.dtype

    @property
    @override
    def columns(self) -> int:
        return self.weight.shape[-1]

    @override
    def of_group(self, span: Span) -> Tensor:
        bias = None if self.bias is None else self.bias[span.group]
        y = _integer_product(self.x[span.start : span.stop], self.weight[span.group], bias) * self.scale[span.group].double() + _float_bias(bias)
        y = y if self.offset is None else y + self.offset[span.group].double()
        return to_int8(y.round()) if self.dtype == torch.int8 else y.to(self.dtype)


@final
@attrs.frozen(eq=False)
class Token(Product):
    """``(x W + b) * s * p``, a float bias at the end."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    scale: Tensor
    tokens: Tensor
    dtype: torch.dtype

    @property
    @override
    def columns(self) -> int:
        return self.weight.shape[-1]

    @override
    def of_group(self, span: Span) -> Tensor:
        bias = None if self.bias is None else self.bias[span.group]
        y = _integer_product(self.x[span.start : span.stop], self.weight[span.group], bias)
        return (y * self.scale[span.group].double() * self.tokens[span.start : span.stop] + _float_bias(bias)).to(self.dtype)


@final
@attrs.frozen(eq=False)
class W4A8(Product):
    """``(((16 hi + lo) W) * s + b) * p`` with ``hi = floor(x / 16)`` and ``lo = (x & 15) - 8``: x is ``16 hi + lo + 8``, hence the bias."""

    x: Tensor
    weight: Scaled
    bias: Tensor
    tokens: Tensor
    dtype: torch.dtype

    @property
    @override
    def columns(self) -> int:
        return self.weight.matrices.shape[-1]

    @override
    def of_group(self, span: Span) -> Tensor:
        x = self.x[span.start : span.stop].int()
        halves = 16 * (x >> 4) + ((x & 15) - 8)
        return ((self.weight.product(halves, span.group) + self.bias[span.group].double()) * self.tokens[span.start : span.stop]).to(self.dtype)


@final
@attrs.frozen(eq=False)
class Carrier(Product):
    """``(x W) * s * p`` of int4 by int4; x is unpacked."""

    x: Tensor
    weight: Scaled
    tokens: Tensor | None
    dtype: torch.dtype

    @property
    @override
    def columns(self) -> int:
        return self.weight.matrices.shape[-1]

    @override
    def of_group(self, span: Span) -> Tensor:
        y = self.weight.product(self.x[span.start : span.stop], span.group)
        return (y if self.tokens is None else y * self.tokens[span.start : span.stop]).to(self.dtype)


@final
@attrs.frozen(eq=False)
class Antiquantized(Product):
    """``x ((W + offset) * scale) + b``."""

    plain: Plain
    dtype: torch.dtype

    @classmethod
    def of(cls, x: Tensor, matrices: Tensor, scale: Tensor, offset: Tensor, bias: Tensor | None) -> "Antiquantized":
        """Return the product of matrices [E, K, N] whose scale and offset [E, G, N] are of K / G features each."""
        length = matrices.shape[1] // scale.shape[1]
        require(length * scale.shape[1] == matrices.shape[1], f"{scale.shape[1]} groups do not divide K = {matrices.shape[1]}")
        weight = (matrices + offset.repeat_interleave(length, 1)) * scale.repeat_interleave(length, 1)
        return cls(Plain(x, weight, bias, x.dtype), x.dtype)

    @property
    @override
    def columns(self) -> int:
        return self.plain.columns

    @override
    def of_group(self, span: Span) -> Tensor:
        return self.plain.of_group(span)


@final
@attrs.frozen(eq=False)
class Microscaled(Product):
    """``x W`` of dequantised blocks."""

    x: Tensor
    weight: Tensor
    dtype: torch.dtype

    @property
    @override
    def columns(self) -> int:
        return self.weight.shape[-1]

    @override
    def of_group(self, span: Span) -> Tensor:
        return (self.x[span.start : span.stop] @ self.weight[span.group]).to(self.dtype)

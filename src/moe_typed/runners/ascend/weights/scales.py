"""Scales and offsets of weights as the NPU's products read them. Several encodings share a dtype and a shape: each is a class, with its one maker."""

from typing import Annotated, Final, final

import torch
from jaxtyping import BFloat16, Float32, Int64
from torch import Tensor

from ....boundary import E8M0, Floating, Layout, boundary, value_error
from ....formats.payloads.ascend import PAIR
from ..ops import AscendOps

_ROW_MAJOR: Final = Layout(contiguous=True)
_LOW_HALF: Final = 0xFFFFFFFF
_MARK: Final = 1 << 46  # set by npu_trans_quant_param in every entry
_MIDDLE: Final = 8  # codes 0 to 15 are given to the product as code - 8
_OFFSET_LARGEST: Final = 8  # 8 - zero for zeros 0 to 16: GPTQ's first version reaches 16


@final
@boundary
class Bf16ChannelScale:
    """A scale for each output column, of products that give bf16. ``scale``: bf16 (experts, outer)."""

    scale: Annotated[BFloat16[Tensor, "experts outer"], _ROW_MAJOR]


@final
@boundary
class Fp32ChannelScale:
    """A scale for each output column, of products that give fp16. ``scale``: float32 (experts, outer)."""

    scale: Annotated[Float32[Tensor, "experts outer"], _ROW_MAJOR]


@final
@boundary
class CarriedScale:
    """The bits of a float32 for each output column in the low half of an int64, of W4A8. ``scale``: int64 (experts, 1, outer)."""

    scale: Annotated[Int64[Tensor, "experts 1 outer"], _ROW_MAJOR]

    def check_values(self) -> None:
        """Raise BoundaryError for entries that carry more than float32 bits."""
        _check_bits(self, self.scale)


@final
@boundary
class FlatCarriedScale:
    """The same without the middle dim, of W4A4. ``scale``: int64 (experts, outer)."""

    scale: Annotated[Int64[Tensor, "experts outer"], _ROW_MAJOR]

    def check_values(self) -> None:
        """Raise BoundaryError for entries that carry more than float32 bits."""
        _check_bits(self, self.scale)


@final
@boundary
class QuantParam:
    """What ``npu_trans_quant_param`` makes: the upper 19 bits of a float32, and bit 46; of products that give int8.

    ``param``: int64 (experts, outer).
    """

    param: Annotated[Int64[Tensor, "experts outer"], _ROW_MAJOR]

    def check_values(self) -> None:
        """Raise BoundaryError for entries without the mark."""
        if self.param.numel() and not bool((self.param & _MARK).all()):
            raise value_error(self, "param", "lacks bit 46, which npu_trans_quant_param sets", "the bits of a float32 alone are a FlatCarriedScale")


@final
@boundary
class PairScale:
    """Two e8m0 scales, of 32 rows of the reduction each, for every output column; strides as of the weight.

    ``scale``: (experts, inner / 64, outer, 2).
    """

    scale: E8M0[Tensor, "experts pairs outer 2"]


@final
@boundary
class AddOffset:
    """What the product adds to a weight before it scales: ``(w + offset) * scale``. ``offset``: (experts, groups, outer), the rows' dtype.

    Zero points are subtracted, and weights are code - 8: (code - 8) + (8 - zero) = code - zero. Each maker below ends at 8 - zero.
    """

    offset: Annotated[Floating[Tensor, "experts groups outer"], _ROW_MAJOR]

    def check_values(self) -> None:
        """Raise BoundaryError for what no zero point of four bits gives."""
        if bool((self.offset.abs() > _OFFSET_LARGEST).any()):
            raise value_error(self, "offset", f"holds something outside {-_OFFSET_LARGEST}..{_OFFSET_LARGEST}")

    @classmethod
    def of_zeros(cls, zeros: Tensor, dtype: torch.dtype) -> "AddOffset":
        """Return the offset of zero points 0 to 16 that are subtracted from codes 0 to 15: of AWQ as they stand, of GPTQ after its stored one."""
        return cls((_MIDDLE - zeros.to(torch.float32)).to(dtype).contiguous())

    @classmethod
    def none(cls, scale: Tensor) -> "AddOffset":
        """Return the offset of symmetric weights: zeros, which the product demands all the same."""
        return cls(torch.zeros_like(scale))


def _check_bits(value: CarriedScale | FlatCarriedScale, scale: Tensor) -> None:
    if bool(((scale < 0) | (scale > _LOW_HALF)).any()):
        hint = "npu_trans_quant_param makes a QuantParam, which these products read wrongly"
        raise value_error(value, "scale", "carries more than the 32 bits of a float32", hint)


def _bits(scale: Tensor) -> Tensor:
    """Return the bits of float32 values, zero-extended to int64 as SGLang and vllm-ascend hand them to the products."""
    return scale.to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & _LOW_HALF


def carry(scale: Tensor) -> CarriedScale:
    """Return float32 scales (experts, outer) as W4A8 reads them."""
    return CarriedScale(_bits(scale).unsqueeze(1).contiguous())


def carry_flat(scale: Tensor) -> FlatCarriedScale:
    """Return float32 scales (experts, outer) as W4A4 reads them."""
    return FlatCarriedScale(_bits(scale))


def quant_param(ops: AscendOps, scale: Tensor) -> QuantParam:
    """Return float32 scales (experts, outer) as per-channel products that give int8 read them."""
    return QuantParam(ops.npu_trans_quant_param(scale.to(torch.float32)))


def pair(scale: Tensor) -> PairScale:
    """Return e8m0 scales (experts, outer, inner / 32) in pairs, as a transposed view: a copy would lose the strides that the product looks at."""
    experts, outer, groups = scale.shape
    return PairScale(scale.view(experts, outer, groups // PAIR, PAIR).transpose(1, 2))

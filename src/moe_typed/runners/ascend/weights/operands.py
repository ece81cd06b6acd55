"""The matrices of one projection as the NPU's products read them, each with the scales that belong to it.

``inner`` is the reduction and ``outer`` the columns of the result: (experts, inner, outer). A dense weight lies as in the checkpoint, and is given as
a transposed view; the products look at strides.
"""

from abc import ABC, abstractmethod
from typing import Annotated, Final, final

import torch
from jaxtyping import BFloat16, Float8e4m3fn, Float16, Float32, Int8, Int32, UInt8
from torch import Tensor
from typing_extensions import override

from ....boundary import Floating, Layout, boundary, value_error
from ....formats import Bf16Rows, Fp16Rows
from ....formats.int4 import PER_WORD
from ..ops import AclFormat
from .scales import AddOffset, Bf16ChannelScale, CarriedScale, FlatCarriedScale, Fp32ChannelScale, PairScale

_ROW_MAJOR: Final = Layout(contiguous=True)
_PER_BYTE: Final = 2  # values of e2m1


class Operand(ABC):
    """The base. ``layout``: the physical format that the weight is in, as far as the host knows."""

    layout: AclFormat

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int, int]:
        """Return (experts, inner, outer)."""

    @property
    def gives(self) -> tuple[type[Bf16Rows | Fp16Rows], ...]:
        """Return the classes of rows that a product with these weights can make."""
        return (Bf16Rows, Fp16Rows)


class WholeOperand(Operand):
    """The base of weights with one value an element."""

    weight: Tensor

    @property
    @override
    def sizes(self) -> tuple[int, int, int]:
        experts, inner, outer = self.weight.shape
        return experts, inner, outer


class PackedOperand(Operand):
    """The base of int4 weights, eight neighbouring columns an int32."""

    words: Tensor

    @property
    @override
    def sizes(self) -> tuple[int, int, int]:
        experts, inner, words = self.words.shape
        return experts, inner, PER_WORD * words


@final
@boundary
class Bf16Operand(WholeOperand):
    """Bf16 weights. ``bias``: float32, as the product demands beside bf16 rows."""

    weight: BFloat16[Tensor, "experts inner outer"]
    layout: AclFormat
    bias: Annotated[Float32[Tensor, "experts outer"], _ROW_MAJOR] | None = None

    @property
    @override
    def gives(self) -> tuple[type[Bf16Rows]]:
        return (Bf16Rows,)


@final
@boundary
class Fp16Operand(WholeOperand):
    """Fp16 weights with an fp16 bias."""

    weight: Float16[Tensor, "experts inner outer"]
    layout: AclFormat
    bias: Annotated[Float16[Tensor, "experts outer"], _ROW_MAJOR] | None = None

    @property
    @override
    def gives(self) -> tuple[type[Fp16Rows]]:
        return (Fp16Rows,)


@final
@boundary
class W8A8Operand(WholeOperand):
    """Int8 weights for int8 rows, whose products give bf16, as bf16 scales do."""

    weight: Annotated[Int8[Tensor, "experts inner outer"], _ROW_MAJOR]
    scale: Bf16ChannelScale
    layout: AclFormat

    @property
    @override
    def gives(self) -> tuple[type[Bf16Rows]]:
        return (Bf16Rows,)


@final
@boundary
class W8A8Fp16Operand(WholeOperand):
    """Int8 weights for int8 rows, whose products give fp16, as float32 scales do."""

    weight: Annotated[Int8[Tensor, "experts inner outer"], _ROW_MAJOR]
    scale: Fp32ChannelScale
    layout: AclFormat

    @property
    @override
    def gives(self) -> tuple[type[Fp16Rows]]:
        return (Fp16Rows,)


@final
@boundary
class W4A8Operand(PackedOperand):
    """Int4 weights for int8 rows.

    ``correction``: 8 * sum over inner of weight * scale. The product takes a row as 16 * high + low with high = floor(x / 16) and low = x mod 16 - 8,
    so that x = 16 * high + low + 8, and adds this as a bias before it scales by row (CANN ops-transformer, gmm/grouped_matmul). Without it the result
    is wrong, and nothing raises.
    """

    words: Annotated[Int32[Tensor, "experts inner outer//8"], _ROW_MAJOR]
    scale: CarriedScale
    correction: Annotated[Float32[Tensor, "experts outer"], _ROW_MAJOR]
    layout: AclFormat


@final
@boundary
class W4A4Operand(PackedOperand):
    """Int4 weights for int4 rows."""

    words: Annotated[Int32[Tensor, "experts inner outer//8"], _ROW_MAJOR]
    scale: FlatCarriedScale
    layout: AclFormat


@final
@boundary
class W4A16Operand(PackedOperand):
    """Int4 weights for rows of half precision, whose dtype scales and offsets have. ``bias``: float32 beside bf16, fp16 beside fp16."""

    words: Annotated[Int32[Tensor, "experts inner outer//8"], _ROW_MAJOR]
    scale: Annotated[Floating[Tensor, "experts groups outer"], _ROW_MAJOR]
    offset: AddOffset
    layout: AclFormat
    bias: Annotated[Floating[Tensor, "experts outer"], _ROW_MAJOR] | None = None

    @property
    @override
    def gives(self) -> tuple[type[Bf16Rows | Fp16Rows]]:
        return (Bf16Rows if self.scale.dtype == torch.bfloat16 else Fp16Rows,)

    def check_values(self) -> None:
        """Raise BoundaryError for groups that do not divide the reduction, an offset in another dtype than the scale's, and a bias not as above."""
        inner, groups, dtype = self.words.shape[1], self.scale.shape[1], self.scale.dtype
        if not groups or inner % groups:
            raise value_error(self, "scale", f"has {groups} groups, which do not divide {inner} rows of the reduction")
        if self.offset.offset.dtype != dtype:
            raise value_error(self, "offset", f"is {self.offset.offset.dtype}, but the scale {dtype}", "both have the dtype of the rows")
        wanted = torch.float32 if dtype == torch.bfloat16 else dtype
        if self.bias is not None and self.bias.dtype != wanted:
            raise value_error(self, "bias", f"is {self.bias.dtype}, but beside {dtype} rows it is {wanted}")


@final
@boundary
class MxFp4Operand(Operand):
    """E2m1 weights for mxfp8 or mxfp4 rows, two values a byte along the reduction, and their scales, both transposed views."""

    weight: UInt8[Tensor, "experts 32*pairs outer"]
    scale: PairScale
    layout: AclFormat

    @property
    @override
    def sizes(self) -> tuple[int, int, int]:
        experts, stored, outer = self.weight.shape
        return experts, _PER_BYTE * stored, outer


@final
@boundary
class MxFp8Operand(WholeOperand):
    """E4m3 weights for mxfp8 rows, and their scales, both transposed views."""

    weight: Float8e4m3fn[Tensor, "experts 64*pairs outer"]
    scale: PairScale
    layout: AclFormat

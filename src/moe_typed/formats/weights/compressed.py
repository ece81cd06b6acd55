"""Expert weights as compressed-tensors packs them: int4 along the reduction, codes 0 to 15 that stand for -8 to 7 (``pack-quantized``)."""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor
from typing_extensions import override

from ...boundary import Dim, Floating, Layout, boundary
from ..int4 import PER_WORD, unpack_words
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import O_co, ScaledExpertWeights, Shard

_ROW_MAJOR: Final = Layout(contiguous=True)
_GROUPED: Final = ScaleSpec(torch.bfloat16, (1, 128), ScaleOrder.ROW_MAJOR, ScaleRounding.TO_DTYPE)  # the group is the object's own
_CODES: Final = 0x88888888 - (1 << 32)  # as int32: flips the top bit of every nibble, which turns code + 8 into two's complement


@final
@boundary
class CompressedInt4ExpertWeights(ScaledExpertWeights[O_co]):
    """Int4 weights of compressed-tensors, symmetric: ``w13`` (experts, 2 * inter, hidden / 8), ``w2`` (experts, hidden, inter / 8).

    value = (code - 8) * scale; scales (experts, rows, groups). Source: compressed-tensors' ``pack_to_int32``.
    """

    format: ClassVar[Format] = Format("int4-compressed", torch.int32, _GROUPED, per_element=PER_WORD)
    sharded: ClassVar[Mapping[str, Shard]] = {
        "w13": Shard(1, 1, joined=True),
        "w2": Shard(2, PER_WORD),
        "w13_scale": Shard(1, 1, joined=True),
        "w2_scale": Shard(2, 0),
        "b13": Shard(1, 1, joined=True),
    }
    w13: Annotated[Int32[Tensor, "experts 16*words hidden//8"], _ROW_MAJOR]
    w2: Annotated[Int32[Tensor, "experts hidden words"], _ROW_MAJOR]
    w13_scale: Annotated[Floating[Tensor, "experts 16*words hidden//group"], _ROW_MAJOR]
    w2_scale: Annotated[Floating[Tensor, "experts hidden 8*words//group"], _ROW_MAJOR]
    order: type[O_co]
    group: Annotated[int, Dim("group")]
    b13: BFloat16[Tensor, "experts 16*words"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @property
    @override
    def shards(self) -> Mapping[str, Shard]:
        return {name: Shard(shard.dim, shard.unit or self.group, shard.joined) for name, shard in self.sharded.items()}

    @property
    @override
    def inter(self) -> int:
        return PER_WORD * self.w2.shape[2]

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return self._values(self.w13[expert], self.w13_scale[expert])

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return self._values(self.w2[expert], self.w2_scale[expert])

    def _values(self, words: Tensor, scale: Tensor) -> Tensor:
        return decode_offset(words).to(torch.float32) * scale.to(torch.float32).repeat_interleave(self.group, 1)


def decode_offset(words: Tensor) -> Tensor:
    """Return the values -8 to 7 of int32 words (..., n) whose codes are values + 8, as int32 (..., 8 * n)."""
    return unpack_words(words ^ _CODES)

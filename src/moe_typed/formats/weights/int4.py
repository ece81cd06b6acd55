"""Expert weights in int4 with scales for groups along the reduction, eight values an int32, in the two orders that checkpoints have.

Both hold a matrix transposed, (in, out). AWQ packs eight neighbouring *columns* into a word, in the order 0, 2, 4, 6, 1, 3, 5, 7 from its low
end; GPTQ packs eight neighbouring *rows*, ascending. value = (code - zero) * scale; without zeros the zero is 8. Sources: the packing of the
published libraries AutoAWQ and AutoGPTQ.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Int32
from torch import Tensor
from typing_extensions import override

from ...boundary import Dim, Floating, Layout, boundary
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import O_co, ScaledExpertWeights, Shard

_ROW_MAJOR: Final = Layout(contiguous=True)
_PER_WORD: Final = 8
_GROUP: Final = 0  # in a Shard: the group of the object
_MIDDLE: Final = 8.0  # the zero of symmetric weights: codes 0 to 15 stand for -8 to 7
_AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # which column of eight the nibbles of a word hold, from the low end
_ASCENDING: Final = tuple(range(_PER_WORD))
# The group is the object's own, so the fact on the class is the usual one.
_GROUPED: Final = ScaleSpec(torch.float16, (1, 128), ScaleOrder.ROW_MAJOR, ScaleRounding.TO_DTYPE)


def _nibbles(words: Tensor, dim: int, places: tuple[int, ...]) -> Tensor:
    """Return the codes 0 to 15 of int32 words as float32, the words' eight places spread along ``dim``."""
    shifts = torch.tensor([4 * places.index(place) for place in range(_PER_WORD)], dtype=torch.int32, device=words.device)
    codes = (words.unsqueeze(-1) >> shifts) & 0xF
    return codes.movedim(-1, dim + 1).flatten(dim, dim + 1).to(torch.float32)


class Int4ExpertWeights(ScaledExpertWeights[O_co]):
    """The base of weights in int4 groups. ``w13_zero``, ``w2_zero``: None for symmetric weights."""

    group: int
    w13_zero: Tensor | None
    w2_zero: Tensor | None

    @property
    @override
    def shards(self) -> Mapping[str, Shard]:
        return {name: Shard(shard.dim, shard.unit or self.group, shard.joined) for name, shard in self.sharded.items()}

    @abstractmethod
    def _codes(self, words: Tensor) -> Tensor:
        """Return the codes 0 to 15 of one packed matrix as float32 (in, out)."""

    @abstractmethod
    def _zeros(self, words: Tensor) -> Tensor:
        """Return the zeros of one packed matrix, which are subtracted from codes, as float32 (groups, out)."""

    def codes_w13(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Return one expert's first projection as codes 0 to 15 (hidden, 2 * inter), and its zeros (groups, 2 * inter), both float32."""
        return self._codes(self.w13[expert]), None if self.w13_zero is None else self._zeros(self.w13_zero[expert])

    def codes_w2(self, expert: int) -> tuple[Tensor, Tensor | None]:
        """Return one expert's second projection as codes 0 to 15 (inter, hidden), and its zeros (groups, hidden), both float32."""
        return self._codes(self.w2[expert]), None if self.w2_zero is None else self._zeros(self.w2_zero[expert])

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return self._values(self.w13_scale[expert], *self.codes_w13(expert))

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return self._values(self.w2_scale[expert], *self.codes_w2(expert))

    def _values(self, scale: Tensor, codes: Tensor, zero: Tensor | None) -> Tensor:
        """Return (out, in) as float32 from scales (groups, out), codes (in, out) and zeros."""
        zeros = torch.full_like(scale, _MIDDLE, dtype=torch.float32) if zero is None else zero
        spread = (tensor.to(torch.float32).repeat_interleave(self.group, 0) for tensor in (zeros, scale))
        zeros, scales = spread
        return ((codes - zeros) * scales).T.contiguous()


@final
@boundary
class AwqExpertWeights(Int4ExpertWeights[O_co]):
    """Int4 weights in AWQ's order: ``w13`` (experts, hidden, 2 * inter / 8), ``w2`` (experts, inter, hidden / 8), words of eight columns."""

    format: ClassVar[Format] = Format("int4-awq", torch.int32, _GROUPED, per_element=_PER_WORD)
    sharded: ClassVar[Mapping[str, Shard]] = {
        "w13": Shard(2, _PER_WORD, joined=True),
        "w2": Shard(1, 1),
        "w13_scale": Shard(2, 1, joined=True),
        "w2_scale": Shard(1, _GROUP),
        "w13_zero": Shard(2, _PER_WORD, joined=True),
        "w2_zero": Shard(1, _GROUP),
        "b13": Shard(1, 1, joined=True),
    }
    w13: Annotated[Int32[Tensor, "experts hidden 2*inter//8"], _ROW_MAJOR]
    w2: Annotated[Int32[Tensor, "experts inter hidden//8"], _ROW_MAJOR]
    w13_scale: Annotated[Floating[Tensor, "experts hidden//group 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Floating[Tensor, "experts inter//group hidden"], _ROW_MAJOR]
    order: type[O_co]
    group: Annotated[int, Dim("group")]
    w13_zero: Annotated[Int32[Tensor, "experts hidden//group 2*inter//8"], _ROW_MAJOR] | None = None
    w2_zero: Annotated[Int32[Tensor, "experts inter//group hidden//8"], _ROW_MAJOR] | None = None
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @property
    @override
    def hidden(self) -> int:
        return self.w13.shape[1]

    @property
    @override
    def inter(self) -> int:
        return self.w2.shape[1]

    @override
    def _codes(self, words: Tensor) -> Tensor:
        return _nibbles(words, 1, _AWQ_COLUMNS)

    @override
    def _zeros(self, words: Tensor) -> Tensor:
        return _nibbles(words, 1, _AWQ_COLUMNS)


@final
@boundary
class GptqExpertWeights(Int4ExpertWeights[O_co]):
    """Int4 weights in GPTQ's order: ``w13`` (experts, hidden / 8, 2 * inter), ``w2`` (experts, inter / 8, hidden), words of eight rows.

    Zeros are packed by columns, and stored less one, as the first version of the format does. Weights whose groups are not runs of rows
    (``desc_act``) are not of this class.
    """

    format: ClassVar[Format] = Format("int4-gptq", torch.int32, _GROUPED, per_element=_PER_WORD)
    sharded: ClassVar[Mapping[str, Shard]] = {
        "w13": Shard(2, 1, joined=True),
        "w2": Shard(1, _PER_WORD),
        "w13_scale": Shard(2, 1, joined=True),
        "w2_scale": Shard(1, _GROUP),
        "w13_zero": Shard(2, _PER_WORD, joined=True),
        "w2_zero": Shard(1, _GROUP),
        "b13": Shard(1, 1, joined=True),
    }
    w13: Annotated[Int32[Tensor, "experts hidden//8 16*words"], _ROW_MAJOR]
    w2: Annotated[Int32[Tensor, "experts words hidden"], _ROW_MAJOR]
    w13_scale: Annotated[Floating[Tensor, "experts hidden//group 16*words"], _ROW_MAJOR]
    w2_scale: Annotated[Floating[Tensor, "experts 8*words//group hidden"], _ROW_MAJOR]
    order: type[O_co]
    group: Annotated[int, Dim("group")]
    w13_zero: Annotated[Int32[Tensor, "experts hidden//group 2*words"], _ROW_MAJOR] | None = None
    w2_zero: Annotated[Int32[Tensor, "experts 8*words//group hidden//8"], _ROW_MAJOR] | None = None
    b13: BFloat16[Tensor, "experts 16*words"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    @property
    @override
    def hidden(self) -> int:
        return self.w2.shape[2]

    @property
    @override
    def inter(self) -> int:
        return _PER_WORD * self.w2.shape[1]

    @override
    def _codes(self, words: Tensor) -> Tensor:
        return _nibbles(words, 0, _ASCENDING)

    @override
    def _zeros(self, words: Tensor) -> Tensor:
        return _nibbles(words, 1, _ASCENDING) + 1

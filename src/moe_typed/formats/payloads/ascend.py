"""Rows as the operators of the Ascend NPU take them, where no other backend has the same.

Its int4 rows are eight to an int32. Its e8m0 scales lie in pairs, (rows, hidden // 64, 2): the same bytes as ``MxFp8Rows`` has in two dims, and the
grouped matmuls refuse those. Sources: CANN ops-transformer (gmm), torch_npu's meta registrations.
"""

from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import Float8e4m3fn, Float32, Int32
from torch import Tensor
from typing_extensions import override

from ...boundary import E8M0, Float4e2m1x2, Layout, boundary
from .. import e8m0
from ..int4 import PER_WORD, unpack_words
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import MX_GROUP, ScaledRows, apply_groups, check_e8m0, check_finite, e2m1_values, live_index

PAIR: Final = 2
"""How many e8m0 scales the grouped matmuls read at a time: (rows, hidden // 64, 2)."""

PAIR_CHANNELS: Final = PAIR * MX_GROUP
"""How many channels a pair of scales is of."""

_TOKEN: Final = ScaleSpec(torch.float32, (1, 0), ScaleOrder.PER_ROW, ScaleRounding.NONE)
_PAIRS: Final = ScaleSpec(torch.float8_e8m0fnu, (1, MX_GROUP), ScaleOrder.ROW_MAJOR_PAIRS, ScaleRounding.POWER_OF_TWO)
_ROW_MAJOR: Final = Layout(contiguous=True)


@final
@boundary
class Int4TokenRows(ScaledRows):
    """Rows in int4, eight values an int32, the first in the lowest bits, with a float32 scale each."""

    format: ClassVar[Format] = Format("int4-token", torch.int32, _TOKEN, per_element=PER_WORD)
    data: Annotated[Int32[Tensor, "rows words"], _ROW_MAJOR]
    scale: Annotated[Float32[Tensor, " rows"], _ROW_MAJOR]

    @override
    def dequantize(self) -> Tensor:
        return unpack_words(self.data).to(torch.float32) * self.scale.unsqueeze(1)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_finite(self, self.scale[live_index(live)])


@final
@boundary
class MxFp8PairRows(ScaledRows):
    """Rows in float8_e4m3fn, one e8m0 scale for each 32 channels of a row, scales in pairs."""

    format: ClassVar[Format] = Format("mxfp8-pairs", torch.float8_e4m3fn, _PAIRS)
    data: Annotated[Float8e4m3fn[Tensor, "rows hidden"], _ROW_MAJOR]
    scale: Annotated[E8M0[Tensor, "rows hidden//64 2"], _ROW_MAJOR]

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(self.data, e8m0.decode(self.scale).flatten(1), MX_GROUP)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_e8m0(self, self.scale[live_index(live)])


@final
@boundary
class MxFp4PairRows(ScaledRows):
    """Rows in e2m1, two values a byte, the low nibble first; one e8m0 scale for each 32 channels of a row, scales in pairs."""

    format: ClassVar[Format] = Format("mxfp4-pairs", torch.float4_e2m1fn_x2, _PAIRS, per_element=2)
    data: Annotated[Float4e2m1x2[Tensor, "rows bytes"], _ROW_MAJOR]
    scale: Annotated[E8M0[Tensor, "rows bytes//32 2"], _ROW_MAJOR]

    @override
    def dequantize(self) -> Tensor:
        return apply_groups(e2m1_values(self.data), e8m0.decode(self.scale).flatten(1), MX_GROUP)

    @override
    def check_live(self, live: int | Tensor) -> None:
        check_e8m0(self, self.scale[live_index(live)])

"""Expert weights as ModelSlim writes them for the Ascend NPU: int4 with a scale a row, whole bytes or two values a byte.

Two values a byte lie along the *rows*: byte row r holds row 2 * r in its low half and row 2 * r + 1 in its high half. value = code * scale, codes -8
to 7. The files' offsets are not read by any kernel, and their scales have a last dim of 1: (experts, rows, 1). Source: the schemes of SGLang 0.5.23
(layers/quantization/modelslim) and of vllm-ascend.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Final, final

import torch
from jaxtyping import BFloat16, Float32, Int8
from torch import Tensor
from typing_extensions import override

from ...boundary import Layout, boundary, value_error
from ..int4 import unpack_bytes
from ..spec import Format, ScaleOrder, ScaleRounding, ScaleSpec
from .base import O_co, Shard
from .scaled import ChannelScaledExpertWeights

_ROW_MAJOR: Final = Layout(contiguous=True)
_CHANNEL: Final = ScaleSpec(torch.float32, (1, 0), ScaleOrder.PER_ROW, ScaleRounding.NONE)
_PER_BYTE: Final = 2
_LARGEST: Final = 7
_CORRECTION: Final = 8  # x = 16 * high + low + 8: the NPU's product lacks 8 * sum of code * scale (CANN ops-transformer, gmm/grouped_matmul)
_CORRECTION_ERROR: Final = 2**-8  # of 8 * sum of |code| * scale: room for a correction of scales that were in bf16, which rounds by 2^-9
_SCALES: Final[Mapping[str, Shard]] = {"w13_scale": Shard(1, 1, joined=True), "b13": Shard(1, 1, joined=True)}
_PACKED: Final[Mapping[str, Shard]] = {"w13": Shard(1, _PER_BYTE, joined=True), "w2": Shard(2, 1), **_SCALES}


class BytePackedExpertWeights(ChannelScaledExpertWeights[O_co]):
    """The base of weights with two rows a byte: ``w13`` (experts, inter, hidden), ``w2`` (experts, hidden // 2, inter)."""

    @property
    @override
    def hidden(self) -> int:
        return _PER_BYTE * self.w2.shape[1]

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return unpack_bytes(self.w13[expert], 0).to(torch.float32) * self.w13_scale[expert].unsqueeze(1)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return unpack_bytes(self.w2[expert], 0).to(torch.float32) * self.w2_scale[expert].unsqueeze(1)


@final
@boundary
class ModelSlimW4A8ExpertWeights(BytePackedExpertWeights[O_co]):
    """Int4 weights for int8 rows.

    ``w13_correction`` (experts, 2 * inter) and ``w2_correction`` (experts, hidden, parts), where a checkpoint has them, are 8 * sum of code * scale
    over the reduction, which the NPU's product needs (it takes rows as 16 * high + low + 8); that of w2 in parts, one for each 1 / parts of the
    reduction, so that a rank can add up its own.
    """

    format: ClassVar[Format] = Format("int4-channel-w4a8", torch.int8, _CHANNEL, per_element=_PER_BYTE)
    sharded: ClassVar[Mapping[str, Shard]] = {**_PACKED, "w13_correction": Shard(1, 1, joined=True)}
    w13: Annotated[Int8[Tensor, "experts inter hidden"], _ROW_MAJOR]
    w2: Annotated[Int8[Tensor, "experts hidden//2 inter"], _ROW_MAJOR]
    w13_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]
    order: type[O_co]
    w13_correction: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR] | None = None
    w2_correction: Annotated[Float32[Tensor, "experts hidden parts"], _ROW_MAJOR] | None = None
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    def check_values(self) -> None:
        """Raise BoundaryError for corrections other than 8 * sum of code * scale, with which the product is wrong and nothing else raises."""
        given2 = None if self.w2_correction is None else self.w2_correction.sum(2)
        for name, weight, scale, given in (
            ("w13_correction", self.w13, self.w13_scale, self.w13_correction),
            ("w2_correction", self.w2, self.w2_scale, given2),
        ):
            if given is None:
                continue
            for expert, packed in enumerate(weight):
                codes = unpack_bytes(packed, 0).to(torch.float32)
                wanted, most = (_CORRECTION * part.sum(1) * scale[expert] for part in (codes, codes.abs()))
                if bool(((given[expert] - wanted).abs() > _CORRECTION_ERROR * most.abs()).any()):
                    hint = "leave it out, and it is computed where weights are prepared"
                    raise value_error(self, name, f"is not {_CORRECTION} * sum of code * scale for expert {expert}", hint)

    @property
    @override
    def shards(self) -> Mapping[str, Shard]:
        if self.w2_correction is None:
            return self.sharded
        return {**self.sharded, "w2_correction": Shard(2, max(1, self.inter // self.w2_correction.shape[2]))}


@final
@boundary
class ModelSlimW4A4PackedExpertWeights(BytePackedExpertWeights[O_co]):
    """Int4 weights for int4 rows, in the newer of ModelSlim's packings: two rows a byte."""

    format: ClassVar[Format] = Format("int4-channel-w4a4-packed", torch.int8, _CHANNEL, per_element=_PER_BYTE)
    sharded: ClassVar[Mapping[str, Shard]] = _PACKED
    w13: Annotated[Int8[Tensor, "experts inter hidden"], _ROW_MAJOR]
    w2: Annotated[Int8[Tensor, "experts hidden//2 inter"], _ROW_MAJOR]
    w13_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None


@final
@boundary
class ModelSlimW4A4ExpertWeights(ChannelScaledExpertWeights[O_co]):
    """Int4 weights for int4 rows, in the older of ModelSlim's packings: a value -8 to 7 a byte."""

    format: ClassVar[Format] = Format("int4-channel-w4a4", torch.int8, _CHANNEL)
    sharded: ClassVar[Mapping[str, Shard]] = {"w13": Shard(1, 1, joined=True), "w2": Shard(2, 1), **_SCALES}
    w13: Annotated[Int8[Tensor, "experts 2*inter hidden"], _ROW_MAJOR]
    w2: Annotated[Int8[Tensor, "experts hidden inter"], _ROW_MAJOR]
    w13_scale: Annotated[Float32[Tensor, "experts 2*inter"], _ROW_MAJOR]
    w2_scale: Annotated[Float32[Tensor, "experts hidden"], _ROW_MAJOR]
    order: type[O_co]
    b13: BFloat16[Tensor, "experts 2*inter"] | None = None
    b2: BFloat16[Tensor, "experts hidden"] | None = None

    def check_values(self) -> None:
        """Raise BoundaryError for values beyond four bits: such as two values a byte."""
        for name, weight in (("w13", self.w13), ("w2", self.w2)):
            if weight.numel() and bool(((weight < -_LARGEST - 1) | (weight > _LARGEST)).any()):
                hint = "two rows a byte are ModelSlimW4A4PackedExpertWeights"
                raise value_error(self, name, f"holds a value outside {-_LARGEST - 1}..{_LARGEST}", hint)

"""Expert weights in every class from random codes, and what they mean in float64: own tables, own packing, own orders."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from moe_typed import GateUp, Interleaved, UpGate, debug
from moe_typed.formats import (
    AwqExpertWeights,
    Bf16ExpertWeights,
    CompressedInt4ExpertWeights,
    ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp16ExpertWeights,
    Fp32ExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    NvFp4ExpertWeights,
)
from tests.formats.support import E8, FN, FP4, e8m0_value, table
from tests.ops.support import ints

ORDERS: Final = (GateUp, UpGate, Interleaved)
EXPERTS: Final = 2
INT4_GROUP: Final = 8
AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble, from the low end, in which AWQ keeps each of eight columns
ASCENDING: Final = tuple(range(8))

Weights = ExpertWeights[GateUpOrder]


def gate_rows(order: type[GateUpOrder], inter: int) -> Tensor:
    """Return which rows of w13 are gate's, in order."""
    first: Mapping[type[GateUpOrder], Tensor] = {
        GateUp: torch.arange(inter),
        UpGate: torch.arange(inter) + inter,
        Interleaved: 2 * torch.arange(inter),
    }
    return first[order]


def up_rows(order: type[GateUpOrder], inter: int) -> Tensor:
    """Return which rows of w13 are up's, in order."""
    rows: Mapping[type[GateUpOrder], Tensor] = {
        GateUp: torch.arange(inter) + inter,
        UpGate: torch.arange(inter),
        Interleaved: 2 * torch.arange(inter) + 1,
    }
    return rows[order]


def pack_words(codes: Tensor, dim: int, places: tuple[int, ...]) -> Tensor:
    """Return codes 0 to 15 as int32 words of eight along a dim; places[i] is the nibble of the i-th of eight."""
    moved = codes.movedim(dim, -1)
    flat = [ints(eight) for eight in moved.reshape(-1, 8).unbind()]
    words = [sum(code << 4 * place for code, place in zip(eight, places, strict=True)) for eight in flat]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    return torch.tensor(signed, dtype=torch.int32).view(*moved.shape[:-1], -1).movedim(-1, dim).contiguous()


@dataclass(frozen=True)
class Made:
    """Weights, and their matrices in float64: w13 (experts, 2 * inter, hidden), w2 (experts, hidden, inter)."""

    weights: Weights
    w13: Tensor
    w2: Tensor


Make = Callable[["Draw", type[GateUpOrder], int, int], tuple[dict[str, Any], Tensor, Tensor]]


class Draw:
    """Random codes and scales."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def ints(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def floats(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator) / 8 + 0.01

    def fp8(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Return e4m3fn data below 4, and its values."""
        codes = self.ints(0, 72, *shape) + 128 * self.ints(0, 2, *shape)
        return codes.to(torch.uint8).view(FN), table(FN)[codes]

    def fp4(self, *shape: int) -> tuple[Tensor, Tensor]:
        codes = self.ints(0, 16, *shape)
        return (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8).view(FP4), table(FP4)[codes]

    def e8m0(self, *shape: int) -> tuple[Tensor, Tensor]:
        codes = self.ints(120, 126, *shape)
        return codes.to(torch.uint8).view(E8), torch.tensor([e8m0_value(code) for code in range(256)])[codes].double()


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return the scale of each value of (experts, rows, columns) from one for each block."""
    return scale.double().repeat_interleave(rows, 1).repeat_interleave(columns, 2)


def dense(dtype: torch.dtype) -> Make:
    def make(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
        w13, w2 = ((draw.floats(*shape) - 0.07).to(dtype) for shape in ((EXPERTS, 2 * inter, hidden), (EXPERTS, hidden, inter)))
        return {"w13": w13, "w2": w2}, w13.double(), w2.double()

    return make


def per_tensor(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
    (w13, v13), (w2, v2) = draw.fp8(EXPERTS, 2 * inter, hidden), draw.fp8(EXPERTS, hidden, inter)
    s13, s2 = draw.floats(EXPERTS, 2), draw.floats(EXPERTS)
    return {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2}, v13 * halves(s13, order, inter), v2 * s2.double()[:, None, None]


def halves(scale: Tensor, order: type[GateUpOrder], inter: int) -> Tensor:
    """Return for each row of w13 gate's or up's scale, of (experts, 2)."""
    found = torch.empty(EXPERTS, 2 * inter, 1, dtype=torch.float64)
    found[:, gate_rows(order, inter)] = scale[:, :1, None].double()
    found[:, up_rows(order, inter)] = scale[:, 1:, None].double()
    return found


def channel(dtype: torch.dtype) -> Make:
    def make(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
        if dtype == torch.int8:
            w13, w2 = (draw.ints(-127, 128, *shape).to(torch.int8) for shape in ((EXPERTS, 2 * inter, hidden), (EXPERTS, hidden, inter)))
            v13, v2 = w13.double(), w2.double()
        else:
            (w13, v13), (w2, v2) = draw.fp8(EXPERTS, 2 * inter, hidden), draw.fp8(EXPERTS, hidden, inter)
        s13, s2 = draw.floats(EXPERTS, 2 * inter), draw.floats(EXPERTS, hidden)
        return {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2}, v13 * s13.double().unsqueeze(2), v2 * s2.double().unsqueeze(2)

    return make


def block(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
    (w13, v13), (w2, v2) = draw.fp8(EXPERTS, 2 * inter, hidden), draw.fp8(EXPERTS, hidden, inter)
    s13, s2 = draw.floats(EXPERTS, 2 * inter // 128, hidden // 128), draw.floats(EXPERTS, hidden // 128, inter // 128)
    return {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2}, v13 * spread(s13, 128, 128), v2 * spread(s2, 128, 128)


def mx(data: Callable[..., tuple[Tensor, Tensor]]) -> Make:
    def make(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
        (w13, v13), (w2, v2) = data(draw, EXPERTS, 2 * inter, hidden), data(draw, EXPERTS, hidden, inter)
        (s13, f13), (s2, f2) = draw.e8m0(EXPERTS, 2 * inter, hidden // 32), draw.e8m0(EXPERTS, hidden, inter // 32)
        return {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2}, v13 * spread(f13, 1, 32), v2 * spread(f2, 1, 32)

    return make


def nvfp4(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
    (w13, v13), (w2, v2) = draw.fp4(EXPERTS, 2 * inter, hidden), draw.fp4(EXPERTS, hidden, inter)
    (s13, f13), (s2, f2) = draw.fp8(EXPERTS, 2 * inter, hidden // 16), draw.fp8(EXPERTS, hidden, inter // 16)
    g13, g2 = draw.floats(EXPERTS, 2), draw.floats(EXPERTS)
    parts = {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2, "w13_global": g13, "w2_global": g2}
    return parts, v13 * spread(f13, 1, 16) * halves(g13, order, inter), v2 * spread(f2, 1, 16) * g2.double()[:, None, None]


def int4(*, by_columns: bool, zeros: bool) -> Make:
    """Return the maker of AWQ's (words of eight columns) or GPTQ's (of eight rows), of which the zeros always lie along columns."""
    places, dim = (AWQ_PLACES, 2) if by_columns else (ASCENDING, 1)

    def matrix(draw: Draw, into: int, out: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        codes, scale = draw.ints(0, 16, EXPERTS, into, out), draw.floats(EXPERTS, into // INT4_GROUP, out).half()
        zero = draw.ints(1, 16, EXPERTS, into // INT4_GROUP, out) if zeros else torch.full((EXPERTS, into // INT4_GROUP, out), 8)
        packed = pack_words(zero if by_columns else zero - 1, 2, places) if zeros else None
        value = (codes - zero.repeat_interleave(INT4_GROUP, 1)).double() * spread(scale, INT4_GROUP, 1)
        return pack_words(codes, dim, places), scale, packed, value.transpose(1, 2)

    def make(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
        w13, s13, z13, v13 = matrix(draw, hidden, 2 * inter)
        w2, s2, z2, v2 = matrix(draw, inter, hidden)
        parts = {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2, "w13_zero": z13, "w2_zero": z2, "group": INT4_GROUP}
        return parts, v13, v2

    return make


def signed(codes: Tensor) -> Tensor:
    """Return the values of codes 0 to 15 as two's complement."""
    return torch.tensor([*range(8), *range(-8, 0)], dtype=torch.float64)[codes]


def byte_rows(codes: Tensor) -> Tensor:
    """Return codes 0 to 15 (experts, rows, columns) as int8, the even rows in the low halves of bytes and the odd ones in the high halves."""
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)


def modelslim(*, packed: bool, corrected: bool = False) -> Make:
    """Return the maker of ModelSlim's int4 weights; the correction of w2 is in parts of two columns."""

    def matrix(draw: Draw, out: int, into: int) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale = draw.ints(0, 16, EXPERTS, out, into), draw.floats(EXPERTS, out)
        held = byte_rows(codes) if packed else signed(codes).to(torch.int8)
        return held, scale, signed(codes) * scale.double().unsqueeze(2)

    def make(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
        (w13, s13, v13), (w2, s2, v2) = matrix(draw, 2 * inter, hidden), matrix(draw, hidden, inter)
        parts = {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2}
        if corrected:
            parts["w13_correction"] = 8 * v13.sum(2).float()
            parts["w2_correction"] = 8 * v2.view(EXPERTS, hidden, -1, 2).sum(3).float()
        return parts, v13, v2

    return make


def compressed(draw: Draw, order: type[GateUpOrder], hidden: int, inter: int) -> tuple[dict[str, Any], Tensor, Tensor]:
    def matrix(out: int, into: int) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale = draw.ints(0, 16, EXPERTS, out, into), draw.floats(EXPERTS, out, into // INT4_GROUP).bfloat16()
        return pack_words(codes, 2, ASCENDING), scale, (codes - 8).double() * spread(scale, 1, INT4_GROUP)

    (w13, s13, v13), (w2, s2, v2) = matrix(2 * inter, hidden), matrix(hidden, inter)
    return {"w13": w13, "w2": w2, "w13_scale": s13, "w2_scale": s2, "group": INT4_GROUP}, v13, v2


@dataclass(frozen=True)
class Case:
    """A weight class: ``unit`` is what each rank's part of inter must be a multiple of."""

    cls: type[Weights]
    make: Make
    hidden: int
    unit: int
    largest: str  # the field that demands the unit

    def build(self, order: type[GateUpOrder], inter: int, *, bias: bool = False, seed: int = 0) -> Made:
        draw = Draw(seed)
        parts, w13, w2 = self.make(draw, order, self.hidden, inter)
        if bias:
            dtype = self.cls.format.data_dtype if self.cls.format.scale is None else torch.bfloat16
            parts |= {"b13": draw.floats(EXPERTS, 2 * inter).to(dtype), "b2": draw.floats(EXPERTS, self.hidden).to(dtype)}
        with debug("strict"):
            build = cast("Callable[..., Weights]", self.cls)
            return Made(build(**parts, order=order), w13, w2)


CASES: Final[Mapping[str, Case]] = {
    "bf16": Case(Bf16ExpertWeights, dense(torch.bfloat16), 8, 1, ""),
    "fp16": Case(Fp16ExpertWeights, dense(torch.float16), 8, 1, ""),
    "fp32": Case(Fp32ExpertWeights, dense(torch.float32), 8, 1, ""),
    "fp8 tensor": Case(Fp8TensorExpertWeights, per_tensor, 8, 1, ""),
    "fp8 channel": Case(Fp8ChannelExpertWeights, channel(FN), 8, 1, ""),
    "int8 channel": Case(Int8ChannelExpertWeights, channel(torch.int8), 8, 1, ""),
    "fp8 block": Case(Fp8Block128ExpertWeights, block, 128, 128, "w13_scale"),
    "mxfp8": Case(MxFp8ExpertWeights, mx(Draw.fp8), 64, 32, "w2_scale"),
    "mxfp4": Case(MxFp4ExpertWeights, mx(Draw.fp4), 64, 32, "w2_scale"),
    "nvfp4": Case(NvFp4ExpertWeights, nvfp4, 32, 16, "w2_scale"),
    "awq": Case(AwqExpertWeights, int4(by_columns=True, zeros=True), 16, 8, "w2_scale"),
    "awq symmetric": Case(AwqExpertWeights, int4(by_columns=True, zeros=False), 16, 8, "w2_scale"),
    "gptq": Case(GptqExpertWeights, int4(by_columns=False, zeros=True), 16, 8, "w2_scale"),
    "gptq symmetric": Case(GptqExpertWeights, int4(by_columns=False, zeros=False), 16, 8, "w2_scale"),
    "compressed": Case(CompressedInt4ExpertWeights, compressed, 16, 8, "w2_scale"),
    "w4a8": Case(ModelSlimW4A8ExpertWeights, modelslim(packed=True), 8, 1, ""),
    "w4a8 corrected": Case(ModelSlimW4A8ExpertWeights, modelslim(packed=True, corrected=True), 8, 2, "w2_correction"),
    "w4a4": Case(ModelSlimW4A4ExpertWeights, modelslim(packed=False), 8, 1, ""),
    "w4a4 packed": Case(ModelSlimW4A4PackedExpertWeights, modelslim(packed=True), 8, 1, ""),
}

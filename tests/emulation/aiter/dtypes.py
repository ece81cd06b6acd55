"""``aiter.dtypes``: names that depend on the architecture and on the version."""

from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, final

import attrs
import torch

Gfx: TypeAlias = Literal["gfx942", "gfx950"]

_FP8: Final[Mapping[Gfx, torch.dtype]] = {"gfx942": torch.float8_e4m3fnuz, "gfx950": torch.float8_e4m3fn}
FP8_MAX: Final[Mapping[torch.dtype, float]] = {torch.float8_e4m3fnuz: 240.0, torch.float8_e4m3fn: 448.0}

I4X2: Final[torch.dtype] = getattr(torch, "int4", torch.uint8)  # which the stubs of torch do not have


@attrs.frozen
class Dtypes:
    """The names that every version has."""

    fp8: torch.dtype
    fp8_e8m0: torch.dtype = torch.float8_e8m0fnu
    fp4x2: torch.dtype = torch.float4_e2m1fn_x2
    i4x2: torch.dtype = I4X2
    fp16: torch.dtype = torch.float16
    bf16: torch.dtype = torch.bfloat16
    fp32: torch.dtype = torch.float32
    u32: torch.dtype = torch.uint32
    i32: torch.dtype = torch.int32
    i16: torch.dtype = torch.int16
    i8: torch.dtype = torch.int8

    @property
    def d_dtypes(self) -> dict[str, torch.dtype]:
        return attrs.asdict(self)


@final
@attrs.frozen
class HeadDtypes(Dtypes):
    """The names that came after the wheel."""

    u8: torch.dtype = torch.uint8
    i64: torch.dtype = torch.int64
    u64: torch.dtype = torch.uint64


def dtypes_of(gfx: Gfx, *, wheel: bool) -> Dtypes:
    """Return the names of a version on an architecture."""
    return Dtypes(_FP8[gfx]) if wheel else HeadDtypes(_FP8[gfx])

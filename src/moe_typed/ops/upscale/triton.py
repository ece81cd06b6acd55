"""Upscale rows in one pass, in the tiles in which they are quantised."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..minifloat.spec import E2M1, NUMBERS
from ..minifloat.triton import decode, decode_e4m3fn, decode_e8m0
from ..quantize.spec import FP8_GROUP, MX_GROUP, NV_GROUP, PROGRAMS, WORD_CODES, ScaleKind, Tile, check_groups, check_live, thread_values, tile
from ..scale_layout.spec import ScaleLayout, as_bytes, to_storage
from ..scale_layout.triton import offset

_BF16 = torch.bfloat16
_FLOAT32 = tl.constexpr(ScaleKind.FLOAT32.value)
_E8M0 = tl.constexpr(ScaleKind.E8M0.value)
_FP4_BITS = tl.constexpr(E2M1.bits)
_WORD_CODES = tl.constexpr(WORD_CODES)


def upscale_fp8_groups(
    data: Tensor, scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = _BF16, live: Tensor | None = None
) -> Tensor:
    """See reference.upscale_fp8_groups."""
    return _upscaled(data, scale, None, live, FP8_GROUP, ScaleKind.FLOAT32, layout, dtype)


def upscale_fp8_groups_ue8m0(data: Tensor, words: Tensor, dtype: torch.dtype = _BF16, live: Tensor | None = None) -> Tensor:
    """See reference.upscale_fp8_groups_ue8m0."""
    return _upscaled(data, words, None, live, FP8_GROUP, ScaleKind.E8M0, ScaleLayout.PACKED, dtype)


def upscale_rows(data: Tensor, scale: Tensor, dtype: torch.dtype = _BF16, live: Tensor | None = None) -> Tensor:
    """See reference.upscale_rows."""
    return _upscaled(data, scale.unsqueeze(1), None, live, data.shape[1], ScaleKind.FLOAT32, ScaleLayout.ROW_MAJOR, dtype)


def upscale_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype = _BF16, live: Tensor | None = None) -> Tensor:
    """See reference.upscale_tensor."""
    return _upscaled(data, None, scale, live, FP8_GROUP, ScaleKind.TENSOR, ScaleLayout.ROW_MAJOR, dtype)


def upscale_mxfp8(
    data: Tensor, scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = _BF16, live: Tensor | None = None
) -> Tensor:
    """See reference.upscale_mxfp8."""
    return _upscaled(data, scale, None, live, MX_GROUP, ScaleKind.E8M0, layout, dtype)


def upscale_mxfp4(
    data: Tensor, scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = _BF16, live: Tensor | None = None
) -> Tensor:
    """See reference.upscale_mxfp4."""
    return _upscaled(data, scale, None, live, MX_GROUP, ScaleKind.E8M0, layout, dtype)


def upscale_nvfp4(
    data: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    dtype: torch.dtype = _BF16,
    live: Tensor | None = None,
) -> Tensor:
    """See reference.upscale_nvfp4."""
    return _upscaled(data, scale, tensor_scale, live, NV_GROUP, ScaleKind.E4M3, layout, dtype)


def _upscaled(
    data: Tensor,
    scale: Tensor | None,
    given: Tensor | None,
    live: Tensor | None,
    group: int,
    kind: ScaleKind,
    layout: ScaleLayout,
    dtype: torch.dtype,
) -> Tensor:
    check_live(data, live)
    number = NUMBERS[data.dtype]
    count, hidden = data.shape[0], data.shape[1] * (2 if number is E2M1 else 1)
    out = torch.empty((count, hidden), dtype=dtype, device=data.device)
    if scale is not None:
        check_groups(out, group)
        scale = to_storage(scale, count, hidden // group, layout)
    if count:
        stride, held = (0, None) if scale is None else (scale.stride(0), as_bytes(scale))
        format_ = number.bits, number.mantissa, number.bias, number.nan
        codes = data.contiguous().view(torch.int32 if number is E2M1 else torch.uint8)
        _upscale_rows(codes, held, given, live, out, group, kind.value, layout.value, stride, *format_)
    return out


@custom_op("upscale_rows", writes=("out",))
def _upscale_rows(
    data: Tensor,
    scale: Tensor | None,
    given: Tensor | None,
    live: Tensor | None,
    out: Tensor,
    group: int,
    kind: int,
    layout: int,
    scale_stride: int,
    bits: int,
    mantissa: int,
    bias: int,
    nan: int,
) -> None:
    count, hidden = out.shape
    block, constants = _constants(hidden, group, kind, layout, bits, mantissa, bias, nan)
    programs = -(-count // block.rows) * -(-hidden // (group * block.groups))
    if live is not None:
        programs = min(programs, PROGRAMS)
    _upscale(programs, (data, scale, given, live, out), (count, scale_stride), constants, num_warps=block.warps)


@cache
def _constants(hidden: int, group: int, kind: int, layout: int, bits: int, mantissa: int, bias: int, nan: int) -> tuple[Tile, dict[str, int]]:
    """Return the tile and the constants of a kernel, once."""
    few = 0  # reading codes takes few instructions, however many rows there are
    block = tile(hidden, group, ScaleLayout(layout), thread_values(bits, group, few))
    constants = {"HIDDEN": hidden, "GROUP": group, "KIND": kind, "LAYOUT": layout, "BITS": bits, "MANTISSA": mantissa, "BIAS": bias, "NAN": nan}
    return block, constants | {"ROWS": block.rows, "GROUPS": block.groups, "WIDTH": block.width}


@Launcher
@triton.jit(do_not_specialize=["count", "scale_stride"])
def _upscale(
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor | None,
    given_ptr: tl.tensor | None,
    live_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    count: tl.tensor,
    scale_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    LAYOUT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    NAN: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    limit = count if live_ptr is None else tl.minimum(tl.load(live_ptr), count)
    given = 1.0 if given_ptr is None else tl.load(given_ptr)
    pieces: tl.constexpr = (HIDDEN + GROUP * GROUPS - 1) // (GROUP * GROUPS)
    first = tl.program_id(0)
    end = first + 1 if live_ptr is None else tl.cdiv(limit, ROWS) * pieces  # as when quantising
    for index in tl.range(first, end, 1 if live_ptr is None else tl.num_programs(0)):
        row = (index // pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        group = index % pieces * GROUPS + tl.arange(0, GROUPS)
        column = group[None, :, None] * GROUP + tl.arange(0, WIDTH)[None, None, :]
        is_live = (row < limit)[:, None, None]
        mask = is_live & (column < HIDDEN)
        if BITS == _FP4_BITS:
            word = group[None, :, None] * (GROUP // _WORD_CODES) + tl.arange(0, WIDTH // _WORD_CODES)[None, None, :]
            there = is_live & (word < HIDDEN // _WORD_CODES)
            words = tl.load(data_ptr + row[:, None, None] * (HIDDEN // _WORD_CODES) + word, mask=there, other=0)
            code = tl.reshape(words[:, :, :, None] >> (4 * tl.arange(0, _WORD_CODES)) & 0xF, (ROWS, GROUPS, WIDTH))
        else:
            code = tl.load(data_ptr + row[:, None, None] * HIDDEN + column, mask=mask, other=0)
        value = decode(code, BITS, MANTISSA, BIAS, NAN)
        if scale_ptr is None:
            value *= given
        else:
            place = offset(row[:, None], group[None, :], scale_stride, HIDDEN // GROUP, LAYOUT)
            held = (row < limit)[:, None] & (group < HIDDEN // GROUP)[None, :]
            if KIND == _FLOAT32:
                scale = tl.load(scale_ptr + place, mask=held, other=0.0)
            elif KIND == _E8M0:
                scale = decode_e8m0(tl.load(scale_ptr + place, mask=held, other=0).to(tl.int32))
            else:
                scale = decode_e4m3fn(tl.load(scale_ptr + place, mask=held, other=0)) * given
            value *= scale[:, :, None]
        tl.store(out_ptr + row[:, None, None] * HIDDEN + column, value.to(out_ptr.dtype.element_ty), mask=mask)

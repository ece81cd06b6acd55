"""Upscale rows in one pass, in the tiles in which they are quantised."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..minifloat.spec import E2M1, NUMBERS
from ..minifloat.triton import decode, decode_e4m3fn, decode_e8m0
from ..quantize.spec import FP8_GROUP, MX_GROUP, NV_GROUP, PROGRAMS, ScaleKind, check_groups, check_live, tile
from ..scale_layout.spec import ScaleLayout, as_bytes, to_storage
from ..scale_layout.triton import offset

_BF16 = torch.bfloat16
_FLOAT32 = tl.constexpr(ScaleKind.FLOAT32.value)
_E8M0 = tl.constexpr(ScaleKind.E8M0.value)
_FP4_BITS = tl.constexpr(E2M1.bits)


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
        _upscale_rows(data.contiguous().view(torch.uint8), held, given, live, out, group, kind.value, layout.value, stride, *format_)
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
    order = ScaleLayout(layout)
    block = tile(hidden, group, order)
    programs = triton.cdiv(count, block.rows) * triton.cdiv(hidden, group * block.groups)
    constants = {
        "HIDDEN": hidden,
        "GROUP": group,
        "KIND": kind,
        "LAYOUT": layout,
        "BITS": bits,
        "MANTISSA": mantissa,
        "BIAS": bias,
        "NAN": nan,
        "ROWS": block.rows,
        "GROUPS": block.groups,
        "WIDTH": block.width,
    }
    if live is not None:
        programs = min(programs, PROGRAMS)
    _upscale(programs, (data, scale, given, live, out), (count, scale_stride), constants, num_warps=block.warps)


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
    for index in tl.range(tl.program_id(0), tl.cdiv(limit, ROWS) * pieces, tl.num_programs(0)):
        row = (index // pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        group = index % pieces * GROUPS + tl.arange(0, GROUPS)
        column = group[None, :, None] * GROUP + tl.arange(0, WIDTH)[None, None, :]
        is_live = (row < limit)[:, None, None]
        mask = is_live & (column < HIDDEN)
        if BITS == _FP4_BITS:
            pair = group[None, :, None] * (GROUP // 2) + tl.arange(0, WIDTH // 2)[None, None, :]
            packed = tl.load(data_ptr + row[:, None, None] * (HIDDEN // 2) + pair, mask=is_live & (pair < HIDDEN // 2), other=0)
            code = tl.reshape(tl.join(packed & 0xF, packed >> 4), (ROWS, GROUPS, WIDTH))
        else:
            code = tl.load(data_ptr + row[:, None, None] * HIDDEN + column, mask=mask, other=0)
        value = decode(code, BITS, MANTISSA, BIAS, NAN)
        if scale_ptr is None:
            value *= given
        else:
            place = offset(row[:, None], group[None, :], scale_stride, HIDDEN // GROUP, LAYOUT)
            there = (row < limit)[:, None] & (group < HIDDEN // GROUP)[None, :]
            if KIND == _FLOAT32:
                scale = tl.load(scale_ptr + place, mask=there, other=0.0)
            elif KIND == _E8M0:
                scale = decode_e8m0(tl.load(scale_ptr + place, mask=there, other=0).to(tl.int32))
            else:
                held = tl.load(scale_ptr + place, mask=there, other=0)
                scale = decode_e4m3fn(held) * given
            value *= scale[:, :, None]
        tl.store(out_ptr + row[:, None, None] * HIDDEN + column, value.to(out_ptr.dtype.element_ty), mask=mask)

"""Scales in other memory orders, in one launch each. Rows from ``live`` on are not read, and not written but for the padding of a live row's tile."""

from collections.abc import Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from .spec import TILE_GROUPS, TILE_ROWS, WORD_GROUPS, ScaleLayout, as_bytes, empty_storage, of_storage, stored_shape, to_storage

_ROWS: Final = 32  # of a program: 128 bytes of a column of float32
_GROUPS: Final = 32  # and as many of a row
_WARPS: Final = 4
_ROW_MAJOR = tl.constexpr(ScaleLayout.ROW_MAJOR.value)
_COLUMN_MAJOR = tl.constexpr(ScaleLayout.COLUMN_MAJOR.value)
_PACKED = tl.constexpr(ScaleLayout.PACKED.value)
_SWIZZLED = tl.constexpr(ScaleLayout.SWIZZLED.value)
_WORD_GROUPS = tl.constexpr(WORD_GROUPS)
_TILE_ROWS = tl.constexpr(TILE_ROWS)
_TILE_GROUPS = tl.constexpr(TILE_GROUPS)


def to_column_major(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """See reference.to_column_major."""
    return _reordered(scale.contiguous(), scale.shape, live, ScaleLayout.ROW_MAJOR, ScaleLayout.COLUMN_MAJOR)


def to_row_major(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """See reference.to_row_major."""
    return _reordered(scale, scale.shape, live, ScaleLayout.COLUMN_MAJOR, ScaleLayout.ROW_MAJOR)


def pack_ue8m0(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """See reference.pack_ue8m0."""
    codes = scale.contiguous() if scale.dtype == torch.float32 else scale.contiguous().view(torch.uint8)
    return _reordered(codes, scale.shape, live, ScaleLayout.ROW_MAJOR, ScaleLayout.PACKED)


def unpack_ue8m0(words: Tensor, groups: int, live: Tensor | None = None) -> Tensor:
    """See reference.unpack_ue8m0."""
    return _reordered(words, (words.shape[0], groups), live, ScaleLayout.PACKED, ScaleLayout.ROW_MAJOR).view(torch.float8_e8m0fnu)


def swizzle(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """See reference.swizzle."""
    codes = scale.contiguous().view(torch.uint8)
    return _reordered(codes, scale.shape, live, ScaleLayout.ROW_MAJOR, ScaleLayout.SWIZZLED).view(scale.dtype)


def unswizzle(swizzled: Tensor, rows: int, groups: int, live: Tensor | None = None) -> Tensor:
    """See reference.unswizzle."""
    return _reordered(swizzled.view(torch.uint8), (rows, groups), live, ScaleLayout.SWIZZLED, ScaleLayout.ROW_MAJOR).view(swizzled.dtype)


def _reordered(scale: Tensor, shape: Sequence[int], live: Tensor | None, source_layout: ScaleLayout, layout: ScaleLayout) -> Tensor:
    rows, groups = shape
    source = to_storage(scale, rows, groups, source_layout)
    one = torch.uint8 if source_layout is ScaleLayout.PACKED else source.dtype
    out = empty_storage(rows, groups, torch.int32 if layout is ScaleLayout.PACKED else one, layout, source.device)
    if rows:
        strides = source.stride(0), out.stride(0)
        _reorder_scales(as_bytes(source), live, as_bytes(out), rows, groups, *strides, source_layout.value, layout.value)
    return of_storage(out, rows, layout)


@custom_op("reorder_scales", writes=("out",))
def _reorder_scales(
    source: Tensor, live: Tensor | None, out: Tensor, rows: int, groups: int, source_stride: int, stride: int, source_layout: int, layout: int
) -> None:
    stored = stored_shape(rows, groups, ScaleLayout(layout))
    constants = {
        "GROUPS": groups,
        "SOURCE": source_layout,
        "LAYOUT": layout,
        "STORED": stored[1],
        "BLOCK_ROWS": _ROWS,
        "BLOCK_GROUPS": _GROUPS,
    }
    _reorder(
        triton.cdiv(stored[0], _ROWS) * triton.cdiv(groups, _GROUPS), (source, live, out), (rows, source_stride, stride), constants, num_warps=_WARPS
    )


@triton.jit
def stored_rows(limit: tl.tensor, LAYOUT: tl.constexpr) -> tl.tensor:
    """Return how many rows of scales are written where ``limit`` rows are live: whole tiles."""
    return tl.cdiv(limit, _TILE_ROWS) * _TILE_ROWS if LAYOUT == _SWIZZLED else limit


@triton.jit
def offset(row: tl.tensor, group: tl.tensor, stride: tl.tensor, GROUPS: tl.constexpr, LAYOUT: tl.constexpr) -> tl.tensor:
    """Return where the scale of an int64 row and a group lies, in elements; see spec."""
    if LAYOUT == _ROW_MAJOR:
        found = row * GROUPS + group
    elif LAYOUT == _COLUMN_MAJOR:
        found = group.to(tl.int64) * stride + row
    elif LAYOUT == _PACKED:
        found = ((group // _WORD_GROUPS).to(tl.int64) * stride + row) * _WORD_GROUPS + group % _WORD_GROUPS
    else:
        tile = row // _TILE_ROWS * ((GROUPS + _TILE_GROUPS - 1) // _TILE_GROUPS) + group // _TILE_GROUPS
        found = tile * (_TILE_ROWS * _TILE_GROUPS) + row % 32 * 16 + row // 32 % 4 * _TILE_GROUPS + group % _TILE_GROUPS
    return found


@Launcher
@triton.jit(do_not_specialize=["rows", "source_stride", "stride"])
def _reorder(
    source_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    source_stride: tl.tensor,
    stride: tl.tensor,
    GROUPS: tl.constexpr,
    SOURCE: tl.constexpr,
    LAYOUT: tl.constexpr,
    STORED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
) -> None:
    limit = rows if live_ptr is None else tl.minimum(tl.load(live_ptr), rows)
    blocks: tl.constexpr = (GROUPS + BLOCK_GROUPS - 1) // BLOCK_GROUPS
    program = tl.program_id(0)
    row = ((program // blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))[:, None]
    group = (program % blocks * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS))[None, :]
    scale = tl.load(source_ptr + offset(row, group, source_stride, GROUPS, SOURCE), mask=(row < limit) & (group < GROUPS), other=0)
    if scale.dtype == tl.float32 and LAYOUT == _PACKED:
        scale = scale.to(tl.int32, bitcast=True) >> 23  # the exponent's field is the e8m0 byte
    written = (row < stored_rows(limit, LAYOUT)) & (group < STORED)
    tl.store(out_ptr + offset(row, group, stride, GROUPS, LAYOUT), scale.to(out_ptr.dtype.element_ty), mask=written)

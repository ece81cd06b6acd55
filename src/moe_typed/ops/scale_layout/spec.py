"""Where the scale of (row, group) lies.

ROW_MAJOR     row * groups + group
COLUMN_MAJOR  group * stride + row            the stride of a column is ceil4(rows): the tensor copy engine takes multiples of 16 bytes
PACKED        the same of int32 words, each with four groups, the first in the lowest byte (DeepGEMM's UE8M0)
SWIZZLED      tiles of 128 rows by 4 groups, row of tiles after row of tiles; a tile has 512 bytes, (row % 32) * 16 + row / 32 * 4 + group
(cuBLAS, "1D block scaling factors layout": what block-scaled tensor-core products of Blackwell read)
"""

from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

ALIGNED_ROWS: Final = 4  # 4-byte scales in 16 bytes
WORD_GROUPS: Final = 4  # 1-byte scales in an int32
TILE_ROWS: Final = 128
TILE_GROUPS: Final = 4


class ScaleLayout(IntEnum):
    """The memory orders; the numbers are those that kernels know."""

    ROW_MAJOR = 0
    COLUMN_MAJOR = 1
    PACKED = 2
    SWIZZLED = 3


def ceil_to(value: int, multiple: int) -> int:
    """Return the smallest multiple that is not below the value."""
    return -(-value // multiple) * multiple


def _words(groups: int) -> int:
    return ceil_to(groups, WORD_GROUPS) // WORD_GROUPS


def _tiles(rows: int, groups: int) -> tuple[int, ...]:
    return (ceil_to(rows, TILE_ROWS) * ceil_to(groups, TILE_GROUPS),)


def empty_storage(rows: int, groups: int, dtype: torch.dtype, layout: ScaleLayout, device: torch.device) -> Tensor:
    """Return unwritten memory for scales; ``dtype`` is float32 for COLUMN_MAJOR, int32 for PACKED, and of one byte for SWIZZLED."""
    shape = {
        ScaleLayout.ROW_MAJOR: (rows, groups),
        ScaleLayout.COLUMN_MAJOR: (groups, ceil_to(rows, ALIGNED_ROWS)),
        ScaleLayout.PACKED: (_words(groups), ceil_to(rows, ALIGNED_ROWS)),
        ScaleLayout.SWIZZLED: _tiles(rows, groups),
    }[layout]
    return torch.empty(shape, dtype=dtype, device=device)


def of_storage(storage: Tensor, rows: int, layout: ScaleLayout) -> Tensor:
    """Return the scales that lie in the memory: with one row for each row, or flat where swizzled."""
    return storage.t()[:rows] if layout in (ScaleLayout.COLUMN_MAJOR, ScaleLayout.PACKED) else storage


def to_storage(scale: Tensor, rows: int, groups: int, layout: ScaleLayout) -> Tensor:
    """Return the memory in which the scales lie, as ``empty_storage`` makes it, with any stride of columns.

    Raises: ValueError where they do not lie in that order.
    """
    shape = {
        ScaleLayout.ROW_MAJOR: (rows, groups),
        ScaleLayout.COLUMN_MAJOR: (rows, groups),
        ScaleLayout.PACKED: (rows, _words(groups)),
        ScaleLayout.SWIZZLED: _tiles(rows, groups),
    }[layout]
    is_by_column = layout in (ScaleLayout.COLUMN_MAJOR, ScaleLayout.PACKED)
    is_ordered = (rows <= 1 or scale.stride(0) == 1) if is_by_column else scale.is_contiguous()
    if scale.shape != shape or not is_ordered:
        raise ValueError(
            f"the scales of {rows} rows of {groups} groups, {layout.name}, must have the shape {list(shape)} in that order;"
            f" got {list(scale.shape)} with strides {list(scale.stride())}"
        )
    if not is_by_column:
        return scale
    return scale.t() if rows > 1 else scale.t().contiguous()  # the stride of a single row says nothing


def as_bytes(storage: Tensor) -> Tensor:
    """Return the memory as kernels take it: float32, or bytes."""
    return storage if storage.dtype == torch.float32 else storage.view(torch.uint8)


def stored_shape(rows: int, groups: int, layout: ScaleLayout) -> tuple[int, int]:
    """Return how many rows and groups are written, the padding of words and of tiles included."""
    if layout in (ScaleLayout.PACKED, ScaleLayout.SWIZZLED):
        groups = ceil_to(groups, TILE_GROUPS)  # which is WORD_GROUPS, too
    return ceil_to(rows, TILE_ROWS) if layout is ScaleLayout.SWIZZLED else rows, groups

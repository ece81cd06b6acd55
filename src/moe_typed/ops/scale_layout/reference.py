"""Scales in other memory orders, in torch operations. ``live``: int32 (1,), or None for all; rows from there on are as if their scales were zero."""

import torch
from torch import Tensor

from .spec import ALIGNED_ROWS, TILE_GROUPS, TILE_ROWS, WORD_GROUPS, ScaleLayout, as_bytes, ceil_to, to_storage


def live_rows(tensor: Tensor, live: Tensor | None) -> Tensor:
    """Return the tensor with zeros in the rows from ``live`` on, or itself if all are live."""
    if live is None:
        return tensor
    is_live = torch.arange(tensor.shape[0], device=tensor.device) < live
    return torch.where(is_live.view(-1, *[1] * (tensor.dim() - 1)), tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def _columns(scale: Tensor) -> Tensor:
    rows, columns = scale.shape
    storage = scale.new_zeros((columns, ceil_to(rows, ALIGNED_ROWS)))
    storage[:, :rows] = scale.t()
    return storage.t()[:rows]


def to_column_major(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """Return row-major scales, float32 (rows, groups), column-major: the same shape with the strides (1, ceil4(rows))."""
    return _columns(live_rows(scale, live))


def to_row_major(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """Return column-major scales, float32 (rows, groups) with the strides (1, any), row-major."""
    to_storage(scale, scale.shape[0], scale.shape[1], ScaleLayout.COLUMN_MAJOR)
    return live_rows(scale, live).clone(memory_format=torch.contiguous_format)


def pack_ue8m0(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """Return row-major scales packed: int32 (rows, ceil(groups / 4)), column-major. The bytes of groups that there are not are 0.

    ``scale``: float8_e8m0fnu (rows, groups), or float32 that are positive powers of two from 2^-126 on, infinite or NaN.
    """
    is_float = scale.dtype == torch.float32
    codes = live_rows((scale.view(torch.int32) >> 23).to(torch.uint8) if is_float else scale.view(torch.uint8), live)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % WORD_GROUPS))
    return _columns(padded.contiguous().view(torch.int32))


def unpack_ue8m0(words: Tensor, groups: int, live: Tensor | None = None) -> Tensor:
    """Return packed scales row-major: float8_e8m0fnu (rows, groups)."""
    rows, columns = words.shape
    storage = to_storage(words, rows, groups, ScaleLayout.PACKED)
    codes = as_bytes(storage).reshape(columns, rows, WORD_GROUPS).transpose(0, 1).reshape(rows, columns * WORD_GROUPS)[:, :groups]
    return live_rows(codes, live).clone(memory_format=torch.contiguous_format).view(torch.float8_e8m0fnu)


def swizzle(scale: Tensor, live: Tensor | None = None) -> Tensor:
    """Return row-major scales of one byte each (rows, groups) in tiles: flat, ceil128(rows) * ceil4(groups). The padding is byte 0."""
    codes = live_rows(scale.view(torch.uint8), live)
    rows, groups = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -groups % TILE_GROUPS, 0, -rows % TILE_ROWS))
    tiles = padded.view(-1, 4, 32, padded.shape[1] // TILE_GROUPS, TILE_GROUPS)  # (tile row, row / 32, row % 32, tile column, group)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzle(swizzled: Tensor, rows: int, groups: int, live: Tensor | None = None) -> Tensor:
    """Return scales in tiles row-major (rows, groups)."""
    to_storage(swizzled, rows, groups, ScaleLayout.SWIZZLED)
    tiles = swizzled.view(torch.uint8).view(-1, ceil_to(groups, TILE_GROUPS) // TILE_GROUPS, 32, 4, TILE_GROUPS)
    padded = tiles.permute(0, 3, 2, 1, 4).reshape(ceil_to(rows, TILE_ROWS), ceil_to(groups, TILE_GROUPS))
    return live_rows(padded[:rows, :groups], live).clone(memory_format=torch.contiguous_format).view(swizzled.dtype)

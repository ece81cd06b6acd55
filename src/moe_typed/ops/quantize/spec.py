"""What the quantising and upscaling kernels are told: the group that shares a scale, and how a scale is held."""

from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..minifloat.spec import E2M1, E4M3FN
from ..scale_layout.spec import WORD_GROUPS, ScaleLayout, ceil_to

FP8_GROUP: Final = 128  # DeepSeek-V3's activations
MX_GROUP: Final = 32  # OCP Microscaling Formats v1.0
NV_GROUP: Final = 16  # NVFP4
WORD_CODES: Final = 8  # codes of four bits in an int32: what a thread makes of the 16 bytes that it reads at a time
NV_TENSOR_MAX: Final = E4M3FN.max * E2M1.max  # what the largest scale and the largest value of a group of NVFP4 stand for together

# A smaller scale would be zero where subnormals are flushed, and its reciprocal, 2^126 at most, infinite.
SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny

PROGRAMS: Final = 132 * 16  # for a number of rows that only the device knows: 16 for each of the 132 multiprocessors of an H200


class ScaleKind(IntEnum):
    """How scales are held; the numbers are those that kernels know."""

    TENSOR = 0  # one float32 for all
    FLOAT32 = 1
    E8M0 = 2
    E4M3 = 3  # times one float32 for all


def check_groups(rows: Tensor, group: int) -> None:
    """Raise ValueError unless rows are whole groups."""
    if rows.shape[1] % group:
        raise ValueError(f"rows of {rows.shape[1]} channels are no whole groups of {group}")


def check_live(rows: Tensor, live: Tensor | None) -> None:
    """Raise ValueError unless ``live`` is None or one int32 on the device of the rows."""
    if live is not None and (live.dtype != torch.int32 or live.numel() != 1 or live.device != rows.device):
        raise ValueError(f"the count of live rows must be one int32 on {rows.device}; got {live.dtype} {list(live.shape)} on {live.device}")


class Tile(NamedTuple):
    """What one program takes at a time: ``rows`` by ``groups`` of ``width`` values, of which the first ``group`` are there."""

    rows: int
    groups: int
    width: int
    warps: int


_WARP: Final = 32  # threads
_MAX_WARPS: Final = 16
_VALUES: Final = 1024  # of a tile, at least: one that is smaller costs more to start than to do
_WARPS: Final = 2  # of a tile, at least
_MANY_ROWS: Final = 512  # from here on there is work enough for every multiprocessor, and what counts is instructions, not time to the first byte


def thread_values(bits: int, group: int, count: int) -> int:
    """Return how many values of a tile a thread takes, the fastest measured on an H200.

    16 makes 16 bytes of fp8. Codes of four bits are computed in about twenty instructions each, which longer threads share more of; but where there
    are few rows 8 are sooner done. A group that is a whole row is spread over no more warps than must be.
    """
    if bits < 8:
        return 32 if count >= _MANY_ROWS else WORD_CODES
    return 32 if group > _VALUES else 16


def tile(hidden: int, group: int, layout: ScaleLayout, values: int) -> Tile:
    """Return the tile for rows of that length, with as many values a thread. Of the last piece of a row, at most an eighth of it all is idle."""
    width = 1 << (group - 1).bit_length()
    groups = ceil_to(hidden, group) // group
    size = max(_VALUES, _WARPS * _WARP * values)
    most = max(1, size // width)
    if layout in (ScaleLayout.COLUMN_MAJOR, ScaleLayout.PACKED):
        most = min(most, WORD_GROUPS)  # whole words, and the rows of a tile lie side by side in a column
    piece = 1
    while 2 * piece <= most and 8 * (ceil_to(groups, 2 * piece) - groups) <= groups:
        piece *= 2
    rows = max(1, size // (width * piece))
    return Tile(rows, piece, width, min(_MAX_WARPS, max(1, rows * piece * width // (_WARP * values))))

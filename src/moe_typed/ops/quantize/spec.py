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
NV_TENSOR_MAX: Final = E4M3FN.max * E2M1.max  # what the largest scale and the largest value of a group of NVFP4 stand for together

# A smaller scale would be zero where subnormals are flushed, and its reciprocal, 2^126 at most, infinite.
SMALLEST_SCALE: Final = torch.finfo(torch.float32).tiny


PROGRAMS: Final = 132 * 16  # for a number of rows that only the device knows: as many of 4 warps as the 132 multiprocessors of an H200 hold


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


_VALUES: Final = 2048  # of a tile: 16 for each thread of 4 warps, which it writes in 16 bytes
_THREAD_VALUES: Final = 16
_MAX_WARPS: Final = 16


def tile(hidden: int, group: int, layout: ScaleLayout) -> Tile:
    """Return the tile for rows of that length. A row is taken in as long pieces as leave at most an eighth of the last one idle."""
    width = 1 << (group - 1).bit_length()
    groups = ceil_to(hidden, group) // group
    most = max(1, _VALUES // width)
    if layout in (ScaleLayout.COLUMN_MAJOR, ScaleLayout.PACKED):
        most = min(most, WORD_GROUPS)  # then there are rows enough to write columns in whole sectors of 32 bytes
    piece = 1
    while 2 * piece <= most and 8 * (ceil_to(groups, 2 * piece) - groups) <= groups:
        piece *= 2
    rows = max(1, _VALUES // (width * piece))
    return Tile(rows, piece, width, min(_MAX_WARPS, max(1, rows * piece * width // (_THREAD_VALUES * 32))))

"""The facts that make a format, as data on the class that has it."""

import enum
from typing import final

import attrs
import torch


@final
class ScaleOrder(enum.Enum):
    """Say how a scale tensor lies in memory."""

    SCALAR = "one for all"
    PER_ROW = "one a row"
    ROW_MAJOR = "row-major"
    ROW_MAJOR_PAIRS = "row-major, in pairs"
    COLUMN_MAJOR_ALIGNED = "column-major, rows padded to 16 bytes"
    SLAB_COLUMN_MAJOR = "column-major within each expert of a slab"
    SWIZZLED_128X4 = "swizzled in tiles of 128 x 4"


@final
class ScaleRounding(enum.Enum):
    """Say how a scale is rounded to what its dtype can hold."""

    NONE = "none"
    POWER_OF_TWO = "power of two"
    TO_DTYPE = "to the scale's dtype"


@final
@attrs.frozen
class ScaleSpec:
    """Describe the scales of a format: value = data * scale.

    ``group`` is the (rows, columns) block that shares one scale; 0 stands for all rows, or all columns. ``per_element`` scales share one element of
    the scale tensor (4 in an int32 of packed e8m0 bytes).
    """

    dtype: torch.dtype
    group: tuple[int, int]
    order: ScaleOrder
    rounding: ScaleRounding
    per_element: int = 1

    def count_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of the scales of ``rows * columns`` values, without padding."""
        group_rows, group_columns = self.group[0] or rows, self.group[1] or columns
        if rows == 0 or columns == 0:
            return 0
        across = -(-columns // group_columns)
        return -(-rows // group_rows) * -(-across // self.per_element) * self.dtype.itemsize


@final
@attrs.frozen
class Format:
    """Describe a payload or weight format: its name on the command line, the dtype of its data, and its scales.

    ``per_element``: how many values share one element of the data (2 in a byte of fp4).
    """

    name: str
    data_dtype: torch.dtype
    scale: ScaleSpec | None = None
    per_element: int = 1

    def payload_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of ``rows * columns`` values with their scales, without padding."""
        data = rows * (columns // self.per_element) * self.data_dtype.itemsize
        return data if self.scale is None else data + self.scale.count_bytes(rows, columns)

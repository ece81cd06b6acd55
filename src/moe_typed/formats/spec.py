"""The facts that make a format, as data on the class that has it."""

import enum
from typing import final

import attrs
import torch


@final
class ScaleOrder(enum.Enum):
    """Say how a scale tensor lies in memory."""

    ROW_MAJOR = "row-major"


@final
class ScaleRounding(enum.Enum):
    """Say how a scale is rounded to what its dtype can hold."""

    NONE = "none"
    POWER_OF_TWO_UP = "power of two, rounded up"


@final
@attrs.frozen
class ScaleSpec:
    """Describe the scales of a format: value = data * scale.

    ``group`` is the (rows, columns) block that shares one scale.
    """

    dtype: torch.dtype
    group: tuple[int, int]
    order: ScaleOrder
    rounding: ScaleRounding


@final
@attrs.frozen
class Format:
    """Describe a payload or weight format: its name on the command line, the dtype of its data, and its scales."""

    name: str
    data_dtype: torch.dtype
    scale: ScaleSpec | None = None

    def payload_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of ``rows * columns`` values with their scales."""
        data = rows * columns * self.data_dtype.itemsize
        if self.scale is None:
            return data
        group_rows, group_columns = self.scale.group
        return data + -(-rows // group_rows) * -(-columns // group_columns) * self.scale.dtype.itemsize

"""Payload classes: rows of activations together with their scales.

A format is what a class *is*, not a tag on a tensor: two formats that differ in one fact are two classes, and no annotation can relabel one
as the other.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Final

import torch
from torch import Tensor
from typing_extensions import override

from ...boundary import value_error
from ...ops.minifloat.reference import decode_e2m1, unpack_e2m1
from ...ops.minifloat.spec import E8M0_NAN
from ...ops.quantize.spec import FP8_GROUP
from ...ops.quantize.spec import MX_GROUP as MX_GROUP
from ...ops.quantize.spec import NV_GROUP as NV_GROUP
from ..spec import Format

BLOCK_128: Final = FP8_GROUP


class Payload(ABC):
    """The base of all payload formats. ``data`` has the shape (rows, hidden), or (rows, hidden // 2) where a byte holds two values."""

    format: ClassVar[Format]
    data: Tensor

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return the values as float32 (rows, hidden): the meaning of the payload."""

    @abstractmethod
    def check_live(self, live: int | Tensor) -> None:
        """Raise BoundaryError for data of live rows that cannot be right; what the others hold is undefined. Reads tensors.

        ``live``: how many leading rows, or bool (rows,) where live rows are not the leading ones.
        """

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        return self.data.shape[0]

    @property
    def hidden(self) -> int:
        """Return the number of values in a row."""
        return self.data.shape[1] * self.format.per_element


class DenseRows(Payload):
    """The base of payloads without scales."""

    @override
    def dequantize(self) -> Tensor:
        return self.data.to(torch.float32)

    @override
    def check_live(self, live: int | Tensor) -> None:
        """Accept everything: a model's rows may hold what they like."""


class ScaledRows(Payload):
    """The base of payloads with scales: value = data * scale."""

    scale: Tensor


def live_index(live: int | Tensor) -> slice | Tensor:
    """Return what indexes the live rows."""
    return slice(live) if isinstance(live, int) else live


def apply_groups(data: Tensor, scale: Tensor, group: int) -> Tensor:
    """Return data (rows, hidden) times scale (rows, hidden // group), as float32."""
    rows, hidden = data.shape
    groups = data.to(torch.float32).view(rows, hidden // group, group)
    return (groups * scale.unsqueeze(2)).view(rows, hidden)


def check_finite(payload: ScaledRows, scale: Tensor, field: str = "scale") -> None:
    """Raise BoundaryError for a float32 scale, of that field, that is not finite."""
    if not bool(torch.isfinite(scale).all()):
        raise value_error(payload, field, "holds an infinity or a NaN", "the rows that were quantised held one")


def check_e8m0(payload: ScaledRows, scale: Tensor) -> None:
    """Raise BoundaryError for a scale byte of 255, which is NaN."""
    if bool((scale.view(torch.uint8) == E8M0_NAN).any()):
        raise value_error(payload, "scale", "holds the byte 255, which is NaN", "the rows that were quantised held an infinity or a NaN")


def e2m1_values(packed: Tensor) -> Tensor:
    """Return the values of float4_e2m1fn_x2 (..., n) as float32 (..., 2 * n)."""
    return decode_e2m1(unpack_e2m1(packed))

"""Payloads as libraries carry them: data and scales as plain tensors, and back into the same class on arrival."""

from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar, cast

import torch
from torch import Tensor

from ..formats import (
    Bf16Rows,
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128Rows,
    Fp8FnuzBlock128Rows,
    MxFp4Rows,
    MxFp8Rows,
    Payload,
)
from ..formats.payloads import ScaledRows
from ..runners import UnsupportedError
from .errors import LibraryError

P = TypeVar("P", bound=Payload)

Carried: TypeAlias = Tensor | tuple[Tensor, Tensor]

BY_ROW: Final = (Bf16Rows, Fp8Block128Rows, Fp8FnuzBlock128Rows, MxFp8Rows, MxFp4Rows)
BY_COLUMN: Final = (Fp8Block128ColumnRows, Fp8Block128PackedRows)
_WORD: Final = 4  # bytes of a scale element that DeepEP carries: float32, or int32


def require_carried(payload: type[Payload], carried: tuple[type[Payload], ...], library: str) -> None:
    """Raise UnsupportedError for a payload class that the library cannot carry."""
    if payload not in carried:
        names = ", ".join(cls.format.name for cls in carried)
        raise UnsupportedError(f"{library} cannot carry {payload.__qualname__}: what it delivers becomes one of {names}")


def scale_of(payload: Payload) -> Tensor | None:
    """Return the scales of a payload, if it has any."""
    return payload.scale if isinstance(payload, ScaledRows) else None


def in_words(payload: Payload) -> Carried:
    """Return the data, and scales in elements of four bytes: e8m0 bytes go four to an int32.

    Raises: ValueError where the scales of a row are no whole number of words.
    """
    data, scale = payload.data.contiguous(), scale_of(payload)
    if scale is None:
        return data
    if scale.dtype.itemsize == _WORD:
        return data, scale
    if scale.shape[1] % _WORD:
        raise ValueError(f"{scale.shape[1]} scales of a byte each fill no whole number of 4-byte words, which is all that DeepEP carries")
    return data, scale.view(torch.int32)


def from_words(payload: type[P], carried: Carried) -> P:
    """Return what arrived as the class that it left as. Raises: LibraryError for scales where there should be none, or the reverse."""
    return rebuild(payload, *carried) if isinstance(carried, tuple) else rebuild(payload, carried, None)


def rebuild(payload: type[P], data: Tensor, scale: Tensor | None) -> P:
    """Return data, and scales whose bytes are those of the class's own, as that class. Raises: LibraryError as ``from_words``."""
    make = cast("Callable[..., P]", payload)  # the classes of BY_ROW and BY_COLUMN alone get here: made of data, and of scales if the format has any
    spec = payload.format.scale
    if (spec is None) is not (scale is None):
        raise LibraryError(f"{payload.__qualname__} was sent, and arrived {'without' if scale is None else 'with'} scales")
    if spec is None or scale is None:
        return make(data)
    return make(data, scale if scale.dtype == spec.dtype else scale.view(spec.dtype))


def zero_row(carried: Tensor) -> Tensor:
    """Return one row of zero bytes, of the width and dtype of ``carried``: zero in every format, and as a scale of a zero."""
    width = carried.shape[1] * carried.dtype.itemsize
    return torch.zeros((1, width), dtype=torch.uint8, device=carried.device).view(carried.dtype)

"""The leading rows of a payload: data and scales cut together."""

from collections.abc import Callable
from typing import Final, TypeVar, cast

import attrs

from ..spec import ScaleOrder
from .base import Payload, ScaledRows

P = TypeVar("P", bound=Payload)

_BY_ROW: Final = (ScaleOrder.PER_ROW, ScaleOrder.ROW_MAJOR, ScaleOrder.ROW_MAJOR_PAIRS)


def head(payload: P, rows: int) -> P:
    """Return the first ``rows`` rows as views of the same memory.

    Raises: ValueError for scales that lie in another order than by rows: a cut of those is no longer in the order that their class names.
    """
    changes = {"data": payload.data[:rows]}
    scale = payload.format.scale
    if scale is not None and scale.order is not ScaleOrder.SCALAR:
        if not isinstance(payload, ScaledRows) or scale.order not in _BY_ROW:
            raise ValueError(f"{type(payload).__qualname__} cannot be cut to {rows} rows: its scales are {scale.order.value}")
        changes["scale"] = payload.scale[:rows]
    return cast("Callable[..., P]", attrs.evolve)(payload, **changes)  # every payload class is an attrs class, which the base cannot say

"""Group lists of every kind become ranges of rows; and what is remembered of lists and indices, so that a wrong kind is noticed."""

from collections import deque
from typing import Final, final

import attrs
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import GroupListType

from .misuse import Judge, Reason, require

_REMEMBERED: Final = 16  # results


@final
@attrs.frozen
class Span:
    """Rows ``start`` to ``stop`` belong to ``group``."""

    group: int
    start: int
    stop: int


@final
class Provenance:
    """Remember which kind the last results were, by their values: casts and copies keep what they are.

    Nothing is said of values that were seen as both kinds, such as a row index for one token.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[object, Tensor]] = deque(maxlen=_REMEMBERED)

    def remember(self, kind: object, values: Tensor) -> None:
        """Remember a result of a kind."""
        self._seen.append((kind, values.detach().clone()))

    def contradicts(self, kind: object, values: Tensor) -> bool:
        """Return whether these values were a result of other kinds alone; a single value is of every kind."""
        if values.numel() < 2:
            return False
        kinds = {seen for seen, tensor in self._seen if tensor.shape == values.shape and torch.equal(tensor.long(), values.long())}
        return bool(kinds) and kind not in kinds


def spans(judge: Judge, provenance: Provenance, group_list: Tensor, kind: GroupListType, groups: int, rows: int) -> list[Span]:
    """Return the rows of each group that a grouped product reads.

    Raises: EmulatedRefusal for another shape or dtype; EmulatedMisuse, in strict mode, for a list that is known to be of another kind, for cumulative
    counts that fall, and for more rows than there are.
    """
    require(group_list.dtype == torch.int64, f"group_list is int64, not {group_list.dtype}")
    shape = (group_list.shape[0], 2) if kind == GroupListType.PAIRS else (groups,)
    require(tuple(group_list.shape) == shape, f"group_list of {kind!r} is {list(shape)}, not {list(group_list.shape)}")
    if provenance.contradicts(kind, group_list):
        judge.silent(Reason.GROUP_LIST_KIND, f"this list is not of {kind!r}")
    ranges = _pairs(group_list) if kind == GroupListType.PAIRS else _of_each(judge, group_list, kind)
    if ranges and max(span.stop for span in ranges) > rows:
        judge.silent(Reason.GROUP_TOTAL, f"{max(span.stop for span in ranges)} of {rows} rows")
    return [Span(span.group, min(span.start, rows), min(span.stop, rows)) for span in ranges]


def _pairs(group_list: Tensor) -> list[Span]:
    found: list[Span] = []
    at = 0
    for group, count in ((int(group), int(count)) for group, count in group_list):
        if count <= 0:
            break
        found.append(Span(group, at, at + count))
        at += count
    return found


def _of_each(judge: Judge, group_list: Tensor, kind: GroupListType) -> list[Span]:
    require(bool((group_list >= 0).all()), f"group_list has negative values: {group_list}")
    ends = group_list if kind == GroupListType.CUMSUM else group_list.cumsum(0)
    if bool((ends.diff() < 0).any()):
        judge.silent(Reason.GROUP_LIST_FALLS, f"{ends}")
    found: list[Span] = []
    start = 0
    for group, end in enumerate(int(end) for end in ends):
        found.append(Span(group, start, max(start, end)))
        start = end
    return found

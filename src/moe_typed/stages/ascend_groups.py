"""How many rows each expert has, and where each route's row is, as the operators of the Ascend NPU say it.

Cumulative counts and counts are int64 tensors of one shape, and operators tell them apart by an integer whose default differs from one to the next:
here they are two classes, and the integer follows from the class. So it is with the two orders of row indices, which agree where there is one token,
or one route a token, and hence pass tests that have no more.
"""

from abc import ABC, abstractmethod
from typing import Annotated, TypeAlias, final

import torch
from jaxtyping import Int32, Int64
from torch import Tensor
from typing_extensions import override

from ..boundary import Layout, boundary, value_error

_CONTIGUOUS = Layout(contiguous=True)


class GroupList(ABC):
    """The base of all group lists. Rows lie by expert, without gaps; those after the last expert's are undefined."""

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """Return how many experts there are."""

    @abstractmethod
    def counted(self) -> "GroupCounts":
        """Return the rows of each expert; no host sync."""

    @abstractmethod
    def ended(self) -> "GroupEnds":
        """Return where the rows of each expert end; no host sync."""

    def total(self) -> Tensor:
        """Return how many leading rows are defined, int64 (1,); no host sync."""
        return self.ended().ends[-1:]

    def experts_of_rows(self, rows: int) -> Tensor:
        """Return the expert of each of ``rows`` rows, -1 for undefined ones: int32 (rows,); no host sync."""
        ends = self.ended().ends
        row = torch.arange(rows, dtype=torch.int64, device=ends.device)
        expert = torch.searchsorted(ends, row, right=True, out_int32=True)
        return torch.where(row < ends[-1], expert, -1)


@final
@boundary
class GroupEnds(GroupList):
    """Cumulative counts: entry e is the number of rows of experts 0 to e, the last one the total. ``ends``: int64 (experts,)."""

    ends: Annotated[Int64[Tensor, " experts"], _CONTIGUOUS]

    def check_values(self) -> None:
        """Raise BoundaryError for ends that fall: counts do, unless they happen to rise."""
        if bool((self.ends.diff(prepend=self.ends.new_zeros(1)) < 0).any()):
            raise value_error(self, "ends", "falls from one expert to the next", "rows of each expert are GroupCounts")

    @property
    @override
    def num_groups(self) -> int:
        return self.ends.shape[0]

    @override
    def counted(self) -> "GroupCounts":
        return GroupCounts(self.ends.diff(prepend=self.ends.new_zeros(1)))

    @override
    def ended(self) -> "GroupEnds":
        return self


@final
@boundary
class GroupCounts(GroupList):
    """Counts: entry e is the number of rows of expert e. ``counts``: int64 (experts,)."""

    counts: Annotated[Int64[Tensor, " experts"], _CONTIGUOUS]

    def check_values(self) -> None:
        """Raise BoundaryError for a negative count."""
        if bool((self.counts < 0).any()):
            raise value_error(self, "counts", "holds a negative count")

    @property
    @override
    def num_groups(self) -> int:
        return self.counts.shape[0]

    @override
    def counted(self) -> "GroupCounts":
        return self

    @override
    def ended(self) -> "GroupEnds":
        return GroupEnds(self.counts.cumsum(0))


@final
@boundary
class GroupPairs(GroupList):
    """Pairs (expert, count) of the experts that have rows, in order; after the last of them a pair without rows, and then anything.

    ``pairs``: int64 (experts, 2).
    """

    pairs: Annotated[Int64[Tensor, "experts 2"], _CONTIGUOUS]

    def check_values(self) -> None:
        """Raise BoundaryError for experts before the list's end that do not exist, or do not rise: rows lie by expert."""
        expert, count = self.pairs.unbind(1)
        held = expert[_before_end(count).to(torch.bool)]
        if bool(((held < 0) | (held >= self.num_groups)).any()):
            raise value_error(self, "pairs", f"names an expert outside 0..{self.num_groups - 1}", "a pair is (expert, count)")
        if bool((held.diff() <= 0).any()):
            raise value_error(self, "pairs", "names experts that do not rise", "a pair is (expert, count)")

    @property
    @override
    def num_groups(self) -> int:
        return self.pairs.shape[0]

    @override
    def counted(self) -> "GroupCounts":
        expert, count = self.pairs.unbind(1)
        valid = _before_end(count)
        return GroupCounts(torch.zeros_like(count).scatter_add(0, expert * valid, count * valid))

    @override
    def ended(self) -> "GroupEnds":
        return self.counted().ended()


def _before_end(count: Tensor) -> Tensor:
    """Return int64 (experts,), 1 for the pairs before the first without rows, which ends the list."""
    return (count > 0).to(torch.int64).cumprod(0)


AnyGroupList: TypeAlias = GroupEnds | GroupCounts | GroupPairs


class RowIndex(ABC):
    """The base of row indices: where the row of each route of (tokens, k) is among the sorted rows."""

    rows: Tensor


@final
@boundary
class KMajorIndex(RowIndex):
    """The row of route (t, j) stands at ``j * tokens + t``: what routing v1 emits. ``rows``: int32 (routes,)."""

    rows: Annotated[Int32[Tensor, " routes"], _CONTIGUOUS]

    def check_values(self) -> None:
        """Raise BoundaryError unless every row stands once."""
        _check_permutation(self)


@final
@boundary
class RowMajorIndex(RowIndex):
    """The row of route (t, j) stands at ``t * k + j``: what routing v2 emits, where every expert is on this rank. ``rows``: int32 (routes,)."""

    rows: Annotated[Int32[Tensor, " routes"], _CONTIGUOUS]

    def check_values(self) -> None:
        """Raise BoundaryError unless every row stands once: a -1 is a route to another rank, which this index does not have."""
        _check_permutation(self)


@final
@boundary
class RowMajorSparseIndex(RowIndex):
    """As RowMajorIndex, with -1 for the routes to experts of other ranks. ``rows``: int32 (routes,)."""

    rows: Annotated[Int32[Tensor, " routes"], _CONTIGUOUS]

    def check_values(self) -> None:
        """Raise BoundaryError unless every row that is here stands once, and all others are -1."""
        here = self.rows[self.rows != -1]
        if not _is_permutation(here):
            raise value_error(self, "rows", f"does not hold each of 0..{here.shape[0] - 1} once, and -1 for the others")


def _check_permutation(index: KMajorIndex | RowMajorIndex) -> None:
    if not _is_permutation(index.rows):
        raise value_error(index, "rows", f"does not hold each of 0..{index.rows.shape[0] - 1} once", "with -1 it is a RowMajorSparseIndex")


def _is_permutation(rows: Tensor) -> bool:
    return torch.equal(rows.sort().values, torch.arange(rows.shape[0], dtype=rows.dtype, device=rows.device))

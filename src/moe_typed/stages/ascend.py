"""The Ascend NPU: rows sorted by expert, one for each route, and what its runner takes and returns.

Where experts are cut among ranks (AscendTP), nothing is sent: rows are sorted for the grouped products, and combine brings them back. The finishing
belongs to the dispatcher that did the sorting: the order of its index is known there, and nowhere else.
"""

from typing import Annotated, ClassVar, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from ..boundary import Floating, Rename, boundary, value_error
from ..formats import Payload
from ..routing import LogicalIds, Routing
from .ascend_groups import AnyGroupList, GroupCounts, GroupEnds, GroupPairs, KMajorIndex, RowMajorIndex
from .base import Carry, CombineInput, DispatchOutput, RunnerInput, RunnerOutput
from .handles import Handle
from .tensor_parallel import TensorParallel

P_co = TypeVar("P_co", bound=Payload, covariant=True)
Q = TypeVar("Q", bound=Payload)

_ROUTES = Rename({"rows": "routes"})


def check_total(value: object, payload: Payload, groups: AnyGroupList) -> None:
    """Raise BoundaryError for groups of more rows than there are, and for defined rows whose data cannot be right."""
    total = int(groups.total())
    if total > payload.rows:
        raise value_error(value, "groups", f"are of {total} rows, but there are {payload.rows}", "GroupCounts read as GroupEnds, or the reverse?")
    payload.check_live(total)


def check_routes(value: object, rows: int, origin: Routing[LogicalIds]) -> None:
    """Raise BoundaryError unless there is a row for each route of the tokens."""
    tokens, k = origin.topk_ids.shape
    if rows != tokens * k:
        hint = "it is the routing that was dispatched"
        raise value_error(value, "origin", f"is of {tokens} tokens and {k} routes each, but there are {rows} rows", hint)


@final
@boundary
class AscendRowsInput(RunnerInput):
    """Rows sorted by expert, router weights pending; those after the groups' total are undefined, as are their results.

    ``out_dtype``: bf16 or fp16, the model's; quantised rows do not tell it.
    """

    payload: Payload
    groups: GroupEnds | GroupCounts | GroupPairs
    out_dtype: torch.dtype

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_total``."""
        check_total(self, self.payload, self.groups)


@final
@boundary
class AscendSlicedRowsInput(RunnerInput):
    """The same, for experts whose results are columns on each rank: every rank of the group must have the same rows."""

    payload: Payload
    groups: GroupEnds | GroupCounts | GroupPairs
    out_dtype: torch.dtype

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_total``."""
        check_total(self, self.payload, self.groups)


@final
@boundary
class SlicedRowsOutput(RunnerOutput):
    """This rank's columns of one result a row, router weights pending. ``hidden_states``: (rows, hidden / ranks)."""

    hidden_states: Floating[Tensor, "rows columns"]
    ranks: TensorParallel


@final
class AscendTPHandle(Handle[None]):
    """The right to combine a dispatch, once. There is nothing to hold but the order of its calls."""


@final
@boundary
class SummandRows:
    """One result a route, whose sum over the ranks is still owed. ``hidden_states``: (routes, hidden)."""

    hidden_states: Floating[Tensor, "routes hidden"]


@final
@boundary
class SlicedRows:
    """This rank's columns of one whole result a route; ``ranks`` hold the others. ``hidden_states``: (routes, hidden / ranks)."""

    hidden_states: Floating[Tensor, "routes columns"]
    ranks: TensorParallel


@final
@boundary
class AscendTPCarry(Carry):
    """What combine needs beside the expert results."""

    groups: GroupEnds | GroupCounts | GroupPairs
    index: KMajorIndex | RowMajorIndex
    origin: Routing[LogicalIds]
    out_dtype: torch.dtype
    handle: AscendTPHandle


@final
@boundary
class AscendTPCombineInput(CombineInput):
    """Expert results sorted by expert, one a route, router weights pending; all of them are read."""

    results: SummandRows | SlicedRows
    groups: GroupEnds | GroupCounts | GroupPairs
    index: KMajorIndex | RowMajorIndex
    origin: Annotated[Routing[LogicalIds], Rename({"rows": "tokens"})]
    out_dtype: torch.dtype
    handle: AscendTPHandle

    def check_values(self) -> None:
        """Raise BoundaryError for rows that no expert computed, which combine would read, and for another routing than theirs."""
        rows, total = self.results.hidden_states.shape[0], int(self.groups.total())
        if total != rows:
            raise value_error(self, "groups", f"are of {total} rows, but {rows} results are read: the others are undefined")
        check_routes(self, rows, self.origin)


@final
@boundary
class AscendTPDispatchOutput(DispatchOutput[P_co, AscendTPCombineInput]):
    """Rows sorted by expert, one a route, on this rank; the payload is owned.

    ``index`` says where each route's row is; ``origin`` is the routing of the tokens, whose weights combine applies. Routes of padding rows go to
    expert 0, and combine leaves them out.
    """

    combine_input: ClassVar[type[CombineInput]] = AscendTPCombineInput
    payload: Annotated[P_co, _ROUTES]
    groups: GroupEnds | GroupCounts | GroupPairs
    index: KMajorIndex | RowMajorIndex
    origin: Annotated[Routing[LogicalIds], Rename({"rows": "tokens"})]
    out_dtype: torch.dtype
    handle: AscendTPHandle

    def check_values(self) -> None:
        """Raise BoundaryError as ``check_total``, for groups of other than all rows, and for another routing than theirs."""
        check_total(self, self.payload, self.groups)
        total = int(self.groups.total())
        if total != self.payload.rows:
            raise value_error(self, "groups", f"are of {total} rows, but each of the {self.payload.rows} is a route's")
        check_routes(self, self.payload.rows, self.origin)

    @property
    @override
    def live_rows(self) -> None:
        """Return None: every row is a route's."""

    @override
    def with_payload(self, payload: Q) -> "AscendTPDispatchOutput[Q]":
        return AscendTPDispatchOutput(payload, self.groups, self.index, self.origin, self.out_dtype, self.handle)

    @override
    def fail(self, error: BaseException) -> None:
        self.handle.fail(error)

    @property
    def carry(self) -> AscendTPCarry:
        """Return what combine needs beside the expert results."""
        return AscendTPCarry(self.groups, self.index, self.origin, self.out_dtype, self.handle)

"""The Ascend NPU where experts are cut among ranks: rows are sorted by expert on the way in, and finished on the way out. Nothing is sent."""

from collections.abc import Callable
from typing import Generic, TypeVar, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..boundary import BoundaryError, value_error
from ..experts import ExpertStage
from ..formats import Bf16Rows, Fp16Rows, Int8TokenRows, MxFp8PairRows, Payload
from ..routing import LogicalIds, Routing, live_mask
from ..runners.ascend.components import (
    FinalizeKMajor,
    FinalizeRouting,
    FinalizeRowMajor,
    InitRouting,
    InitRoutingV1,
    InitRoutingV2,
    InitRoutingV2Int8,
    InitRoutingV2MxFp8,
    InitRoutingV2On310P,
)
from ..runners.ascend.ops import AscendOps, load_ops
from ..runners.ascend.runner import require_results
from ..stages import (
    AnyGroupList,
    AscendTPCombineInput,
    AscendTPDispatchOutput,
    AscendTPHandle,
    CompleteResult,
    DispatchOutput,
    KMajorIndex,
    PartialResult,
    RowMajorIndex,
    SummandRows,
)
from .base import Dispatcher, MoELayer

M_contra = TypeVar("M_contra", bound=Bf16Rows | Fp16Rows, contravariant=True)
M = TypeVar("M", bound=Bf16Rows | Fp16Rows)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
P = TypeVar("P", bound=Payload)
X = TypeVar("X", bound=KMajorIndex | RowMajorIndex)


@final
@attrs.frozen(eq=False)
class TPRouting(Generic[M_contra, P_co]):
    """Initial and final routing that belong together: made by ``Sorted(init).finished_by(finalize)``, which compares their indices."""

    init: InitRouting[M_contra, P_co, KMajorIndex | RowMajorIndex, AnyGroupList]
    finalize: Callable[[Tensor, Tensor, KMajorIndex | RowMajorIndex], Tensor]


@final
@attrs.frozen(eq=False)
class Sorted(Generic[M_contra, P_co, X]):
    """Initial routing that still lacks its way back."""

    init: InitRouting[M_contra, P_co, X, AnyGroupList]

    def finished_by(self, finalize: FinalizeRouting[X]) -> TPRouting[M_contra, P_co]:
        """Return both: the final routing must read the index that the initial one emits."""

        def finish(rows: Tensor, weights: Tensor, index: KMajorIndex | RowMajorIndex) -> Tensor:
            if not isinstance(index, finalize.index):
                raise value_error(index, "rows", f"are in another order than {type(finalize).__qualname__} reads", "combine with what dispatched")
            return finalize.finalize(rows, weights, index)

        return TPRouting(self.init, finish)


@final
class AscendTPDispatcher(Dispatcher[M_contra, P_co, AscendTPCombineInput, LogicalIds, PartialResult | CompleteResult]):
    """Sort rows for the experts of this rank, of which every rank has a part.

    What combine returns says whether the sum over the ranks is still owed: ``completed`` pays it, if so. Several dispatches may be in flight.
    """

    def __init__(self, routing: TPRouting[M_contra, P_co]) -> None:
        self.routing = routing

    @override
    def __repr__(self) -> str:
        return f"AscendTPDispatcher({type(self.routing.init).__qualname__})"

    @property
    @override
    def variant(self) -> type[DispatchOutput[P_co, AscendTPCombineInput]]:
        return AscendTPDispatchOutput

    @property
    @override
    def payload(self) -> type[P_co]:
        return self.routing.init.payload

    @override
    def dispatch(self, rows: M_contra, routing: Routing[LogicalIds]) -> AscendTPDispatchOutput[P_co]:
        """Sort. Routes to nowhere go to expert 0: the operators take no other ids, and combine leaves them out.

        Raises: BoundaryError, at every debug level, for rows of another class than the routing's, and for the routing of other rows: routing v1 would
        take each row modulo their number.
        """
        wanted = self.routing.init.rows
        if not isinstance(rows, wanted):
            got = type(rows).__qualname__
            raise BoundaryError(f"rows are {got}, but {self!r} takes {wanted.__qualname__}", hint="make the routing for the model's rows")
        routing.demand(LogicalIds)
        tokens = routing.topk_ids.shape[0]
        if tokens != rows.rows:
            raise value_error(routing, "topk_ids", f"is of {tokens} rows, but {rows.rows} are dispatched", "route the rows that are dispatched")
        ids = torch.where(_goes(routing), routing.topk_ids, 0)
        routed = self.routing.init.route(rows, ids, routing.num_experts)
        return AscendTPDispatchOutput(routed.payload, routed.groups, routed.index, routing, rows.data.dtype, AscendTPHandle(None, self))

    @override
    def then(self, experts: ExpertStage[P_co]) -> MoELayer[M_contra, P_co, AscendTPCombineInput, LogicalIds, PartialResult | CompleteResult]:
        """Return the layer of this dispatcher and these experts.

        Raises: as ``Dispatcher.then``; UnsupportedError for weights whose products cannot give the model's rows, which quantised rows do not tell.
        """
        layer = super().then(experts)
        require_results(experts.runner, self.routing.init.rows)
        return layer

    @override
    def combine(self, combine_input: AscendTPCombineInput) -> PartialResult | CompleteResult:
        combine_input.handle.consume(self)
        try:
            return self._finish(combine_input)
        except Exception as error:
            combine_input.handle.fail(error)
            raise

    def _finish(self, combine_input: AscendTPCombineInput) -> PartialResult | CompleteResult:
        results, origin = combine_input.results, combine_input.origin
        tokens = origin.topk_ids.shape[0]
        if tokens:
            goes = _goes(origin)
            weights = torch.where(goes, origin.topk_weights, 0.0).to(combine_input.out_dtype)
            finished = self.routing.finalize(results.hidden_states, weights, combine_input.index)
            # A row that goes nowhere is zero, whatever padding holds: 0 * NaN would not be.
            finished = origin.scaling.settle(torch.where(goes.any(1, keepdim=True), finished, 0.0))
        else:
            finished = results.hidden_states.new_empty((0, results.hidden_states.shape[1]))
        if isinstance(results, SummandRows):
            return PartialResult(finished)
        return CompleteResult(results.ranks.all_gather(finished))


def _goes(routing: Routing[LogicalIds]) -> Tensor:
    """Return bool (tokens, k), true for routes that go to an expert; no host sync."""
    goes = routing.topk_ids >= 0
    return goes if routing.all_live else goes & live_mask(routing)


# ---- the pairs that belong together -----------------------------------------------------------------------------------------------------


def as_they_are(rows: type[M], ops: AscendOps | None = None) -> TPRouting[M, M]:
    """Return routing v2 of rows as they are, with its finalisation. Raises: ImportError where torch_npu is not installed and no ops are given."""
    found = load_ops() if ops is None else ops
    return Sorted(InitRoutingV2(found, rows)).finished_by(FinalizeRowMajor(found))


def as_they_are_v1(rows: type[M], ops: AscendOps | None = None) -> TPRouting[M, M]:
    """Return routing v1 of rows as they are, for older toolkits. Raises: as ``as_they_are``."""
    found = load_ops() if ops is None else ops
    return Sorted(InitRoutingV1(found, rows)).finished_by(FinalizeKMajor(found))


def on_310p(ops: AscendOps | None = None) -> TPRouting[Fp16Rows, Fp16Rows]:
    """Return routing v2 on Atlas inference series, which gives cumulative counts and takes no bf16. Raises: as ``as_they_are``."""
    found = load_ops() if ops is None else ops
    return Sorted(InitRoutingV2On310P(found, Fp16Rows)).finished_by(FinalizeRowMajor(found))


def as_int8(rows: type[M], ops: AscendOps | None = None) -> TPRouting[M, Int8TokenRows]:
    """Return routing v2 that quantises rows of the model to int8 on the way. Raises: as ``as_they_are``."""
    found = load_ops() if ops is None else ops
    return Sorted(InitRoutingV2Int8(found, rows)).finished_by(FinalizeRowMajor(found))


def as_mxfp8(rows: type[M], ops: AscendOps | None = None) -> TPRouting[M, MxFp8PairRows]:
    """Return routing v2 that quantises rows of the model to mxfp8 on the way (Ascend 950). Raises: as ``as_they_are``."""
    found = load_ops() if ops is None else ops
    return Sorted(InitRoutingV2MxFp8(found, rows)).finished_by(FinalizeRowMajor(found))

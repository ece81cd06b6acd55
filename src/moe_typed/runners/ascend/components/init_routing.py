"""Initial routing: rows of tokens become rows of routes, sorted by expert."""

from abc import ABC, abstractmethod
from typing import Annotated, Generic, NewType, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from ....boundary import Rename, boundary
from ....formats import Fp16Rows, Int8TokenRows, MxFp8PairRows, Payload
from ....formats.payloads.ascend import PAIR, PAIR_CHANNELS
from ....stages import GroupCounts, GroupEnds, GroupList, KMajorIndex, RowIndex, RowMajorIndex, RowMajorSparseIndex
from ...base import UnsupportedError
from ..ops import AscendOps, GroupListType, RoutingPadMode, RoutingQuantMode, RowIndexType
from .rows import F, HalfRows, paired, rows_like

M_contra = TypeVar("M_contra", bound=HalfRows, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
X_co = TypeVar("X_co", bound=RowIndex, covariant=True)
G_co = TypeVar("G_co", bound=GroupList, covariant=True)

ActiveTokens = NewType("ActiveTokens", int)
"""What routing v1 calls active_num: how many tokens count."""

ActiveRows = NewType("ActiveRows", int)
"""What routing v2 calls active_num: how many rows, one for each route, are made."""


@final
@boundary
class RoutedRows(Generic[P_co, X_co, G_co]):
    """Rows sorted by expert, where each route's row is, and how many each expert has."""

    payload: Annotated[P_co, Rename({"rows": "routes"})]
    index: X_co
    groups: G_co


class InitRouting(ABC, Generic[M_contra, P_co, X_co, G_co]):
    """The base: takes rows ``M`` of tokens, makes rows ``P`` of routes with an index ``X`` and a group list ``G``. ``rows``: the class ``M``."""

    def __init__(self, ops: AscendOps, rows: type[Payload]) -> None:
        self._ops, self.rows = ops, rows

    @property
    @abstractmethod
    def payload(self) -> type[P_co]:
        """Return the class of the rows that are made."""

    @abstractmethod
    def route(self, rows: M_contra, topk_ids: Tensor, num_experts: int) -> RoutedRows[P_co, X_co, G_co]:
        """Sort. ``topk_ids``: int32 (tokens, k), each an expert; tokens may be none, and then no operator is called."""


def call_v1(ops: AscendOps, data: Tensor, topk_ids: Tensor, active: ActiveTokens) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, K-major index and sorted experts. The operator is told the row of route (t, j): ``j * tokens + t``."""
    tokens, k = topk_ids.shape
    row_idx = torch.arange(tokens * k, dtype=torch.int32, device=topk_ids.device).view(k, tokens).T.contiguous()
    return ops.npu_moe_init_routing(data, row_idx, topk_ids, active)


def call_v2(
    ops: AscendOps, data: Tensor, topk_ids: Tensor, num_experts: int, active: ActiveRows, quant: RoutingQuantMode, held: tuple[int, int] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, row-major index, rows of each expert and scales.

    Counts, a flag that is set and as many active rows as routes are what every version of the operator supports. ``held``: the first expert of this
    rank and the one after its last; None for all.
    """
    return ops.npu_moe_init_routing_v2(
        data,
        topk_ids,
        active_num=active,
        expert_num=num_experts,
        drop_pad_mode=RoutingPadMode.DROPLESS,
        expert_tokens_num_type=GroupListType.COUNT,
        expert_tokens_num_flag=True,
        quant_mode=quant,
        active_expert_range=[0, num_experts] if held is None else [*held],
        row_idx_type=RowIndexType.GATHER,
    )


def _no_index(like: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int32, device=like.device)


def _no_groups(like: Tensor, num_experts: int) -> Tensor:
    return torch.zeros(num_experts, dtype=torch.int64, device=like.device)


@final
class InitRoutingV1(InitRouting[F, F, KMajorIndex, GroupEnds]):
    """``npu_moe_init_routing`` with ``npu_moe_compute_expert_tokens``: a K-major index and cumulative counts."""

    def __init__(self, ops: AscendOps, rows: type[F]) -> None:
        super().__init__(ops, rows)
        self._rows = rows

    @property
    @override
    def payload(self) -> type[F]:
        return self._rows

    @override
    def route(self, rows: F, topk_ids: Tensor, num_experts: int) -> RoutedRows[F, KMajorIndex, GroupEnds]:
        if not rows.rows:
            return RoutedRows(rows, KMajorIndex(_no_index(topk_ids)), GroupEnds(_no_groups(topk_ids, num_experts)))
        data, index, experts = call_v1(self._ops, rows.data, topk_ids, ActiveTokens(rows.rows))
        ends = self._ops.npu_moe_compute_expert_tokens(experts, num_experts)
        return RoutedRows(rows_like(self._rows, data), KMajorIndex(index), GroupEnds(ends.to(torch.int64)))


@final
class InitRoutingV2(InitRouting[F, F, RowMajorIndex, GroupCounts]):
    """``npu_moe_init_routing_v2`` of rows as they are: a row-major index and counts."""

    def __init__(self, ops: AscendOps, rows: type[F]) -> None:
        super().__init__(ops, rows)
        self._rows = rows

    @property
    @override
    def payload(self) -> type[F]:
        return self._rows

    @override
    def route(self, rows: F, topk_ids: Tensor, num_experts: int) -> RoutedRows[F, RowMajorIndex, GroupCounts]:
        if not rows.rows:
            return RoutedRows(rows, RowMajorIndex(_no_index(topk_ids)), GroupCounts(_no_groups(topk_ids, num_experts)))
        active = ActiveRows(topk_ids.numel())
        data, index, counts, _ = call_v2(self._ops, rows.data, topk_ids, num_experts, active, RoutingQuantMode.NONE)
        return RoutedRows(rows_like(self._rows, data), RowMajorIndex(index), GroupCounts(counts))


@final
class InitRoutingV2On310P(InitRouting[Fp16Rows, Fp16Rows, RowMajorIndex, GroupEnds]):
    """The same on Atlas inference series (310P), where the operator gives cumulative counts whatever is asked; float16 rows alone.

    Raises: UnsupportedError for another class of rows.
    """

    def __init__(self, ops: AscendOps, rows: type[Fp16Rows] = Fp16Rows) -> None:
        if rows is not Fp16Rows:  # not every caller runs a checker
            raise UnsupportedError(f"routing on Atlas inference series (310P) takes Fp16Rows, not {rows.__qualname__}: it has no bfloat16")
        super().__init__(ops, rows)

    @property
    @override
    def payload(self) -> type[Fp16Rows]:
        return Fp16Rows

    @override
    def route(self, rows: Fp16Rows, topk_ids: Tensor, num_experts: int) -> RoutedRows[Fp16Rows, RowMajorIndex, GroupEnds]:
        if not rows.rows:
            return RoutedRows(rows, RowMajorIndex(_no_index(topk_ids)), GroupEnds(_no_groups(topk_ids, num_experts)))
        data, index, ends, _ = self._ops.npu_moe_init_routing_v2(
            rows.data,
            topk_ids,
            active_num=ActiveRows(topk_ids.numel()),
            expert_num=num_experts,
            expert_tokens_num_type=GroupListType.CUMSUM,
            expert_tokens_num_flag=True,
            quant_mode=RoutingQuantMode.NONE,
            active_expert_range=[0, num_experts],
            row_idx_type=RowIndexType.GATHER,
        )
        return RoutedRows(Fp16Rows(data), RowMajorIndex(index), GroupEnds(ends))


@final
class RangeInitRouting(InitRouting[F, F, RowMajorSparseIndex, GroupCounts]):
    """``npu_moe_init_routing_v2`` for a rank that holds experts ``first`` to ``first + count - 1``: routes to others have -1 for their row."""

    def __init__(self, ops: AscendOps, rows: type[F], first: int, count: int) -> None:
        super().__init__(ops, rows)
        self._rows, self._first, self._count = rows, first, count

    @property
    @override
    def payload(self) -> type[F]:
        return self._rows

    @override
    def route(self, rows: F, topk_ids: Tensor, num_experts: int) -> RoutedRows[F, RowMajorSparseIndex, GroupCounts]:
        if not rows.rows:
            return RoutedRows(rows, RowMajorSparseIndex(_no_index(topk_ids)), GroupCounts(_no_groups(topk_ids, self._count)))
        held, active = (self._first, self._first + self._count), ActiveRows(topk_ids.numel())
        data, index, counts, _ = call_v2(self._ops, rows.data, topk_ids, num_experts, active, RoutingQuantMode.NONE, held)
        return RoutedRows(rows_like(self._rows, data), RowMajorSparseIndex(index), GroupCounts(counts))


@final
class InitRoutingV2Int8(InitRouting[F, Int8TokenRows, RowMajorIndex, GroupCounts]):
    """``npu_moe_init_routing_v2`` that quantises on the way: int8 with a scale a row."""

    def __init__(self, ops: AscendOps, rows: type[F]) -> None:
        super().__init__(ops, rows)

    @property
    @override
    def payload(self) -> type[Int8TokenRows]:
        return Int8TokenRows

    @override
    def route(self, rows: F, topk_ids: Tensor, num_experts: int) -> RoutedRows[Int8TokenRows, RowMajorIndex, GroupCounts]:
        if not rows.rows:
            return _no_int8(rows, topk_ids, num_experts)
        active = ActiveRows(topk_ids.numel())
        data, index, counts, scale = call_v2(self._ops, rows.data, topk_ids, num_experts, active, RoutingQuantMode.DYNAMIC)
        return RoutedRows(Int8TokenRows(data, scale), RowMajorIndex(index), GroupCounts(counts))


@final
class InitRoutingQuant(InitRouting[F, Int8TokenRows, RowMajorIndex, GroupCounts]):
    """``npu_moe_init_routing_quant``: the same by the older operator, whose defaults of sizes fit few models."""

    def __init__(self, ops: AscendOps, rows: type[F]) -> None:
        super().__init__(ops, rows)

    @property
    @override
    def payload(self) -> type[Int8TokenRows]:
        return Int8TokenRows

    @override
    def route(self, rows: F, topk_ids: Tensor, num_experts: int) -> RoutedRows[Int8TokenRows, RowMajorIndex, GroupCounts]:
        if not rows.rows:
            return _no_int8(rows, topk_ids, num_experts)
        data, index, counts, _, scale = self._ops.npu_moe_init_routing_quant(
            rows.data,
            topk_ids,
            active_num=ActiveRows(topk_ids.numel()),
            expert_num=num_experts,
            drop_pad_mode=RoutingPadMode.DROPLESS,
            expert_tokens_num_mode=GroupListType.COUNT,
            quant_mode=RoutingQuantMode.DYNAMIC,
        )
        return RoutedRows(Int8TokenRows(data, scale), RowMajorIndex(index), GroupCounts(counts.to(torch.int64)))


@final
class InitRoutingV2MxFp8(InitRouting[F, MxFp8PairRows, RowMajorIndex, GroupCounts]):
    """``npu_moe_init_routing_v2`` that quantises to mxfp8 (Ascend 950). Its scales come in two dims, and are paired here. 64 divides the columns.

    Exponents follow the ceiling rule, those of ``DynamicMxFp8Quant`` the floor rule: neither's bytes are the other's.
    """

    def __init__(self, ops: AscendOps, rows: type[F]) -> None:
        super().__init__(ops, rows)

    @property
    @override
    def payload(self) -> type[MxFp8PairRows]:
        return MxFp8PairRows

    @override
    def route(self, rows: F, topk_ids: Tensor, num_experts: int) -> RoutedRows[MxFp8PairRows, RowMajorIndex, GroupCounts]:
        if not rows.rows:
            empty = rows.data.to(torch.float8_e4m3fn)
            scale = torch.empty((0, rows.hidden // PAIR_CHANNELS, PAIR), dtype=torch.uint8, device=empty.device).view(torch.float8_e8m0fnu)
            index = RowMajorIndex(_no_index(topk_ids))
            return RoutedRows(MxFp8PairRows(empty, scale), index, GroupCounts(_no_groups(topk_ids, num_experts)))
        active = ActiveRows(topk_ids.numel())
        data, index_rows, counts, scale = call_v2(self._ops, rows.data, topk_ids, num_experts, active, RoutingQuantMode.MXFP8_E4M3)
        return RoutedRows(MxFp8PairRows(data, paired(scale)), RowMajorIndex(index_rows), GroupCounts(counts))


def _no_int8(rows: HalfRows, topk_ids: Tensor, num_experts: int) -> RoutedRows[Int8TokenRows, RowMajorIndex, GroupCounts]:
    scale = torch.empty(0, dtype=torch.float32, device=rows.data.device)
    payload = Int8TokenRows(rows.data.to(torch.int8), scale)
    return RoutedRows(payload, RowMajorIndex(_no_index(topk_ids)), GroupCounts(_no_groups(topk_ids, num_experts)))

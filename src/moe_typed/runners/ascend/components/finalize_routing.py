"""Final routing: rows of routes become rows of tokens, weighted and summed. Each reads one order of index, and says so in its type."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar, final

from torch import Tensor
from typing_extensions import override

from ....boundary import BoundaryError
from ....stages import KMajorIndex, RowIndex, RowMajorIndex, RowMajorSparseIndex, TensorParallel
from ..ops import AscendOps, FinalizeMode

X = TypeVar("X", bound=RowIndex)


class FinalizeRouting(ABC, Generic[X]):
    """The base: reads an index ``X``."""

    @property
    @abstractmethod
    def index(self) -> type[X]:
        """Return the class of the index."""

    @abstractmethod
    def finalize(self, rows: Tensor, weights: Tensor, index: X) -> Tensor:
        """Return (tokens, n), the sum over k of weight * row.

        ``rows``: bf16 or fp16 (routes, n). ``weights``: (tokens, k) in the rows' dtype. Raises: BoundaryError for weights in another: the operators
        give garbage then, or refuse.
        """


def _require_dtype(rows: Tensor, weights: Tensor) -> None:
    if weights.dtype != rows.dtype:
        raise BoundaryError(
            f"router weights are {weights.dtype}, but the rows {rows.dtype}; the finishing operators need one dtype",
            boundary="FinalizeRouting",
            field="weights",
            hint="the dtype of the model goes with the dispatch as out_dtype",
        )


@final
class FinalizeKMajor(FinalizeRouting[KMajorIndex]):
    """``npu_moe_finalize_routing`` in mode 0, which reads ``j * tokens + t``."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @property
    @override
    def index(self) -> type[KMajorIndex]:
        return KMajorIndex

    @override
    def finalize(self, rows: Tensor, weights: Tensor, index: KMajorIndex) -> Tensor:
        _require_dtype(rows, weights)
        return self._ops.npu_moe_finalize_routing(rows, None, None, None, weights, index.rows, None, drop_pad_mode=FinalizeMode.K_MAJOR)


@final
class FinalizeRowMajor(FinalizeRouting[RowMajorIndex]):
    """``npu_moe_finalize_routing`` in mode 2, which reads ``t * k + j``."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @property
    @override
    def index(self) -> type[RowMajorIndex]:
        return RowMajorIndex

    @override
    def finalize(self, rows: Tensor, weights: Tensor, index: RowMajorIndex) -> Tensor:
        _require_dtype(rows, weights)
        return self._ops.npu_moe_finalize_routing(rows, None, None, None, weights, index.rows, None, drop_pad_mode=FinalizeMode.ROW_MAJOR)


@final
class FinalizeSparse(FinalizeRouting[RowMajorSparseIndex]):
    """``npu_moe_finalize_routing`` in mode 3, in which -1 is a row of zeros: rows of one capacity, over all experts."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @property
    @override
    def index(self) -> type[RowMajorSparseIndex]:
        return RowMajorSparseIndex

    @override
    def finalize(self, rows: Tensor, weights: Tensor, index: RowMajorSparseIndex) -> Tensor:
        _require_dtype(rows, weights)
        padded = rows.unsqueeze(0)  # (1, routes, n): an index e * capacity + slot is the row itself
        return self._ops.npu_moe_finalize_routing(padded, None, None, None, weights, index.rows, None, drop_pad_mode=FinalizeMode.ROW_MAJOR_PADDED)


@final
class Unpermute(FinalizeRouting[RowMajorIndex]):
    """``npu_moe_token_unpermute``, which knows no -1: SGLang takes the index's absolute value, which reads row 1 for it."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @property
    @override
    def index(self) -> type[RowMajorIndex]:
        return RowMajorIndex

    @override
    def finalize(self, rows: Tensor, weights: Tensor, index: RowMajorIndex) -> Tensor:
        _require_dtype(rows, weights)
        return self._ops.npu_moe_token_unpermute(rows, index.rows, probs=weights)


@final
class AllGatheredFinalize(FinalizeRouting[X]):
    """Another's result, with the columns of all ranks side by side: for rows that are this rank's columns of whole results."""

    def __init__(self, inner: FinalizeRouting[X], ranks: TensorParallel) -> None:
        self._inner, self._ranks = inner, ranks

    @property
    @override
    def index(self) -> type[X]:
        return self._inner.index

    @override
    def finalize(self, rows: Tensor, weights: Tensor, index: X) -> Tensor:
        return self._ranks.all_gather(self._inner.finalize(rows, weights, index))

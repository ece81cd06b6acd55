"""What the components share: rows of half precision, group lists as operators are told of them, e8m0 scales in pairs."""

from typing import Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from ....formats import Bf16Rows, Fp16Rows
from ....formats.payloads.ascend import PAIR
from ....stages import AnyGroupList, GroupCounts, GroupEnds, GroupPairs
from ...base import UnsupportedError
from ..ops import GroupListType

HalfRows: TypeAlias = Bf16Rows | Fp16Rows
"""What the NPU's products make, and its routing and quantisation take."""

F = TypeVar("F", bound=HalfRows)

_HALVES: Final[dict[torch.dtype, type[HalfRows]]] = {torch.bfloat16: Bf16Rows, torch.float16: Fp16Rows}


def half_class(dtype: torch.dtype) -> type[HalfRows]:
    """Return the class of rows in a dtype. Raises: UnsupportedError for one that the NPU's products do not make."""
    if dtype not in _HALVES:
        raise UnsupportedError(f"the NPU's products make bfloat16 and float16 rows, not {dtype}")
    return _HALVES[dtype]


def half_rows(data: Tensor) -> HalfRows:
    """Return data as rows of its dtype. Raises: UnsupportedError as ``half_class``."""
    return half_class(data.dtype)(data)


def rows_like(rows: type[F], data: Tensor) -> F:
    """Return data as rows of a class whose dtype it has."""
    return rows(data)


def told(groups: AnyGroupList) -> tuple[Tensor, GroupListType]:
    """Return a group list and the number that says what it holds, which follows from its class and is kept nowhere.

    A list of one count is given as cumulative, which is the same: the documents rule out counts of length 1 (op-plugin, npu_grouped_matmul).
    """
    match groups:
        case GroupEnds():
            return groups.ends, GroupListType.CUMSUM
        case GroupCounts():
            return (groups.counts, GroupListType.COUNT) if groups.num_groups > 1 else (groups.counts, GroupListType.CUMSUM)
        case GroupPairs():
            return groups.pairs, GroupListType.PAIRS


def without_pairs(groups: AnyGroupList) -> GroupEnds | GroupCounts:
    """Return a group list that every product reads: pairs are for int8 by int8 alone (CANN ops-transformer), and become counts."""
    return groups.counted() if isinstance(groups, GroupPairs) else groups


def paired(scale: Tensor) -> Tensor:
    """Return e8m0 bytes (rows, n) as float8_e8m0fnu (rows, n / 2, 2); those in pairs already stay so. n is even where 64 divides the columns."""
    pairs = scale if scale.dim() == 3 else scale.reshape(scale.shape[0], scale.shape[1] // PAIR, PAIR)
    return pairs.view(torch.float8_e8m0fnu)

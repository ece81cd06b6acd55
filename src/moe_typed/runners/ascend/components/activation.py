"""Activations between the two products: joined gate and up columns become rows for the second.

Where gate and up lie is in the type of the joined columns (``JoinedRows[GateUp]``), since halves and alternating columns have one shape. Clamps
differ in where they stand: the step clamps after silu, gpt-oss before it. The sorted activations of sgl_kernel_npu leave rows after the groups' total
alone.
"""

from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from ....boundary import boundary
from ....formats import GateUp, GateUpOrder, Int8TokenRows, Interleaved, Payload
from ....stages import AnyGroupList, TensorParallel
from ..ops import AscendExtensionOps, AscendOps, GroupListType, SwigluMode, SwigluQuantMode, ZeroLedGroupListType
from .rows import HalfRows, half_rows

O = TypeVar("O", bound=GateUpOrder)  # noqa: E741 - invariant: columns in one order are in no other
Q_co = TypeVar("Q_co", bound=Payload, covariant=True)

OAI_SHIFT: Final = 1.0  # gpt-oss adds one to up


@final
@boundary
class JoinedRows(Generic[O]):
    """What the first product makes. ``order``: where gate and up lie among the columns."""

    rows: HalfRows
    order: type[O]


class AscendActivation(ABC, Generic[O, Q_co]):
    """The base: takes columns in the order ``O``, makes rows ``Q``."""

    @abstractmethod
    def activate(self, joined: JoinedRows[O], groups: AnyGroupList) -> Q_co:
        """Return the rows; those after the groups' total are undefined."""


@final
class Swiglu(AscendActivation[GateUp, HalfRows]):
    """``npu_swiglu``: silu(gate) * up."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> HalfRows:
        return half_rows(self._ops.npu_swiglu(joined.rows.data, -1))


@final
class SwigluQuant(AscendActivation[GateUp, Int8TokenRows]):
    """``npu_dequant_swiglu_quant``: the same, and int8. Its defaults activate the other half and give no scale, hence all is said."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> Int8TokenRows:
        data, scale = self._ops.npu_dequant_swiglu_quant(
            joined.rows.data, activate_left=True, quant_mode=SwigluQuantMode.DYNAMIC, swiglu_mode=SwigluMode.HALVES
        )
        return Int8TokenRows(data, scale)


@final
class ClippedSwiglu(AscendActivation[O, HalfRows]):
    """``npu_clipped_swiglu``: g * sigmoid(alpha * g) * (u + shift), g = min(gate, limit), u = clamp(up, -limit, limit); either order."""

    def __init__(self, ops: AscendOps, order: type[O], alpha: float, limit: float, shift: float = OAI_SHIFT) -> None:
        self._ops, self._alpha, self._limit, self._shift = ops, alpha, limit, shift
        self._interleaved = is_interleaved(order)

    @override
    def activate(self, joined: JoinedRows[O], groups: AnyGroupList) -> HalfRows:
        data = self._ops.npu_clipped_swiglu(joined.rows.data, alpha=self._alpha, limit=self._limit, bias=self._shift, interleaved=self._interleaved)
        return half_rows(data)


@final
class ClippedSwigluQuant(AscendActivation[O, Int8TokenRows]):
    """The same formula by ``npu_dequant_swiglu_quant``, and int8."""

    def __init__(self, ops: AscendOps, order: type[O], alpha: float, limit: float, shift: float = OAI_SHIFT) -> None:
        self._ops, self._alpha, self._limit, self._shift = ops, alpha, limit, shift
        self._mode = SwigluMode.INTERLEAVED_CLAMPED if is_interleaved(order) else SwigluMode.HALVES_CLAMPED

    @override
    def activate(self, joined: JoinedRows[O], groups: AnyGroupList) -> Int8TokenRows:
        data, scale = self._ops.npu_dequant_swiglu_quant(
            joined.rows.data,
            activate_left=True,
            quant_mode=SwigluQuantMode.DYNAMIC,
            swiglu_mode=self._mode,
            clamp_limit=self._limit,
            glu_alpha=self._alpha,
            glu_bias=self._shift,
        )
        return Int8TokenRows(data, scale)


@final
class StepSwiglu(AscendActivation[GateUp, HalfRows]):
    """min(silu(gate), limit) * clamp(up, -limit, limit), of torch's own operators."""

    def __init__(self, limit: float) -> None:
        self._limit = limit

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> HalfRows:
        gate, up = GateUp.split(joined.rows.data, -1)
        return half_rows(torch.nn.functional.silu(gate).clamp(max=self._limit) * up.clamp(-self._limit, self._limit))


@final
class GeluAndMulHalves(AscendActivation[GateUp, HalfRows]):
    """gelu(gate) * up, of torch's own operators: the exact gelu, by the error function, or the one that is approximated by tanh."""

    def __init__(self, *, tanh: bool = False) -> None:
        self._approximate = "tanh" if tanh else "none"

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> HalfRows:
        gate, up = GateUp.split(joined.rows.data, -1)
        return half_rows(torch.nn.functional.gelu(gate, approximate=self._approximate) * up)


@final
class SortedSwiglu(AscendActivation[GateUp, HalfRows]):
    """``swiglu_quant`` of sgl_kernel_npu without quantisation; with a limit, the step formula."""

    def __init__(self, extension: AscendExtensionOps, limit: float | None = None) -> None:
        self._extension, self._limit = extension, limit

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> HalfRows:
        data, _ = _sorted_swiglu(self._extension, joined, groups, self._limit, quant=False)
        return half_rows(data)


@final
class SortedSwigluQuant(AscendActivation[GateUp, Int8TokenRows]):
    """``swiglu_quant`` of sgl_kernel_npu: int8, rounded half up; with a limit, the step formula."""

    def __init__(self, extension: AscendExtensionOps, limit: float | None = None) -> None:
        self._extension, self._limit = extension, limit

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> Int8TokenRows:
        return Int8TokenRows(*_sorted_swiglu(self._extension, joined, groups, self._limit, quant=True))


def _sorted_swiglu(
    extension: AscendExtensionOps, joined: JoinedRows[GateUp], groups: AnyGroupList, limit: float | None, *, quant: bool
) -> tuple[Tensor, Tensor]:
    """Call it with counts: of cumulative ones it reads past the end unless they begin with a zero."""
    counts, kind = groups.counted().counts, ZeroLedGroupListType.COUNT
    if limit is None:
        return extension.swiglu_quant(joined.rows.data, counts, kind, need_quant=quant)
    return extension.swiglu_quant(joined.rows.data, counts, kind, need_quant=quant, do_limit=True, limit=limit)


@final
class SortedSwigluOai(AscendActivation[GateUp, HalfRows]):
    """``swiglu_oai_quant`` of sgl_kernel_npu without quantisation."""

    def __init__(self, extension: AscendExtensionOps, alpha: float, limit: float) -> None:
        self._extension, self._alpha, self._limit = extension, alpha, limit

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> HalfRows:
        counts = groups.counted().counts
        data, _ = self._extension.swiglu_oai_quant(joined.rows.data, self._alpha, self._limit, False, counts, GroupListType.COUNT)
        return half_rows(data)


@final
class SortedSwigluOaiQuant(AscendActivation[GateUp, Int8TokenRows]):
    """``swiglu_oai_quant`` of sgl_kernel_npu: int8."""

    def __init__(self, extension: AscendExtensionOps, alpha: float, limit: float) -> None:
        self._extension, self._alpha, self._limit = extension, alpha, limit

    @override
    def activate(self, joined: JoinedRows[GateUp], groups: AnyGroupList) -> Int8TokenRows:
        counts = groups.counted().counts
        return Int8TokenRows(*self._extension.swiglu_oai_quant(joined.rows.data, self._alpha, self._limit, True, counts, GroupListType.COUNT))


@final
class AllGatheredActivation(AscendActivation[O, HalfRows]):
    """Another's rows, with the columns of all ranks side by side: for a second product that needs them whole on every rank."""

    def __init__(self, inner: AscendActivation[O, HalfRows], ranks: TensorParallel) -> None:
        self._inner, self._ranks = inner, ranks

    @override
    def activate(self, joined: JoinedRows[O], groups: AnyGroupList) -> HalfRows:
        return half_rows(self._ranks.all_gather(self._inner.activate(joined, groups).data))


def is_interleaved(order: type[GateUpOrder]) -> bool:
    """Say whether the operators are told of alternating columns. Raises: ValueError for an order that they do not know."""
    if order not in (GateUp, Interleaved):
        raise ValueError(f"the NPU's activations read halves or alternating columns, gate first; not {order.title}")
    return order is Interleaved

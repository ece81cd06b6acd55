"""The two halves of an expert, made of components: what the types let stand together, stands together."""

from abc import ABC, abstractmethod
from typing import Final, Generic, TypeVar, final

import attrs
import torch
from typing_extensions import override

from ...formats import Bf16Rows, Fp16Rows, GateUp, MxFp8PairRows, Payload
from ...stages import AnyGroupList
from ..base import refuse_payload
from .components.activation import AscendActivation, JoinedRows
from .components.hidden_states_quant import HiddenStatesQuant
from .components.matmul import GroupedMatmul
from .components.rows import HalfRows, told, without_pairs
from .ops import AscendOps, FusedDequant, FusedQuant, NpuDtype
from .weights.operands import MxFp8Operand

P_contra = TypeVar("P_contra", bound=Payload, contravariant=True)
A_co = TypeVar("A_co", bound=Payload, covariant=True)
Q = TypeVar("Q", bound=Payload)
A = TypeVar("A", bound=Payload)

_HALVES: Final = (Bf16Rows, Fp16Rows)


class Projection(ABC, Generic[P_contra]):
    """The base of what makes rows of half precision of rows ``P`` by a grouped product."""

    @abstractmethod
    def project(self, rows: P_contra, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        """Return the product's rows. Raises: BoundaryError for rows in another format, UnsupportedError as ``GroupedMatmul.multiply``."""


@final
@attrs.frozen(eq=False)
class PlainProjection(Projection[Q]):
    """A product of rows as they are."""

    matmul: GroupedMatmul[Q]

    @override
    def project(self, rows: Q, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        if not isinstance(rows, self.matmul.accepts):
            raise refuse_payload(type(rows), type(self.matmul).__qualname__, self.matmul.accepts)
        return self.matmul.multiply(rows, groups, out_dtype)


@final
@attrs.frozen(eq=False)
class QuantisedProjection(Projection[HalfRows | Q], Generic[Q]):
    """A product of quantised rows, which quantises those that are not."""

    quant: HiddenStatesQuant[HalfRows, Q]
    matmul: GroupedMatmul[Q]

    @override
    def project(self, rows: HalfRows | Q, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        if isinstance(rows, self.matmul.accepts):
            return self.matmul.multiply(rows, groups, out_dtype)
        if not isinstance(rows, _HALVES):
            raise refuse_payload(type(rows), type(self.matmul).__qualname__, (*_HALVES, *self.matmul.accepts))
        return self.matmul.multiply(self.quant.quantise(rows), groups, out_dtype)


class UpStage(ABC, Generic[P_contra, A_co]):
    """The base of the first half: rows ``P`` become activated rows ``A``."""

    @abstractmethod
    def run(self, rows: P_contra, groups: AnyGroupList, out_dtype: torch.dtype) -> A_co:
        """Return the activated rows."""

    def then(self, down: Projection[A_co]) -> "Chain[P_contra]":
        """Return the whole expert, if the second half takes what this one makes."""
        return UpThenDown(self, down)


@final
@attrs.frozen(eq=False)
class ProductThenActivation(UpStage[P_contra, A_co]):
    """A product, and an activation of its halves, gate first."""

    product: Projection[P_contra]
    activation: AscendActivation[GateUp, A_co]

    @override
    def run(self, rows: P_contra, groups: AnyGroupList, out_dtype: torch.dtype) -> A_co:
        return self.activation.activate(JoinedRows(self.product.project(rows, groups, out_dtype), GateUp), groups)


@final
@attrs.frozen(eq=False)
class FusedMxSwiglu(UpStage[HalfRows | MxFp8PairRows, MxFp8PairRows]):
    """``npu_grouped_matmul_swiglu_quant_v2`` of mxfp8 (Ascend 950): product, silu(gate) * up and quantisation in one. Every default is said."""

    ops: AscendOps
    quant: HiddenStatesQuant[HalfRows, MxFp8PairRows]
    operand: MxFp8Operand

    @override
    def run(self, rows: HalfRows | MxFp8PairRows, groups: AnyGroupList, out_dtype: torch.dtype) -> MxFp8PairRows:
        quantised = self._quantised(rows)
        group_list, kind = told(without_pairs(groups))
        data, scale = self.ops.npu_grouped_matmul_swiglu_quant_v2(
            quantised.data,
            [self.operand.weight],
            [self.operand.scale.scale.view(torch.uint8)],
            quantised.scale.view(torch.uint8),
            group_list,
            dequant_mode=FusedDequant.MX,
            dequant_dtype=torch.float32,
            quant_mode=FusedQuant.MX,
            quant_dtype=torch.float8_e4m3fn,
            group_list_type=kind,
            weight_scale_dtype=NpuDtype.FLOAT8_E8M0FNU,
            x_scale_dtype=NpuDtype.FLOAT8_E8M0FNU,
        )
        return MxFp8PairRows(data, scale.view(torch.float8_e8m0fnu))

    def _quantised(self, rows: Payload) -> MxFp8PairRows:
        """Return rows as the product takes them. Raises: BoundaryError for another format, which no checker has seen."""
        if isinstance(rows, MxFp8PairRows):
            return rows
        if not isinstance(rows, _HALVES):
            raise refuse_payload(type(rows), type(self).__qualname__, (*_HALVES, MxFp8PairRows))
        return self.quant.quantise(rows)


class Chain(ABC, Generic[P_contra]):
    """The base of whole experts: rows ``P`` become results."""

    @abstractmethod
    def run(self, rows: P_contra, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        """Return one result a row, in ``out_dtype``; those after the groups' total are undefined."""


@final
@attrs.frozen(eq=False)
class UpThenDown(Chain[P_contra], Generic[P_contra, A]):
    """Both halves, one after the other."""

    up: UpStage[P_contra, A]
    down: Projection[A]

    @override
    def run(self, rows: P_contra, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        return self.down.project(self.up.run(rows, groups, out_dtype), groups, out_dtype)

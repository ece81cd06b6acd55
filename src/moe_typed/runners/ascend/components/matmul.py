"""Grouped products, a class a scheme: rows times the matrix of their expert. Scales come with the rows and the weights that they belong to."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar, final

import torch
from torch import Tensor
from typing_extensions import override

from ....formats import Int4TokenRows, Int8TokenRows, Payload
from ....stages import AnyGroupList, GroupCounts
from ...base import UnsupportedError
from ..ops import AscendOps, GroupAxis, GroupListType, NpuDtype, SplitItem
from ..weights.operands import Bf16Operand, Fp16Operand, Operand, W4A4Operand, W4A8Operand, W4A16Operand, W8A8Fp16Operand, W8A8Operand
from .rows import HalfRows, half_class, half_rows, told, without_pairs

P = TypeVar("P", bound=Payload)


class GroupedMatmul(ABC, Generic[P]):
    """The base: takes rows ``P``, makes rows of half precision."""

    @property
    @abstractmethod
    def accepts(self) -> tuple[type[P], ...]:
        """Return the classes of rows that are multiplied as they are."""

    @property
    @abstractmethod
    def operand(self) -> Operand:
        """Return the weights."""

    @abstractmethod
    def multiply(self, rows: P, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        """Return one row for each, (rows, outer) in ``out_dtype``; those after the groups' total are undefined.

        Raises: UnsupportedError for a dtype that the weights cannot give.
        """


def product(
    ops: AscendOps,
    data: Tensor,
    weight: Tensor,
    groups: AnyGroupList,
    out_dtype: torch.dtype,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    row_scale: Tensor | None = None,
    antiquant: tuple[Tensor, Tensor | None] | None = None,
    scale_dtype: NpuDtype | None = None,
    row_scale_dtype: NpuDtype | None = None,
    rows_dtype: NpuDtype | None = None,
    weight_dtype: NpuDtype | None = None,
) -> HalfRows:
    """Return the product of one tensor of rows with one of matrices, whose rows are split by the groups."""
    half_class(out_dtype)
    group_list, kind = told(groups if data.dtype == torch.int8 else without_pairs(groups))
    (result,) = ops.npu_grouped_matmul(
        [data],
        [weight],
        bias=_listed(bias),
        scale=_listed(scale),
        antiquant_scale=None if antiquant is None else [antiquant[0]],
        antiquant_offset=None if antiquant is None else _listed(antiquant[1]),
        per_token_scale=_listed(row_scale),
        group_list=group_list,
        split_item=SplitItem.SINGLE,
        group_type=GroupAxis.M,
        group_list_type=kind,
        output_dtype=out_dtype,
        x_dtype=rows_dtype,
        weight_dtype=weight_dtype,
        scale_dtype=scale_dtype,
        per_token_scale_dtype=row_scale_dtype,
    )
    return half_rows(result)


def _listed(tensor: Tensor | None) -> list[Tensor] | None:
    return None if tensor is None else [tensor]


def _require(out_dtype: torch.dtype, given: torch.dtype, why: str) -> None:
    if out_dtype != given:
        raise UnsupportedError(f"these products give {given}, and {out_dtype} was asked for: {why}")


@final
class DenseMatmul(GroupedMatmul[HalfRows]):
    """Rows and weights of one dtype, which the result has too."""

    def __init__(self, ops: AscendOps, operand: Bf16Operand | Fp16Operand) -> None:
        self._ops, self._operand = ops, operand
        self._rows = half_class(operand.weight.dtype)

    @property
    @override
    def accepts(self) -> tuple[type[HalfRows]]:
        return (self._rows,)

    @property
    @override
    def operand(self) -> Bf16Operand | Fp16Operand:
        return self._operand

    @override
    def multiply(self, rows: HalfRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        _require(out_dtype, self._operand.weight.dtype, "weights without scales give their own dtype")
        return product(self._ops, rows.data, self._operand.weight, groups, out_dtype, bias=self._operand.bias)


@final
class W8A8Matmul(GroupedMatmul[Int8TokenRows]):
    """Int8 rows and int8 weights: (x W) * scale * scale of the row."""

    def __init__(self, ops: AscendOps, operand: W8A8Operand | W8A8Fp16Operand) -> None:
        self._ops, self._operand = ops, operand
        self._gives = torch.bfloat16 if isinstance(operand, W8A8Operand) else torch.float16

    @property
    @override
    def accepts(self) -> tuple[type[Int8TokenRows]]:
        return (Int8TokenRows,)

    @property
    @override
    def operand(self) -> W8A8Operand | W8A8Fp16Operand:
        return self._operand

    @override
    def multiply(self, rows: Int8TokenRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        _require(out_dtype, self._gives, "scales in bf16 go with bf16 results, those in float32 with fp16; prepare the weights for the model's dtype")
        operand = self._operand
        return product(self._ops, rows.data, operand.weight, groups, out_dtype, scale=operand.scale.scale, row_scale=rows.scale)


@final
class W4A8Matmul(GroupedMatmul[Int8TokenRows]):
    """Int8 rows and int4 weights. The operator reads counts whatever it is told, and writes over the rows that it is given."""

    def __init__(self, ops: AscendOps, operand: W4A8Operand) -> None:
        self._ops, self._operand = ops, operand

    @property
    @override
    def accepts(self) -> tuple[type[Int8TokenRows]]:
        return (Int8TokenRows,)

    @property
    @override
    def operand(self) -> W4A8Operand:
        return self._operand

    @override
    def multiply(self, rows: Int8TokenRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        return multiply_w4a8(self._ops, rows, self._operand, groups.counted(), out_dtype)


def multiply_w4a8(ops: AscendOps, rows: Int8TokenRows, operand: W4A8Operand, groups: GroupCounts, out_dtype: torch.dtype) -> HalfRows:
    """Return the product of W4A8, for counts alone (CANN ops-transformer: the list's type is not looked at)."""
    half_class(out_dtype)
    (result,) = ops.npu_grouped_matmul(
        [rows.data],
        [operand.words],
        bias=[operand.correction],
        scale=[operand.scale.scale],
        per_token_scale=[rows.scale],
        group_list=groups.counts,
        split_item=SplitItem.SINGLE,
        group_type=GroupAxis.M,
        group_list_type=GroupListType.COUNT,
        output_dtype=out_dtype,
    )
    return half_rows(result)


@final
class W4A4Matmul(GroupedMatmul[Int4TokenRows]):
    """Int4 rows and int4 weights: (x W) * scale * scale of the row."""

    def __init__(self, ops: AscendOps, operand: W4A4Operand) -> None:
        self._ops, self._operand = ops, operand

    @property
    @override
    def accepts(self) -> tuple[type[Int4TokenRows]]:
        return (Int4TokenRows,)

    @property
    @override
    def operand(self) -> W4A4Operand:
        return self._operand

    @override
    def multiply(self, rows: Int4TokenRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        operand = self._operand
        return product(self._ops, rows.data, operand.words, groups, out_dtype, scale=operand.scale.scale, row_scale=rows.scale)


@final
class W4A16Matmul(GroupedMatmul[HalfRows]):
    """Rows of half precision and int4 weights: x ((W + offset) * scale). AWQ, GPTQ and compressed-tensors end here."""

    def __init__(self, ops: AscendOps, operand: W4A16Operand) -> None:
        self._ops, self._operand = ops, operand
        self._rows = half_class(operand.scale.dtype)

    @property
    @override
    def accepts(self) -> tuple[type[HalfRows]]:
        return (self._rows,)

    @property
    @override
    def operand(self) -> W4A16Operand:
        return self._operand

    @override
    def multiply(self, rows: HalfRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        operand = self._operand
        _require(out_dtype, operand.scale.dtype, "rows, scales and results have one dtype")
        antiquant = operand.scale, operand.offset.offset
        return product(self._ops, rows.data, operand.words, groups, out_dtype, bias=operand.bias, antiquant=antiquant)

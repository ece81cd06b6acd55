"""Grouped products of microscaled rows and weights (Ascend 950)."""

from typing import Final, final

import torch
from typing_extensions import override

from ....formats import MxFp4PairRows, MxFp8PairRows
from ....stages import AnyGroupList
from ..ops import AscendOps, NpuDtype
from ..weights.operands import MxFp4Operand, MxFp8Operand
from .matmul import GroupedMatmul, product
from .rows import HalfRows

_E8M0: Final = NpuDtype.FLOAT8_E8M0FNU  # the number alone is taken: torch's own dtype is refused here
_E2M1: Final = NpuDtype.FLOAT4_E2M1FN_X2


@final
class MxFp8Matmul(GroupedMatmul[MxFp8PairRows]):
    """Mxfp8 rows and mxfp8 weights."""

    def __init__(self, ops: AscendOps, operand: MxFp8Operand) -> None:
        self._ops, self._operand = ops, operand

    @property
    @override
    def accepts(self) -> tuple[type[MxFp8PairRows]]:
        return (MxFp8PairRows,)

    @property
    @override
    def operand(self) -> MxFp8Operand:
        return self._operand

    @override
    def multiply(self, rows: MxFp8PairRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        scale, row_scale = self._operand.scale.scale.view(torch.uint8), rows.scale.view(torch.uint8)
        weight = self._operand.weight
        return product(self._ops, rows.data, weight, groups, out_dtype, scale=scale, row_scale=row_scale, scale_dtype=_E8M0, row_scale_dtype=_E8M0)


@final
class MxFp4A8Matmul(GroupedMatmul[MxFp8PairRows]):
    """Mxfp8 rows and mxfp4 weights, whose scales the operator wants where those of float rows would be."""

    def __init__(self, ops: AscendOps, operand: MxFp4Operand) -> None:
        self._ops, self._operand = ops, operand

    @property
    @override
    def accepts(self) -> tuple[type[MxFp8PairRows]]:
        return (MxFp8PairRows,)

    @property
    @override
    def operand(self) -> MxFp4Operand:
        return self._operand

    @override
    def multiply(self, rows: MxFp8PairRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        antiquant, row_scale = (self._operand.scale.scale.view(torch.uint8), None), rows.scale.view(torch.uint8)
        weight = self._operand.weight
        return product(
            self._ops, rows.data, weight, groups, out_dtype, antiquant=antiquant, row_scale=row_scale, row_scale_dtype=_E8M0, weight_dtype=_E2M1
        )


@final
class MxFp4Matmul(GroupedMatmul[MxFp4PairRows]):
    """Mxfp4 rows and mxfp4 weights."""

    def __init__(self, ops: AscendOps, operand: MxFp4Operand) -> None:
        self._ops, self._operand = ops, operand

    @property
    @override
    def accepts(self) -> tuple[type[MxFp4PairRows]]:
        return (MxFp4PairRows,)

    @property
    @override
    def operand(self) -> MxFp4Operand:
        return self._operand

    @override
    def multiply(self, rows: MxFp4PairRows, groups: AnyGroupList, out_dtype: torch.dtype) -> HalfRows:
        return product(
            self._ops,
            rows.data.view(torch.uint8),
            self._operand.weight,
            groups,
            out_dtype,
            scale=self._operand.scale.scale.view(torch.uint8),
            row_scale=rows.scale.view(torch.uint8),
            scale_dtype=_E8M0,
            row_scale_dtype=_E8M0,
            rows_dtype=_E2M1,
            weight_dtype=_E2M1,
        )

"""Quantisation of rows before a product. Rows are quantised one by one, so that those that are undefined spoil no other."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar, final

import torch
from typing_extensions import override

from ....formats import Int4TokenRows, Int8TokenRows, MxFp4PairRows, MxFp8PairRows, MxFp8Rows, Payload
from ..ops import AscendOps, MxScaleAlg, NpuDtype
from .rows import F, HalfRows, paired

P_contra = TypeVar("P_contra", bound=Payload, contravariant=True)
Q_co = TypeVar("Q_co", bound=Payload, covariant=True)


class HiddenStatesQuant(ABC, Generic[P_contra, Q_co]):
    """The base: takes rows ``P``, makes rows ``Q``, whose scales are part of them."""

    @abstractmethod
    def quantise(self, rows: P_contra) -> Q_co:
        """Return the rows in the other format."""


@final
class NoQuant(HiddenStatesQuant[F, F]):
    """Rows stay as they are."""

    @override
    def quantise(self, rows: F) -> F:
        return rows


@final
class DynamicInt8Quant(HiddenStatesQuant[HalfRows, Int8TokenRows]):
    """``npu_dynamic_quant``: scale = amax / 127, rounded half to even."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @override
    def quantise(self, rows: HalfRows) -> Int8TokenRows:
        return Int8TokenRows(*self._ops.npu_dynamic_quant(rows.data, dst_type=torch.int8))


@final
class DynamicInt4Quant(HiddenStatesQuant[HalfRows, Int4TokenRows]):
    """``npu_dynamic_quant`` to quint4x2: scale = amax / 7, eight values an int32."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @override
    def quantise(self, rows: HalfRows) -> Int4TokenRows:
        return Int4TokenRows(*self._ops.npu_dynamic_quant(rows.data, dst_type=torch.quint4x2))


@final
class DynamicMxFp8Quant(HiddenStatesQuant[HalfRows, MxFp8PairRows]):
    """``npu_dynamic_mx_quant`` to e4m3 (Ascend 950), exponents by the floor rule, its default."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @override
    def quantise(self, rows: HalfRows) -> MxFp8PairRows:
        data, scale = self._ops.npu_dynamic_mx_quant(rows.data, dst_type=torch.float8_e4m3fn, scale_alg=MxScaleAlg.FLOOR)
        return MxFp8PairRows(data, paired(scale))


@final
class DynamicMxFp4Quant(HiddenStatesQuant[HalfRows, MxFp4PairRows]):
    """``npu_dynamic_mx_quant`` to e2m1 (Ascend 950), two values a byte."""

    def __init__(self, ops: AscendOps) -> None:
        self._ops = ops

    @override
    def quantise(self, rows: HalfRows) -> MxFp4PairRows:
        data, scale = self._ops.npu_dynamic_mx_quant(rows.data, dst_type=NpuDtype.FLOAT4_E2M1FN_X2, scale_alg=MxScaleAlg.FLOOR)
        return MxFp4PairRows(data.view(torch.float4_e2m1fn_x2), paired(scale))


@final
class PairScales(HiddenStatesQuant[MxFp8Rows, MxFp8PairRows]):
    """Mxfp8 rows whose scales lie in two dims, as other backends have them: the same bytes, in pairs. No operator is called."""

    @override
    def quantise(self, rows: MxFp8Rows) -> MxFp8PairRows:
        return MxFp8PairRows(rows.data, paired(rows.scale))

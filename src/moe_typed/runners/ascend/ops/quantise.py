"""Quantisation of rows."""

from typing import Protocol

from torch import Tensor

from .codes import DtypeArg, DynamicQuantMode, MxScaleAlg, RoundMode


class QuantiseOps(Protocol):
    """Rows [M, K] and scales."""

    def npu_dynamic_quant(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        *,
        smooth_scales: Tensor | None = None,
        group_index: Tensor | None = None,
        dst_type: DtypeArg | None = None,
        quant_mode: DynamicQuantMode = "pertoken",
        dst_type_max: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Quantise fp16 or bf16 rows: int8 (amax / 127), or quint4x2 (amax / 7) as int32 [M, K / 8], rounded half to even; scale fp32 [M].

        ``group_index`` int32 holds cumulative counts, and makes ``smooth_scales`` [groups, K].
        """
        ...

    def npu_dynamic_quant_asymmetric(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        *,
        smooth_scales: Tensor | None = None,
        group_index: Tensor | None = None,
        dst_type: DtypeArg | None = None,
        quant_mode: DynamicQuantMode = "pertoken",
        dst_type_max: float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Quantise rows over [min, max]: int8 or quint4x2, scale fp32 [M], offset fp32 [M]."""
        ...

    def npu_dynamic_mx_quant(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        *,
        axis: int = -1,
        round_mode: RoundMode = "rint",
        dst_type: DtypeArg = 296,
        block_size: int = 32,
        scale_alg: MxScaleAlg | None = MxScaleAlg.FLOOR,
        dst_type_max: float = 0.0,
        max_low_bound: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Quantise blocks of ``axis``: fp8 as input, or fp4 uint8 [.., K / 2]; e8m0 scale uint8 [.., K / 64, 2], blocks padded to an even number."""
        ...

    def npu_quantize(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        scales: Tensor,
        zero_points: Tensor | None,
        dtype: DtypeArg,
        axis: int = 1,
        div_mode: bool = True,
    ) -> Tensor:
        """Return ``round(input / scales + zero_points)``, or times scales without ``div_mode``: int8, uint8, int32, or int4 in int32 [.., K / 8]."""
        ...

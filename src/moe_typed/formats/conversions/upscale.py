"""From rows with scales to rows without: data times scale in float32, rounded once to the dtype. Above 65504 float16 becomes infinite."""

from typing import Final, TypeAlias, final, get_args

import torch
from torch import Tensor

from ...ops.scale_layout.spec import ScaleLayout
from ..payloads import (
    Bf16Rows,
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128PackedSlabRows,
    Fp8Block128Rows,
    Fp8Block128SlabRows,
    Fp8FnuzBlock128Rows,
    Fp8FnuzTensorRows,
    Fp8FnuzTokenRows,
    Fp8TensorRows,
    Fp8TokenRows,
    Fp16Rows,
    Fp32Rows,
    Int8TokenRows,
    MxFp4Rows,
    MxFp8Rows,
    MxFp8SwizzledRows,
    NvFp4Rows,
    ScaledRows,
)
from .base import Conversion
from .ops import UpscaleOps

AnyScaledRows: TypeAlias = (
    Fp8TensorRows
    | Fp8FnuzTensorRows
    | Fp8TokenRows
    | Fp8FnuzTokenRows
    | Int8TokenRows
    | Fp8Block128Rows
    | Fp8FnuzBlock128Rows
    | Fp8Block128ColumnRows
    | Fp8Block128PackedRows
    | Fp8Block128SlabRows
    | Fp8Block128PackedSlabRows
    | MxFp8Rows
    | MxFp8SwizzledRows
    | MxFp4Rows
    | NvFp4Rows
)
SCALED: Final[tuple[type[ScaledRows], ...]] = get_args(AnyScaledRows)


@final
class Upscalers:
    """Every upscaler over one implementation."""

    def __init__(self, ops: UpscaleOps) -> None:
        self._ops = ops

        def bf16(rows: AnyScaledRows, live: Tensor | None = None) -> Bf16Rows:
            return Bf16Rows(self._values(rows, torch.bfloat16, live))

        def fp16(rows: AnyScaledRows, live: Tensor | None = None) -> Fp16Rows:
            return Fp16Rows(self._values(rows, torch.float16, live))

        def fp32(rows: AnyScaledRows, live: Tensor | None = None) -> Fp32Rows:
            return Fp32Rows(self._values(rows, torch.float32, live))

        self.bf16: Final = Conversion("upscale_bf16", SCALED, Bf16Rows, bf16)
        self.fp16: Final = Conversion("upscale_fp16", SCALED, Fp16Rows, fp16)
        self.fp32: Final = Conversion("upscale_fp32", SCALED, Fp32Rows, fp32)

    def _values(self, rows: AnyScaledRows, dtype: torch.dtype, live: Tensor | None) -> Tensor:
        ops, data, scale = self._ops, rows.data, rows.scale
        match rows:
            case Fp8TensorRows() | Fp8FnuzTensorRows():
                return ops.upscale_tensor(data, scale, dtype, live)
            case Fp8TokenRows() | Fp8FnuzTokenRows() | Int8TokenRows():
                return ops.upscale_rows(data, scale, dtype, live)
            case Fp8Block128Rows() | Fp8FnuzBlock128Rows():
                return ops.upscale_fp8_groups(data, scale, ScaleLayout.ROW_MAJOR, dtype, live)
            case Fp8Block128ColumnRows():
                return ops.upscale_fp8_groups(data, scale, ScaleLayout.COLUMN_MAJOR, dtype, live)
            case Fp8Block128PackedRows():
                return ops.upscale_fp8_groups_ue8m0(data, scale, dtype, live)
            case Fp8Block128SlabRows() | Fp8Block128PackedSlabRows():
                return ops.upscale_fp8_groups(data, rows.row_scale, ScaleLayout.ROW_MAJOR, dtype, live)
            case MxFp8Rows():
                return ops.upscale_mxfp8(data, scale, ScaleLayout.ROW_MAJOR, dtype, live)
            case MxFp8SwizzledRows():
                return ops.upscale_mxfp8(data, scale, ScaleLayout.SWIZZLED, dtype, live)
            case MxFp4Rows():
                return ops.upscale_mxfp4(data, scale, ScaleLayout.ROW_MAJOR, dtype, live)
            case NvFp4Rows():
                return ops.upscale_nvfp4(data, scale, rows.global_scale.factor, ScaleLayout.ROW_MAJOR, dtype, live)

"""From rows without scales to rows with them.

What is not finite poisons its group and nothing else: the scale of the group is NaN, and so is each of its values. Where one given scale serves all
rows, an infinity or a NaN becomes NaN alone. A group of zeros comes back as zeros. How each scale is chosen stands in ``ops.quantize.reference``.
"""

from typing import Final, final

import torch
from torch import Tensor

from ...ops.minifloat.spec import MXFP_ROUNDING
from ...ops.scale_layout.spec import ScaleLayout
from ..payloads import (
    AnyDenseRows,
    Bf16Rows,
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128Rows,
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
)
from ..scale_factor import ScaleFactor
from .base import Conversion
from .ops import QuantizeOps

_DENSE: Final = (Bf16Rows, Fp16Rows, Fp32Rows)
_FNUZ: Final = torch.float8_e4m3fnuz


@final
class Quantizers:
    """Every quantiser over one implementation. Each raises ValueError where the group does not divide the rows."""

    def __init__(self, ops: QuantizeOps) -> None:
        self._ops = ops

        def fp8_block128(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8Block128Rows:
            return Fp8Block128Rows(*ops.quantize_fp8_groups(rows.data, live=live))

        def fp8_fnuz_block128(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8FnuzBlock128Rows:
            return Fp8FnuzBlock128Rows(*ops.quantize_fp8_groups(rows.data, dtype=_FNUZ, live=live))

        def fp8_block128_column(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8Block128ColumnRows:
            return Fp8Block128ColumnRows(*ops.quantize_fp8_groups(rows.data, ScaleLayout.COLUMN_MAJOR, live=live))

        def fp8_block128_packed(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8Block128PackedRows:
            return Fp8Block128PackedRows(*ops.quantize_fp8_groups_ue8m0(rows.data, live=live))

        def fp8_token(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8TokenRows:
            return Fp8TokenRows(*ops.quantize_fp8_rows(rows.data, live=live))

        def fp8_fnuz_token(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8FnuzTokenRows:
            return Fp8FnuzTokenRows(*ops.quantize_fp8_rows(rows.data, _FNUZ, live=live))

        def int8_token(rows: AnyDenseRows, live: Tensor | None = None) -> Int8TokenRows:
            return Int8TokenRows(*ops.quantize_int8_rows(rows.data, live=live))

        def fp8_tensor(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8TensorRows:
            scale = ops.fp8_tensor_scale(rows.data, live=live)
            return Fp8TensorRows(ops.quantize_fp8_tensor(rows.data, scale, live=live), scale)

        def fp8_fnuz_tensor(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8FnuzTensorRows:
            scale = ops.fp8_tensor_scale(rows.data, _FNUZ, live=live)
            return Fp8FnuzTensorRows(ops.quantize_fp8_tensor(rows.data, scale, _FNUZ, live=live), scale)

        def nvfp4(rows: AnyDenseRows, live: Tensor | None = None) -> NvFp4Rows:
            scale = ops.nvfp4_tensor_scale(rows.data, live)
            return NvFp4Rows(*ops.quantize_nvfp4(rows.data, scale, live=live), ScaleFactor(scale))

        self.fp8_block128: Final = Conversion("quantize_fp8_block128", _DENSE, Fp8Block128Rows, fp8_block128)
        self.fp8_fnuz_block128: Final = Conversion("quantize_fp8_fnuz_block128", _DENSE, Fp8FnuzBlock128Rows, fp8_fnuz_block128)
        self.fp8_block128_column: Final = Conversion("quantize_fp8_block128_column", _DENSE, Fp8Block128ColumnRows, fp8_block128_column)
        self.fp8_block128_packed: Final = Conversion("quantize_fp8_block128_packed", _DENSE, Fp8Block128PackedRows, fp8_block128_packed)
        self.fp8_token: Final = Conversion("quantize_fp8_token", _DENSE, Fp8TokenRows, fp8_token)
        self.fp8_fnuz_token: Final = Conversion("quantize_fp8_fnuz_token", _DENSE, Fp8FnuzTokenRows, fp8_fnuz_token)
        self.int8_token: Final = Conversion("quantize_int8_token", _DENSE, Int8TokenRows, int8_token)
        self.fp8_tensor: Final = Conversion("quantize_fp8_tensor", _DENSE, Fp8TensorRows, fp8_tensor)
        self.fp8_fnuz_tensor: Final = Conversion("quantize_fp8_fnuz_tensor", _DENSE, Fp8FnuzTensorRows, fp8_fnuz_tensor)
        self.nvfp4: Final = Conversion("quantize_nvfp4", _DENSE, NvFp4Rows, nvfp4)
        self.mxfp8: Final = self.mxfp8_rounded("up")
        self.mxfp8_swizzled: Final = self.mxfp8_swizzled_rounded("up")
        self.mxfp4: Final = self.mxfp4_rounded("up")

    def mxfp8_rounded(self, rounding: MXFP_ROUNDING) -> Conversion[AnyDenseRows, MxFp8Rows]:
        """Return the mxfp8 quantiser whose scales follow a rule: "up" (nothing saturates), "floor" (OCP), or "even"."""

        def mxfp8(rows: AnyDenseRows, live: Tensor | None = None) -> MxFp8Rows:
            return MxFp8Rows(*self._ops.quantize_mxfp8(rows.data, rounding, live=live))

        return Conversion(_rounded("quantize_mxfp8", rounding), _DENSE, MxFp8Rows, mxfp8)

    def mxfp8_swizzled_rounded(self, rounding: MXFP_ROUNDING) -> Conversion[AnyDenseRows, MxFp8SwizzledRows]:
        """Return the mxfp8 quantiser with swizzled scales; the rules are those of ``mxfp8_rounded``."""

        def mxfp8_swizzled(rows: AnyDenseRows, live: Tensor | None = None) -> MxFp8SwizzledRows:
            return MxFp8SwizzledRows(*self._ops.quantize_mxfp8(rows.data, rounding, ScaleLayout.SWIZZLED, live=live))

        return Conversion(_rounded("quantize_mxfp8_swizzled", rounding), _DENSE, MxFp8SwizzledRows, mxfp8_swizzled)

    def mxfp4_rounded(self, rounding: MXFP_ROUNDING) -> Conversion[AnyDenseRows, MxFp4Rows]:
        """Return the mxfp4 quantiser; the rules are those of ``mxfp8_rounded``."""

        def mxfp4(rows: AnyDenseRows, live: Tensor | None = None) -> MxFp4Rows:
            return MxFp4Rows(*self._ops.quantize_mxfp4(rows.data, rounding, live=live))

        return Conversion(_rounded("quantize_mxfp4", rounding), _DENSE, MxFp4Rows, mxfp4)

    def fp8_tensor_static(self, scale: ScaleFactor) -> Conversion[AnyDenseRows, Fp8TensorRows]:
        """Return the per-tensor quantiser with a scale that is known before the rows are."""

        def fp8_tensor_static(rows: AnyDenseRows, live: Tensor | None = None) -> Fp8TensorRows:
            return Fp8TensorRows(self._ops.quantize_fp8_tensor(rows.data, scale.factor, live=live), scale.factor)

        return Conversion("quantize_fp8_tensor_static", _DENSE, Fp8TensorRows, fp8_tensor_static)

    def nvfp4_static(self, scale: ScaleFactor) -> Conversion[AnyDenseRows, NvFp4Rows]:
        """Return the nvfp4 quantiser with a global scale that is known before the rows are; an engine's ``InverseScaleFactor`` must be inverted."""

        def nvfp4_static(rows: AnyDenseRows, live: Tensor | None = None) -> NvFp4Rows:
            return NvFp4Rows(*self._ops.quantize_nvfp4(rows.data, scale.factor, live=live), scale)

        return Conversion("quantize_nvfp4_static", _DENSE, NvFp4Rows, nvfp4_static)


def _rounded(name: str, rounding: MXFP_ROUNDING) -> str:
    return name if rounding == "up" else f"{name}_{rounding}"

"""What ``get_hip_quant`` returns: a function per granularity, with the signature that the version has."""

from collections.abc import Callable
from typing import TypeAlias, final

import attrs
import torch
from torch import Tensor

from .enums import QuantType
from .library import Library
from .memory import poison_rows, read
from .misuse import EmulationGap, Reason
from .numerics import (
    FP8_GROUP,
    MX_GROUP,
    quantize_fp8_float_scale,
    quantize_groups,
    quantize_mx_fp4,
    quantize_mx_fp8,
    quantize_tensor,
)
from .shuffles import swizzle_scale

Quantizer: TypeAlias = Callable[..., tuple[Tensor, Tensor | None]]
_HALVES = (torch.bfloat16, torch.float16)
_FP4 = torch.float4_e2m1fn_x2
_E8M0 = torch.float8_e8m0fnu


@final
@attrs.frozen
class Quantizers:
    """The quantisers of one library. The parameters that emulate a launch geometry alone have no effect."""

    _library: Library

    def no_quant(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        return x, None

    def per_tensor_quant_hip(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = torch.int8,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]:
        assert num_rows is None, "num_rows is not supported by per-tensor quantisation"
        self._check_dtype(quant_dtype)
        self._check_input(x)
        return quantize_tensor(x.float(), quant_dtype, scale)

    def per_token_quant_hip(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = torch.int8,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]:
        self._check_dynamic(scale)
        self._check_dtype(quant_dtype)
        self._check_input(x)
        return self._limited(quantize_groups(x.float(), quant_dtype, x.shape[-1]), num_rows, num_rows_factor)

    def per_group_quant_hip(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = torch.int8,
        transpose_scale: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
        scale_type: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor]:
        """Quantise groups of 128. With ``transpose_scale`` the shape stays, and the memory is that of the transpose."""
        self._check_dynamic(scale)
        self._check_dtype(quant_dtype)
        self._check_input(x)
        if scale_type is not torch.float32:
            raise EmulationGap("per_1x128 with scales that are not float32")
        payload, scales = self._limited(quantize_groups(x.float(), quant_dtype, FP8_GROUP), num_rows, num_rows_factor)
        if transpose_scale:
            scales = scales.t().contiguous().view(scales.shape)
        return payload, scales

    def per_1x32_f4_quant_hip(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = _FP4,
        shuffle: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """The wheel's: fp4 alone."""
        if quant_dtype is not _FP4:
            raise ValueError(f"unsupported quant_dtype {quant_dtype}")
        return self._mx(x, scale, _FP4, num_rows, num_rows_factor, _E8M0, shuffle=shuffle)

    def per_1x32_mx_quant_hip(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        quant_dtype: torch.dtype = _FP4,
        shuffle: bool = False,
        num_rows: Tensor | None = None,
        num_rows_factor: int = 1,
        scale_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """HEAD's: fp4 and fp8. For fp8 without a ``scale_type`` the scales are float32."""
        return self._mx(x, scale, quant_dtype, num_rows, num_rows_factor, scale_type, shuffle=shuffle)

    def unsupported(self, *args: object, **kwargs: object) -> tuple[Tensor, None]:
        raise NotImplementedError("unsupported quant type")

    def _mx(
        self,
        x: Tensor,
        scale: Tensor | None,
        quant_dtype: torch.dtype,
        num_rows: Tensor | None,
        factor: int,
        scale_type: torch.dtype | None,
        *,
        shuffle: bool,
    ) -> tuple[Tensor, Tensor]:
        self._check_dynamic(scale)
        assert x.dim() == 2, f"expected two dimensions, got {x.dim()}"
        assert x.shape[-1] % MX_GROUP == 0, f"{x.shape[-1]} columns are no multiple of {MX_GROUP}"
        is_fp4 = quant_dtype is _FP4
        if not is_fp4 and quant_dtype is not self._library.dtypes.fp8:
            raise ValueError(f"unsupported quant_dtype {quant_dtype}")
        if is_fp4 and scale_type not in (None, _E8M0):
            raise ValueError(f"fp4 has e8m0 scales, not {scale_type}")
        float_scale = not is_fp4 and scale_type is not _E8M0
        if float_scale and shuffle:
            raise NotImplementedError("float32 scales are not shuffled")
        self._check_input(x)
        if is_fp4:
            quantized = quantize_mx_fp4(x.float(), wheel=self._library.version.is_wheel)
        else:
            quantized = (quantize_fp8_float_scale if float_scale else quantize_mx_fp8)(x.float(), quant_dtype)
        payload, scales = self._limited(quantized, num_rows, factor)
        return payload, swizzle_scale(scales) if shuffle else scales

    def _limited(self, quantized: tuple[Tensor, Tensor], num_rows: Tensor | None, factor: int) -> tuple[Tensor, Tensor]:
        """Poison the rows past ``num_rows``."""
        if num_rows is not None:
            rows = int(read(self._library.judge, "num_rows", num_rows, torch.int32, (1,)).item()) * factor
            for result in quantized:
                if not 0 <= rows <= result.shape[0]:
                    self._library.judge.silent(Reason.RANGE, "num_rows", f"{rows} of {result.shape[0]}")
                poison_rows(result, max(rows, 0))
        return quantized

    def _check_dtype(self, quant_dtype: torch.dtype) -> None:
        if quant_dtype not in (torch.int8, self._library.dtypes.fp8):
            raise ValueError(f"unsupported quant_dtype {quant_dtype}")

    @staticmethod
    def _check_dynamic(scale: Tensor | None) -> None:
        if scale is not None:
            raise ValueError("unsupported: static per token quant")

    @staticmethod
    def _check_input(x: Tensor) -> None:
        if x.dtype not in _HALVES:
            raise RuntimeError(f"the launcher takes fp16 and bf16, not {x.dtype}")

    def table(self) -> dict[QuantType, Quantizer]:
        """Return the function of every member: made once, as upstream caches them."""
        known: dict[QuantType, Quantizer] = {
            QuantType.No: self.no_quant,
            QuantType.per_Tensor: self.per_tensor_quant_hip,
            QuantType.per_Token: self.per_token_quant_hip,
            QuantType.per_1x128: self.per_group_quant_hip,
            QuantType.per_1x32: self.per_1x32_f4_quant_hip if self._library.version.is_wheel else self.per_1x32_mx_quant_hip,
        }
        return {member: known.get(member, self.unsupported) for member in map(QuantType, range(8))}

"""Quantisation of rows."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import DtypeArg, DynamicQuantMode, GroupListType, MxScaleAlg, RoundMode

from . import mx
from .base import Emulation
from .dtypes import HALVES, resolve, torch_dtype
from .groups import spans
from .misuse import require
from .numerics import INT4_MAX, INT8_MAX, pack_int4, quantize_rows, to_int8

_PACKED = 8  # int4 elements of an int32
_INTEGERS = {torch.qint8: (torch.int8, -128, 127), torch.quint8: (torch.uint8, 0, 255), torch.qint32: (torch.int32, -(2**31), 2**31 - 1)}


class QuantiseEmulation(Emulation):
    """The quantise operators."""

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
        """Quantise rows symmetrically."""
        x, dtype = self._smoothed(input, smooth_scales, group_index, dst_type, quant_mode)
        values, scale = quantize_rows(x, INT8_MAX if dtype == torch.int8 else INT4_MAX)
        return (to_int8(values) if dtype == torch.int8 else pack_int4(values)), scale

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
        """Quantise rows over their range: ``q = round(x / scale + offset)``."""
        x, dtype = self._smoothed(input, smooth_scales, group_index, dst_type, quant_mode)
        largest = INT8_MAX if dtype == torch.int8 else INT4_MAX
        high, low = x.amax(-1), x.amin(-1)
        scale = (high - low) / (2 * largest + 1)
        offset = torch.where(scale > 0, largest - high / scale, 0.0)
        values = torch.where(scale[..., None] > 0, x / scale[..., None] + offset[..., None], 0.0).round().clamp(-largest - 1, largest)
        return (to_int8(values) if dtype == torch.int8 else pack_int4(values)), scale, offset

    def _smoothed(
        self, x: Tensor, smooth: Tensor | None, group_index: Tensor | None, dst_type: DtypeArg | None, mode: DynamicQuantMode
    ) -> tuple[Tensor, torch.dtype]:
        dtype = torch_dtype(dst_type, torch.int8)
        require(x.dtype in HALVES and x.dim() >= 2, f"input is fp16 or bf16 with two axes or more, not {x.dtype} {list(x.shape)}")
        require(dtype in (torch.int8, torch.quint4x2), f"dst_type is int8 or quint4x2, not {dtype}")
        require(dtype == torch.int8 or x.shape[-1] % _PACKED == 0, f"int4 needs a multiple of {_PACKED} columns, not {x.shape[-1]}")
        require(mode == "pertoken", f"only per-token quantisation is emulated, not {mode}")
        values = x.float()
        if group_index is not None:
            require(group_index.dtype == torch.int32 and smooth is not None, "group_index is int32 and says which smooth scale")
            assert smooth is not None
            factors = torch.ones_like(values)
            for span in spans(self.judge, self.lists, group_index.long(), GroupListType.CUMSUM, len(group_index), len(x)):
                factors[span.start : span.stop] = smooth[span.group].float()
            return values * factors, dtype
        return (values if smooth is None else values * smooth.float()), dtype

    def npu_dynamic_mx_quant(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        *,
        axis: int = -1,
        round_mode: RoundMode = "rint",
        dst_type: DtypeArg = 296,
        block_size: int = mx.BLOCK,
        scale_alg: MxScaleAlg | None = MxScaleAlg.FLOOR,
        dst_type_max: float = 0.0,
        max_low_bound: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Quantise blocks along an axis."""
        self.judge.limit_mx()
        kind = mx.FORMATS.get(resolve(dst_type))
        require(kind is not None, f"dst_type is fp8 or fp4, not {resolve(dst_type)}")
        assert kind is not None
        require(
            block_size == mx.BLOCK and round_mode == "rint", f"only blocks of {mx.BLOCK} and rint are emulated, not {block_size} and {round_mode}"
        )
        alg = MxScaleAlg(scale_alg or 0)
        require(alg == MxScaleAlg.FLOOR or kind.levels is None, "the ceiling rule is for fp8")
        require(kind.levels is None or axis in (-1, input.dim() - 1), "only the last axis of fp4 is emulated")
        elements, scale = mx.quantize(input.float().movedim(axis, -1), kind, alg)
        place = axis % input.dim()
        return elements.movedim(-1, place), mx.pair(scale).movedim(-2, place)

    def npu_quantize(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        scales: Tensor,
        zero_points: Tensor | None,
        dtype: DtypeArg,
        axis: int = 1,
        div_mode: bool = True,
    ) -> Tensor:
        """Quantise with scales that are given."""
        kind = torch_dtype(dtype, torch.qint8)
        shape = [1] * input.dim()
        shape[axis] = -1
        factor, zero = scales.float().view(shape), 0.0 if zero_points is None else zero_points.float().view(shape)
        values = ((input.float() / factor if div_mode else input.float() * factor) + zero).round()
        if kind == torch.quint4x2:
            require(not div_mode, "int4 is multiplied: div_mode is off")
            return pack_int4(values.clamp(-INT4_MAX - 1, INT4_MAX))
        require(kind in _INTEGERS, f"dtype is qint8, quint8, qint32 or quint4x2, not {kind}")
        integer, low, high = _INTEGERS[kind]
        return values.double().clamp(low, high).to(integer)

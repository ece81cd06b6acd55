"""Activations of gate and up."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import DtypeArg, GroupListType, SwigluMode, SwigluQuantMode
from tests.emulation.hazards import poison_, poisoned

from .base import Emulation
from .dtypes import FLOATS, HALVES, torch_dtype
from .fused_matmul import silu_halves
from .groups import Span, spans
from .misuse import Reason, require
from .numerics import INT8_MAX, quantize_rows, to_int8

_MAX_GROUPED = 10496  # columns of the result
_ALIGNED = 64


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float, bias: float) -> Tensor:
    """Return ``g * sigmoid(alpha * g) * (u + bias)`` of the clamped gate and up."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + bias)


def interleaved(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even and the odd columns."""
    return x[..., 0::2], x[..., 1::2]


def _row_groups(ranges: list[Span], rows: int) -> Tensor:
    """Return the group of each row, int64; 0 for rows of none."""
    groups = torch.zeros(rows, dtype=torch.int64)
    for span in ranges:
        groups[span.start : span.stop] = span.group
    return groups


class ActivationEmulation(Emulation):
    """The activation operators of torch_npu."""

    def npu_swiglu(self, input: Tensor, dim: int = -1) -> Tensor:  # noqa: A002 - the schema's name
        """Return ``silu(left half) * right half``."""
        require(input.dtype in FLOATS, f"input is fp16, bf16 or fp32, not {input.dtype}")
        return silu_halves(input.float().movedim(dim, -1)).movedim(-1, dim).to(input.dtype)

    def npu_dequant_swiglu_quant(
        self,
        x: Tensor,
        *,
        weight_scale: Tensor | None = None,
        activation_scale: Tensor | None = None,
        bias: Tensor | None = None,
        quant_scale: Tensor | None = None,
        quant_offset: Tensor | None = None,
        group_index: Tensor | None = None,
        activate_left: bool = False,
        quant_mode: SwigluQuantMode = SwigluQuantMode.STATIC,
        dst_type: DtypeArg | None = None,
        round_mode: int | None = None,
        activate_dim: int | None = None,
        swiglu_mode: SwigluMode = SwigluMode.HALVES,
        clamp_limit: float = 7.0,
        glu_alpha: float = 1.702,
        glu_bias: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        """Dequantise int32 or take halves, activate, quantise to int8."""
        require(torch_dtype(dst_type, torch.int8) == torch.int8, f"only int8 results are emulated, not {dst_type}")
        require(activate_dim in (None, -1, x.dim() - 1), f"only the last axis is emulated, not {activate_dim}")
        require(group_index is None or quant_mode == SwigluQuantMode.DYNAMIC, "group_index needs dynamic quantisation")
        rows, half = len(x), x.shape[-1] // 2
        self.judge.limit(group_index is None or (half <= _MAX_GROUPED and half % _ALIGNED == 0), f"grouped rows of {half} columns")
        whole = [Span(0, 0, rows)]
        ranges = whole if group_index is None else spans(self.judge, self.lists, group_index, GroupListType.COUNT, len(group_index), rows)
        groups = _row_groups(ranges, rows)
        values = self._dequantized(x, weight_scale, activation_scale, bias, groups)
        if swiglu_mode == SwigluMode.HALVES:
            left, right = values.chunk(2, -1)
            active, other = (left, right) if activate_left else (right, left)
            values = torch.nn.functional.silu(active) * other
        else:
            gate, up = interleaved(values) if swiglu_mode == SwigluMode.INTERLEAVED_CLAMPED else values.chunk(2, -1)
            values = clamped_swiglu(gate, up, glu_alpha, clamp_limit, glu_bias)
        if quant_scale is not None:
            values = values * (quant_scale[groups] if quant_scale.dim() == 2 else quant_scale)
        if quant_mode == SwigluQuantMode.STATIC:
            return self._static(values, quant_scale, quant_offset)
        return _dynamic(values, ranges)

    def _dequantized(self, x: Tensor, weight_scale: Tensor | None, activation_scale: Tensor | None, bias: Tensor | None, groups: Tensor) -> Tensor:
        if x.dtype == torch.int32:
            require(weight_scale is not None and activation_scale is not None, "int32 rows need weight_scale and activation_scale")
            assert weight_scale is not None
            assert activation_scale is not None
            values = x.double()
            if bias is not None and not bias.is_floating_point():
                values = values + bias.view(-1, x.shape[-1])[groups]
            values = values * weight_scale.view(-1, x.shape[-1])[groups] * activation_scale.view(-1, 1)
            return (values + bias.view(-1, x.shape[-1])[groups] if bias is not None and bias.is_floating_point() else values).float()
        require(x.dtype in HALVES, f"x is int32, fp16 or bf16, not {x.dtype}")
        require(weight_scale is None and activation_scale is None and bias is None, "fp16 and bf16 rows have no scales and no bias")
        return x.float()

    def _static(self, values: Tensor, scale: Tensor | None, offset: Tensor | None) -> tuple[Tensor, Tensor]:
        if scale is None:
            self.judge.silent(Reason.STATIC_WITHOUT_SCALE, "quant_mode is 0 by default")
        return to_int8((values if offset is None else values + offset).round()), poisoned(values.shape[:-1], torch.float32)

    def npu_swiglu_quant(
        self,
        x: Tensor,
        *,
        smooth_scales: Tensor | None = None,
        offsets: Tensor | None = None,
        group_index: Tensor | None = None,
        activate_left: bool = False,
        quant_mode: SwigluQuantMode = SwigluQuantMode.STATIC,
        group_list_type: GroupListType = GroupListType.CUMSUM,
        dst_type: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Activate, smooth, quantise to int8."""
        require(dst_type in (None, torch.int8), f"only int8 results are emulated, not {dst_type}")
        require(group_index is None or group_index.dtype == torch.int32, "group_index is int32")
        ranges = [Span(0, 0, len(x))]
        if group_index is not None:
            ranges = spans(self.judge, self.lists, group_index.long(), group_list_type, len(group_index), len(x))
        left, right = x.float().chunk(2, -1)
        active, other = (left, right) if activate_left else (right, left)
        values = torch.nn.functional.silu(active) * other
        if smooth_scales is not None:
            groups = _row_groups(ranges, len(x))
            values = values * (smooth_scales[groups] if smooth_scales.dim() == 2 else smooth_scales[groups, None])
        if quant_mode == SwigluQuantMode.STATIC:
            return self._static(values, smooth_scales, offsets)
        return _dynamic(values, ranges)

    def npu_clipped_swiglu(
        self,
        x: Tensor,
        *,
        group_index: Tensor | None = None,
        dim: int = -1,
        alpha: float = 1.702,
        limit: float = 7.0,
        bias: float = 1.0,
        interleaved: bool = True,
    ) -> Tensor:
        """Return the clamped formula of interleaved columns, or of halves."""
        require(dim in (-1, x.dim() - 1), f"only the last axis is emulated, not {dim}")
        values = x.float()
        gate, up = (values[..., 0::2], values[..., 1::2]) if interleaved else values.chunk(2, -1)
        result = clamped_swiglu(gate, up, alpha, limit, bias).to(x.dtype)
        if group_index is not None:
            poison_(result[int(group_index.sum()) :])
        return result


def _dynamic(values: Tensor, ranges: list[Span]) -> tuple[Tensor, Tensor]:
    """Quantise the rows of the groups; others are poison."""
    quantized, scale = quantize_rows(values, INT8_MAX)
    end = max((span.stop for span in ranges), default=0)
    result = to_int8(quantized)
    if end < len(values):
        poison_(result[end:])
        poison_(scale[end:])
    return result, scale

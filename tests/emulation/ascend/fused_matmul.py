"""Grouped products with what follows them in one kernel."""

from collections.abc import Iterable

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import DtypeArg, FusedDequant, FusedQuant, GroupListType, MxScaleAlg
from tests.emulation.hazards import poisoned

from .base import Emulation
from .dtypes import torch_dtype
from .groups import Span, spans
from .misuse import Reason, require
from .mx import E4M3, pair, quantize
from .numerics import INT8_MAX, quantize_rows, to_int8, unpack_int4
from .products import W4A8, Carrier, Microscaled, Product, Token
from .weights import Scaled, carried, int4_weight, mx_format, mx_matrices, mx_rows, mx_scale_dtype, per_group

_MX_MULTIPLE = 128  # of N


def silu_halves(x: Tensor) -> Tensor:
    """Return ``silu(left half) * right half``."""
    left, right = x.chunk(2, -1)
    return torch.nn.functional.silu(left) * right


def _activated(product: Product, ranges: Iterable[Span], rows: int) -> Tensor:
    """Return silu(left) * right of the rows of all groups, float32 [M, N / 2]; others are NaN."""
    result = poisoned((rows, product.columns // 2), torch.float32)
    for span in ranges:
        if span.stop > span.start:
            result[span.start : span.stop] = silu_halves(product.of_group(span).float())
    return result


class FusedMatmulEmulation(Emulation):
    """The fused operators."""

    def npu_grouped_matmul_swiglu_quant(
        self,
        x: Tensor,
        weight: Tensor,
        group_list: Tensor,
        weight_scale: Tensor,
        x_scale: Tensor,
        *,
        bias: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Multiply int8, activate, quantise. The list is of cumulative counts."""
        require(x.dtype == weight.dtype == torch.int8, f"x and weight are int8, not {x.dtype} and {weight.dtype}")
        require(bias is None and offset is None, "bias and offset are not supported")
        product = Token(x, weight, None, weight_scale.float(), x_scale.double().view(-1, 1), torch.float32)
        ranges = spans(self.judge, self.lists, group_list, GroupListType.CUMSUM, weight.shape[0], len(x))
        return *_int8(_activated(product, ranges, len(x)), ranges), torch.empty(0)

    def npu_grouped_matmul_swiglu_quant_v2(
        self,
        x: Tensor,
        weight: list[Tensor],
        weight_scale: list[Tensor],
        x_scale: Tensor,
        group_list: Tensor,
        *,
        smooth_scale: Tensor | None = None,
        weight_assist_matrix: list[Tensor] | None = None,
        bias: Tensor | None = None,
        dequant_mode: FusedDequant | None = FusedDequant.PER_CHANNEL,
        dequant_dtype: DtypeArg | None = 6,
        quant_mode: FusedQuant | None = FusedQuant.PER_TOKEN,
        quant_dtype: DtypeArg | None = 1,
        group_list_type: GroupListType | None = GroupListType.CUMSUM,
        tuning_config: list[int] | None = None,
        x_dtype: DtypeArg | None = None,
        weight_dtype: DtypeArg | None = None,
        weight_scale_dtype: DtypeArg | None = None,
        x_scale_dtype: DtypeArg | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Multiply, activate, quantise."""
        require(len(weight) == len(weight_scale) == 1, "weight and weight_scale have one tensor")
        kind = GroupListType(group_list_type or 0)
        require(kind != GroupListType.PAIRS, "the list is of cumulative counts or of counts")
        is_mx = dequant_mode == FusedDequant.MX
        require(is_mx == (quant_mode == FusedQuant.MX), f"both modes are of MX or neither, not {dequant_mode} and {quant_mode}")
        ranges = spans(self.judge, self.lists, group_list, kind, weight[0].shape[0], len(x))
        if is_mx:
            self.judge.limit_mx()
            mx_scale_dtype("weight_scale_dtype", weight_scale_dtype)
            mx_scale_dtype("x_scale_dtype", x_scale_dtype)
            rows = mx_rows(x, mx_format(x, x_dtype), x_scale)
            matrices = mx_matrices(weight[0], mx_format(weight[0], weight_dtype), weight_scale[0])
            require(matrices.shape[-1] % _MX_MULTIPLE == 0, f"N is a multiple of {_MX_MULTIPLE}, not {matrices.shape[-1]}")
            require(torch_dtype(quant_dtype, torch.int8) == torch.float8_e4m3fn, f"only e4m3 results are emulated, not {quant_dtype}")
            return _mx(_activated(Microscaled(rows, matrices, torch.float32), ranges, len(x)), ranges)
        require(torch_dtype(quant_dtype, torch.int8) == torch.int8, f"per-token quantisation gives int8, not {quant_dtype}")
        product = self._fused(x, weight[0], weight_scale[0], x_scale.double().view(-1, 1), weight_assist_matrix)
        activated = _activated(product, ranges, len(x))
        if isinstance(product, Carrier):
            require(smooth_scale is not None, "int4 by int4 needs smooth_scale")
            assert smooth_scale is not None
            for span in ranges:
                activated[span.start : span.stop] *= smooth_scale[span.group]
        return _int8(activated, ranges)

    def _fused(self, x: Tensor, weight: Tensor, scale: Tensor, tokens: Tensor, assist: list[Tensor] | None) -> Product:
        if x.dtype == weight.dtype == torch.int8:
            return Token(x, weight, None, scale.float(), tokens, torch.float32)
        matrices = int4_weight(weight)
        groups, _, outer = matrices.shape
        packed = x.dtype == torch.int32
        values = carried(self.judge, scale) if scale.dtype in (torch.int64, torch.uint64) else scale.float()
        weights = Scaled(matrices, per_group(self.judge, values, groups, outer, flat=packed))
        if packed:
            return Carrier(unpack_int4(x), weights, tokens, torch.float32)
        if not assist:
            self.judge.silent(Reason.BIAS_MISSING, "no weight_assist_matrix was given")
        return W4A8(x, weights, assist[0] if assist else torch.zeros(groups, outer), tokens, torch.float32)

    def npu_grouped_matmul_finalize_routing(
        self,
        x: Tensor,
        w: Tensor,
        group_list: Tensor,
        *,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        offset: Tensor | None = None,
        pertoken_scale: Tensor | None = None,
        shared_input: Tensor | None = None,
        logit: Tensor | None = None,
        row_index: Tensor | None = None,
        dtype: torch.dtype | None = None,
        shared_input_weight: float | None = 1.0,
        shared_input_offset: int | None = 0,
        output_bs: int | None = 0,
        group_list_type: GroupListType | None = GroupListType.COUNT,
        tuning_config: list[int] | None = None,
        x_dtype: DtypeArg | None = None,
        w_dtype: DtypeArg | None = None,
        scale_dtype: DtypeArg | None = None,
        pertoken_scale_dtype: DtypeArg | None = None,
    ) -> Tensor:
        """Multiply int8 and add rows to their tokens."""
        require(x.dtype == w.dtype == torch.int8, f"only int8 by int8 is emulated, not {x.dtype} by {w.dtype}")
        require(scale is not None and row_index is not None and logit is not None, "scale, row_index and logit are needed")
        assert scale is not None
        assert row_index is not None
        assert logit is not None
        tokens = torch.ones(len(x), 1) if pertoken_scale is None else pertoken_scale.view(-1, 1)
        product = Token(x, w, bias, scale.float(), tokens.double(), torch.float32)
        result = torch.zeros(output_bs or 0, product.columns)
        if shared_input is not None:
            start = shared_input_offset or 0
            result[start : start + len(shared_input)] += (1.0 if shared_input_weight is None else shared_input_weight) * shared_input.float()
        for span in spans(self.judge, self.lists, group_list, GroupListType(group_list_type or 0), w.shape[0], len(x)):
            rows = slice(span.start, span.stop)
            result.index_add_(0, row_index[rows].long(), product.of_group(span) * logit[rows].float()[:, None])
        return result


def _int8(activated: Tensor, ranges: list[Span]) -> tuple[Tensor, Tensor]:
    """Quantise the rows of the groups to int8; others are poison."""
    out, scales = poisoned(activated.shape, torch.int8), poisoned(activated.shape[:1], torch.float32)
    for span in ranges:
        rows = slice(span.start, span.stop)
        values, scales[rows] = quantize_rows(activated[rows], INT8_MAX)
        out[rows] = to_int8(values)
    return out, scales


def _mx(activated: Tensor, ranges: list[Span]) -> tuple[Tensor, Tensor]:
    """Quantise the rows of the groups to e4m3; others are poison."""
    out = poisoned(activated.shape, torch.float8_e4m3fn)
    scales = poisoned((len(activated), -(-activated.shape[1] // 64), 2), torch.uint8)
    for span in ranges:
        if span.stop > span.start:
            rows = slice(span.start, span.stop)
            elements, bytes_ = quantize(activated[rows], E4M3, MxScaleAlg.FLOOR)
            out.view(torch.uint8)[rows] = elements.view(torch.uint8)
            scales[rows] = pair(bytes_)
    return out, scales

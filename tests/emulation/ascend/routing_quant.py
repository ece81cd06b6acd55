"""Quantisation of the rows that routing v2 gathers."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import MxScaleAlg, RoutingQuantMode
from tests.emulation.hazards import poisoned

from .misuse import require
from .mx import E2M1, E4M3, E5M2, pair, quantize
from .numerics import INT8_MAX, quantize_rows, to_int8

_MX = {
    RoutingQuantMode.MXFP8_E5M2: (E5M2, 0.0),
    RoutingQuantMode.MXFP8_E4M3: (E4M3, 0.0),
    RoutingQuantMode.MXFP8_CLAMPED_E5M2: (E5M2, 1e-4),
    RoutingQuantMode.MXFP8_CLAMPED_E4M3: (E4M3, 1e-4),
}
MX_MODES = frozenset((*_MX, RoutingQuantMode.MXFP4_E2M1))
_LOWEST = -126  # of the exponents of a block


def quantize_gathered(
    x: Tensor, tokens: Tensor, experts: Tensor, rows: int, mode: RoutingQuantMode, scale: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ``rows`` rows and scales, of which those of ``tokens`` are written. ``experts``: of each, counted from the first active one."""
    if x.dtype == torch.int8:
        return _written(x[tokens], rows), poisoned((rows,), torch.float32)
    if mode == RoutingQuantMode.NONE:
        scales = poisoned((rows,), torch.float32)
        if scale is not None:
            require(tuple(scale.shape) == (x.shape[0],), f"a scale of rows that are not quantised is [{x.shape[0]}], not {list(scale.shape)}")
            scales[: len(tokens)] = scale[tokens]
        return _written(x[tokens], rows), scales
    gathered = x[tokens].float()
    if mode == RoutingQuantMode.STATIC:
        require(
            scale is not None and offset is not None and scale.numel() == offset.numel() == 1, "static quantisation needs a scale and an offset [1]"
        )
        assert scale is not None
        assert offset is not None
        halves = x[tokens].half().float()
        return _written(to_int8((halves * scale + offset).round()), rows), poisoned((rows,), torch.float32)
    if mode == RoutingQuantMode.DYNAMIC:
        smooth = 1.0 if scale is None else scale[experts if scale.shape[0] > 1 else torch.zeros_like(experts)]
        values, scales = quantize_rows(gathered * smooth, INT8_MAX)
        return _written(to_int8(values), rows), _written(scales, rows)
    if mode in _MX:
        kind, least = _MX[mode]
        elements, bytes_ = quantize(gathered, kind, MxScaleAlg.CEIL, _LOWEST, least)
        even = pair(bytes_).flatten(-2)
        return _written(elements, rows), _written(even, rows).view(torch.float8_e8m0fnu)
    if mode == RoutingQuantMode.MXFP4_E2M1:
        elements, bytes_ = quantize(gathered, E2M1, MxScaleAlg.FLOOR, _LOWEST)
        return _written(elements, rows), _written(pair(bytes_), rows).view(torch.float8_e8m0fnu)
    raise NotImplementedError(f"{mode!r} is not emulated")


def _written(live: Tensor, rows: int) -> Tensor:
    """Return ``rows`` rows of which the first are these."""
    result = poisoned((rows, *live.shape[1:]), live.dtype)
    if live.dtype.itemsize == 1:
        result.view(torch.uint8)[: len(live)] = live.view(torch.uint8)
    else:
        result[: len(live)] = live
    return result

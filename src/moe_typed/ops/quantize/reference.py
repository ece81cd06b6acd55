"""Quantise in torch operations: float32, each step rounded once, the same bits on every device.

``rows``: (rows, hidden), bfloat16, float16 or float32. ``live``: int32 (1,), or None for all; rows from there on count as zeros here, and kernels
neither read nor write them.

A value is multiplied by the reciprocal of its scale, then rounded to the nearest code, ties to even, saturating at the largest. Scales are chosen so:

    float32   amax / max, 2^-126 at least; 1 for a group of zeros; NaN for a group with an infinity or a NaN in it
    e8m0      the power of two that minifloat.spec.power_of_two says, 2^-127 at least (byte 0, also for zeros); NaN (byte 255) likewise
    e4m3      amax / (6 * tensor scale), rounded to e4m3, 448 at most; 0 where that rounds to 0, and then all its values are 0; NaN likewise

So what is not finite poisons its group and nothing else: the scale is NaN, and so is each value. The data of such a group is NaN, or the largest
positive number where the format has no NaN. Where one scale is given for all, an infinity or a NaN is NaN in the data and touches nothing else.
"""

import torch
from torch import Tensor

from ..minifloat.reference import decode_e8m0, divide, encode_e2m1, encode_e8m0, encode_fp8, encode_int8, pack_e2m1
from ..minifloat.spec import E2M1, E4M3FN, INT8, MXFP_ROUNDING, NUMBERS
from ..scale_layout.reference import live_rows, pack_ue8m0, swizzle, to_column_major
from ..scale_layout.spec import ScaleLayout
from .spec import FP8_GROUP, MX_GROUP, NV_GROUP, NV_TENSOR_MAX, SMALLEST_SCALE, check_groups, check_live

_E4M3FN = torch.float8_e4m3fn


def quantize_fp8_groups(
    rows: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return ``dtype`` (rows, hidden) and float32 scales (rows, hidden / 128), ROW_MAJOR or COLUMN_MAJOR."""
    groups = _groups(rows, FP8_GROUP, live)
    scale = _float32_scale(_amax(groups), NUMBERS[dtype].max)
    data = encode_fp8(groups * (1.0 / scale).unsqueeze(2), NUMBERS[dtype], dtype).view(rows.shape)
    return data, scale if layout is ScaleLayout.ROW_MAJOR else to_column_major(scale)


def quantize_fp8_groups_ue8m0(rows: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``dtype`` (rows, hidden) and e8m0 scales of 128 channels, rounded up, PACKED: int32 (rows, ceil(hidden / 512))."""
    data, scale = _mxfp8(rows, FP8_GROUP, "up", dtype, live)
    return data, pack_ue8m0(scale)


def quantize_fp8_rows(rows: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return ``dtype`` (rows, hidden) and float32 scales (rows,)."""
    row = _groups(rows, rows.shape[1], live).squeeze(1)
    scale = _float32_scale(_amax(row), NUMBERS[dtype].max)
    return encode_fp8(row * (1.0 / scale).unsqueeze(1), NUMBERS[dtype], dtype), scale


def quantize_int8_rows(rows: Tensor, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return int8 (rows, hidden), from -127 to 127, and float32 scales (rows,)."""
    row = _groups(rows, rows.shape[1], live).squeeze(1)
    scale = _float32_scale(_amax(row), INT8.max)
    return encode_int8(row * (1.0 / scale).unsqueeze(1)), scale


def quantize_fp8_tensor(rows: Tensor, scale: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None) -> Tensor:
    """Return ``dtype`` (rows, hidden) for the float32 scale (1,) of all rows."""
    check_live(rows, live)
    value = live_rows(rows, live).to(torch.float32)
    return encode_fp8(torch.where(torch.isfinite(value), value * (1.0 / scale), torch.nan), NUMBERS[dtype], dtype)


def fp8_tensor_scale(rows: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None) -> Tensor:
    """Return the float32 scale (1,) of all rows: their largest finite magnitude / max; 1 where that is zero."""
    return _tensor_scale(rows, NUMBERS[dtype].max, live)


def quantize_mxfp8(
    rows: Tensor,
    rounding: MXFP_ROUNDING = "up",
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    dtype: torch.dtype = _E4M3FN,
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``dtype`` (rows, hidden) and float8_e8m0fnu scales of 32 channels, ROW_MAJOR (rows, hidden / 32) or SWIZZLED."""
    data, scale = _mxfp8(rows, MX_GROUP, rounding, dtype, live)
    return data, _bytes_in(layout, scale)


def quantize_mxfp4(
    rows: Tensor, rounding: MXFP_ROUNDING = "up", layout: ScaleLayout = ScaleLayout.ROW_MAJOR, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return float4_e2m1fn_x2 (rows, hidden / 2), the even channel in the low half, and scales as of mxfp8."""
    groups = _groups(rows, MX_GROUP, live)
    scale = encode_e8m0(_amax(groups), E2M1, rounding)
    codes = encode_e2m1(groups * (1.0 / decode_e8m0(scale)).unsqueeze(2))
    return pack_e2m1(codes.view(rows.shape)), _bytes_in(layout, scale)


def quantize_nvfp4(
    rows: Tensor, tensor_scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return float4_e2m1fn_x2 (rows, hidden / 2) and float8_e4m3fn scales of 16 channels, ROW_MAJOR (rows, hidden / 16) or SWIZZLED.

    ``tensor_scale``: float32 (1,), which scales are multiplied by: value = data * (scale * tensor_scale).
    """
    groups = _groups(rows, NV_GROUP, live)
    amax = _amax(groups)
    scale = encode_fp8(torch.where(torch.isfinite(amax), amax / (tensor_scale * E2M1.max), torch.nan), E4M3FN, _E4M3FN)
    factor = scale.to(torch.float32) * tensor_scale
    reciprocal = torch.where(factor < SMALLEST_SCALE, 0.0, 1.0 / factor)
    codes = encode_e2m1(groups * reciprocal.unsqueeze(2))
    return pack_e2m1(codes.view(rows.shape)), _bytes_in(layout, scale)


def nvfp4_tensor_scale(rows: Tensor, live: Tensor | None = None) -> Tensor:
    """Return the float32 scale (1,) that uses the whole range: the largest finite magnitude / (448 * 6); 1 where that is zero."""
    return _tensor_scale(rows, NV_TENSOR_MAX, live)


def _mxfp8(rows: Tensor, group: int, rounding: MXFP_ROUNDING, dtype: torch.dtype, live: Tensor | None) -> tuple[Tensor, Tensor]:
    groups = _groups(rows, group, live)
    scale = encode_e8m0(_amax(groups), NUMBERS[dtype], rounding)
    return encode_fp8(groups * (1.0 / decode_e8m0(scale)).unsqueeze(2), NUMBERS[dtype], dtype).view(rows.shape), scale


def _bytes_in(layout: ScaleLayout, scale: Tensor) -> Tensor:
    return scale if layout is ScaleLayout.ROW_MAJOR else swizzle(scale)


def _groups(rows: Tensor, group: int, live: Tensor | None) -> Tensor:
    check_live(rows, live)
    check_groups(rows, group)
    return live_rows(rows, live).to(torch.float32).contiguous().view(rows.shape[0], rows.shape[1] // group, group)


def _amax(groups: Tensor) -> Tensor:
    return groups.abs().amax(-1)


def _float32_scale(amax: Tensor, largest: int) -> Tensor:
    scale = torch.where(amax == 0, 1.0, divide(amax, largest).clamp(min=SMALLEST_SCALE))
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def _tensor_scale(rows: Tensor, largest: int, live: Tensor | None) -> Tensor:
    check_live(rows, live)
    magnitude = live_rows(rows, live).to(torch.float32).abs().flatten()
    finite = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
    return _float32_scale(torch.cat((finite, finite.new_zeros(1))).amax(0, keepdim=True), largest)

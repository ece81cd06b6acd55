"""Upscale in torch operations: float32 data times float32 scale, rounded once to float32 and once more to ``dtype``.

``dtype``: bfloat16, float16 or float32. ``live``: int32 (1,), or None for all; rows from there on are zeros here, and kernels neither read nor write
them. Data and scales are as ops/quantize makes them, of any of its dtypes. What is above the largest float16 becomes infinite there.
"""

import torch
from torch import Tensor

from ..minifloat.reference import decode_e2m1, decode_e8m0, unpack_e2m1
from ..quantize.spec import FP8_GROUP, MX_GROUP, NV_GROUP, check_groups, check_live
from ..scale_layout.reference import live_rows, unpack_ue8m0, unswizzle
from ..scale_layout.spec import ScaleLayout, to_storage

_BF16 = torch.bfloat16


def upscale_fp8_groups(
    data: Tensor, scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = _BF16, live: Tensor | None = None
) -> Tensor:
    """Return rows of fp8 with float32 scales of 128 channels, ROW_MAJOR or COLUMN_MAJOR."""
    check_groups(data, FP8_GROUP)
    to_storage(scale, data.shape[0], data.shape[1] // FP8_GROUP, layout)
    return _upscaled(data.to(torch.float32), scale, dtype, live)


def upscale_fp8_groups_ue8m0(data: Tensor, words: Tensor, dtype: torch.dtype = _BF16, live: Tensor | None = None) -> Tensor:
    """Return rows of fp8 with PACKED e8m0 scales of 128 channels."""
    check_groups(data, FP8_GROUP)
    scale = unpack_ue8m0(words, data.shape[1] // FP8_GROUP)
    return _upscaled(data.to(torch.float32), decode_e8m0(scale), dtype, live)


def upscale_rows(data: Tensor, scale: Tensor, dtype: torch.dtype = _BF16, live: Tensor | None = None) -> Tensor:
    """Return rows of fp8 or int8 with one float32 scale each (rows,)."""
    return _upscaled(data.to(torch.float32), scale.unsqueeze(1), dtype, live)


def upscale_tensor(data: Tensor, scale: Tensor, dtype: torch.dtype = _BF16, live: Tensor | None = None) -> Tensor:
    """Return rows of fp8 or int8 with one float32 scale for all (1,)."""
    return _upscaled(data.to(torch.float32), scale.view(1, 1), dtype, live)


def upscale_mxfp8(
    data: Tensor, scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = _BF16, live: Tensor | None = None
) -> Tensor:
    """Return rows of fp8 with e8m0 scales of 32 channels, ROW_MAJOR or SWIZZLED."""
    return _upscaled(data.to(torch.float32), decode_e8m0(_row_major(data, scale, data.shape[1], MX_GROUP, layout)), dtype, live)


def upscale_mxfp4(
    data: Tensor, scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = _BF16, live: Tensor | None = None
) -> Tensor:
    """Return rows of packed e2m1 with e8m0 scales of 32 channels, ROW_MAJOR or SWIZZLED."""
    value = decode_e2m1(unpack_e2m1(data))
    return _upscaled(value, decode_e8m0(_row_major(data, scale, value.shape[1], MX_GROUP, layout)), dtype, live)


def upscale_nvfp4(
    data: Tensor,
    scale: Tensor,
    tensor_scale: Tensor,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    dtype: torch.dtype = _BF16,
    live: Tensor | None = None,
) -> Tensor:
    """Return rows of packed e2m1 with e4m3 scales of 16 channels, ROW_MAJOR or SWIZZLED, times ``tensor_scale``, float32 (1,)."""
    value = decode_e2m1(unpack_e2m1(data))
    factor = _row_major(data, scale, value.shape[1], NV_GROUP, layout).to(torch.float32) * tensor_scale
    return _upscaled(value, factor, dtype, live)


def _row_major(data: Tensor, scale: Tensor, hidden: int, group: int, layout: ScaleLayout) -> Tensor:
    shape = data.shape[0], hidden // group
    to_storage(scale, *shape, layout)
    return unswizzle(scale, *shape) if layout is ScaleLayout.SWIZZLED else scale


def _upscaled(value: Tensor, scale: Tensor, dtype: torch.dtype, live: Tensor | None) -> Tensor:
    check_live(value, live)
    count, hidden = value.shape
    product = value.view(count, scale.shape[1], -1) * scale.unsqueeze(2) if count else value
    return live_rows(product.view(count, hidden), live).to(dtype)

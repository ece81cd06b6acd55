"""Every format that ops/quantize makes and ops/upscale takes, by name, and an independent implementation of them in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor

from moe_typed.ops.scale_layout.spec import ScaleLayout

Scaled: TypeAlias = tuple[Tensor, ...]
FN, FNUZ, FP4 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2
COLUMN, SWIZZLED = ScaleLayout.COLUMN_MAJOR, ScaleLayout.SWIZZLED
TENSOR_SCALE: Final = 0.0375


@dataclass(frozen=True)
class Case:
    """A format: how a module of either room does it, the values that share a scale (0: all), and the format of data."""

    quantize: Callable[[ModuleType, Tensor, Tensor | None], Scaled]
    upscale: Callable[[ModuleType, Scaled, torch.dtype, Tensor | None], Tensor]
    group: int
    dtype: torch.dtype
    rounding: str | None = None  # of powers of two


def tensor_scale(like: Tensor) -> Tensor:
    return torch.full((1,), TENSOR_SCALE, device=like.device)


def groups(dtype: torch.dtype, layout: ScaleLayout = ScaleLayout.ROW_MAJOR) -> Case:
    return Case(
        lambda m, rows, live: m.quantize_fp8_groups(rows, layout, dtype, live),
        lambda m, scaled, out, live: m.upscale_fp8_groups(*scaled, layout, out, live),
        128,
        dtype,
    )


def words(dtype: torch.dtype) -> Case:
    return Case(
        lambda m, rows, live: m.quantize_fp8_groups_ue8m0(rows, dtype, live),
        lambda m, scaled, out, live: m.upscale_fp8_groups_ue8m0(*scaled, out, live),
        128,
        dtype,
        "up",
    )


def per_row(dtype: torch.dtype) -> Case:
    def quantize(m: ModuleType, rows: Tensor, live: Tensor | None) -> Scaled:
        return cast("Scaled", m.quantize_int8_rows(rows, live) if dtype == torch.int8 else m.quantize_fp8_rows(rows, dtype, live))

    return Case(quantize, lambda m, scaled, out, live: m.upscale_rows(*scaled, out, live), -1, dtype)


def per_tensor(dtype: torch.dtype) -> Case:
    return Case(
        lambda m, rows, live: (m.quantize_fp8_tensor(rows, tensor_scale(rows), dtype, live), tensor_scale(rows)),
        lambda m, scaled, out, live: m.upscale_tensor(*scaled, out, live),
        0,
        dtype,
    )


def mxfp8(rounding: str, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, dtype: torch.dtype = FN) -> Case:
    return Case(
        lambda m, rows, live: m.quantize_mxfp8(rows, rounding, layout, dtype, live),
        lambda m, scaled, out, live: m.upscale_mxfp8(*scaled, layout, out, live),
        32,
        dtype,
        rounding,
    )


def mxfp4(rounding: str, layout: ScaleLayout = ScaleLayout.ROW_MAJOR) -> Case:
    return Case(
        lambda m, rows, live: m.quantize_mxfp4(rows, rounding, layout, live),
        lambda m, scaled, out, live: m.upscale_mxfp4(*scaled, layout, out, live),
        32,
        FP4,
        rounding,
    )


def nvfp4(layout: ScaleLayout = ScaleLayout.ROW_MAJOR) -> Case:
    return Case(
        lambda m, rows, live: (*m.quantize_nvfp4(rows, tensor_scale(rows), layout, live), tensor_scale(rows)),
        lambda m, scaled, out, live: m.upscale_nvfp4(*scaled, layout, out, live),
        16,
        FP4,
    )


CASES: Final = {
    "fp8 groups": groups(FN),
    "fp8 groups, by column": groups(FN, COLUMN),
    "fp8 groups, fnuz": groups(FNUZ),
    "fp8 groups, words": words(FN),
    "fp8 groups, words, fnuz": words(FNUZ),
    "fp8 rows": per_row(FN),
    "fp8 rows, fnuz": per_row(FNUZ),
    "int8 rows": per_row(torch.int8),
    "fp8 tensor": per_tensor(FN),
    "fp8 tensor, fnuz": per_tensor(FNUZ),
    "mxfp8 up": mxfp8("up"),
    "mxfp8 floor": mxfp8("floor"),
    "mxfp8 even": mxfp8("even"),
    "mxfp8 up, swizzled": mxfp8("up", SWIZZLED),
    "mxfp8 up, fnuz": mxfp8("up", dtype=FNUZ),
    "mxfp4 up": mxfp4("up"),
    "mxfp4 floor": mxfp4("floor"),
    "mxfp4 even": mxfp4("even"),
    "mxfp4 even, swizzled": mxfp4("even", SWIZZLED),
    "nvfp4": nvfp4(),
    "nvfp4, swizzled": nvfp4(SWIZZLED),
}


def raw(tensor: Tensor) -> Tensor:
    """Return the bytes, flat, to compare."""
    return tensor.flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


# ---- the same in float64: no bit operations, no casts to small formats -------------------------------------------------------------

_SHAPES = {FN: (3, 7, 448.0), FNUZ: (3, 8, 240.0), FP4: (1, 1, 6.0)}  # mantissa bits, bias, largest
_LOG2_STEPS = {FN: 8, FNUZ: 7, FP4: 2}  # of the largest power of two


def largest(dtype: torch.dtype) -> float:
    return 127.0 if dtype == torch.int8 else _SHAPES[dtype][2]


def magnitudes(dtype: torch.dtype) -> Tensor:
    """Return every magnitude that the format has, float64, at the index of its code."""
    if dtype == torch.int8:
        return torch.arange(128, dtype=torch.float64)
    mantissa, bias, most = _SHAPES[dtype]
    found: list[float] = []
    for exponent in range(16):
        for fraction in range(2**mantissa):
            normal = (1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias)
            found.append(normal if exponent else fraction / 2**mantissa * 2.0 ** (1 - bias))
    return torch.tensor([value for value in found if value <= most], dtype=torch.float64)


def nearest(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the nearest value of the format, float64, ties to even codes, saturating."""
    table = magnitudes(dtype)
    code = torch.arange(len(table))
    distance = (value.abs().clamp(max=largest(dtype)).unsqueeze(-1) - table).abs()
    is_nearest = distance == distance.amin(-1, keepdim=True)
    chosen = torch.where(is_nearest, code % 2, 2).argmin(-1)
    return table[chosen] * torch.where(value < 0, -1.0, 1.0)


def scale_of(amax: Tensor, case: Case) -> Tensor:
    """Return the scale, float64, of finite groups that are not all zero, and not next to the least that float32 holds."""
    if case.rounding is None and case.group == 16:
        return nearest((amax / (6 * torch.tensor(TENSOR_SCALE, dtype=torch.float32)).double()).float().double(), FN)
    if case.rounding is None:
        return (amax / largest(case.dtype)).float().double()
    if case.rounding == "up":
        exponent = torch.ceil(torch.log2(amax / largest(case.dtype)))
        exponent = torch.where(largest(case.dtype) * torch.exp2(exponent - 1) >= amax, exponent - 1, exponent)  # where log2 was rounded up, or down
        return torch.exp2(torch.where(largest(case.dtype) * torch.exp2(exponent) < amax, exponent + 1, exponent))
    mantissa = _SHAPES[case.dtype][0]
    fraction, exponent = torch.frexp(amax)  # amax = fraction * 2^exponent, from a half to 1
    if case.rounding == "even":
        fraction = torch.floor(fraction * 2 ** (mantissa + 1) + 0.5)
        fraction, carry = torch.frexp(fraction / 2 ** (mantissa + 1))
        exponent = exponent + carry
    return torch.exp2(exponent - 1.0 - _LOG2_STEPS[case.dtype])


def expected(rows: Tensor, case: Case) -> Tensor:
    """Return the values, float64, that rows have once they are quantised."""
    value = rows.double()
    if case.group == 0:
        scale = torch.tensor(TENSOR_SCALE, dtype=torch.float32).double()
        return nearest((value * (1 / scale).float().double()).float().double(), case.dtype) * scale
    shaped = value.view(len(rows), -1, case.group if case.group > 0 else rows.shape[1])
    scale = scale_of(shaped.abs().amax(-1, keepdim=True), case)
    if case.group == 16:
        scale = (scale * torch.tensor(TENSOR_SCALE, dtype=torch.float32).double()).float().double()
    code = nearest((shaped * (1 / scale).float().double()).float().double(), case.dtype)
    return torch.where(scale == 0, 0.0, code * scale).view(rows.shape)

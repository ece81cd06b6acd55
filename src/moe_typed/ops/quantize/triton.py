"""Quantise rows in one pass: a program holds whole groups in registers, finds their scales and writes both. Only a scale for all rows takes a second.

Where the number of live rows is known on the device alone, a fixed number of programs shares them out, so that a buffer that is mostly padding costs
what its live rows cost.
"""

from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from ..minifloat.spec import E2M1, MXFP_ROUNDING, NUMBERS, Number, PowerOfTwo, power_of_two
from ..minifloat.triton import bits_of, decode_e4m3fn, encode, encode_e4m3fn, encode_e8m0, float_of, reciprocal_e8m0
from ..scale_layout.spec import TILE_ROWS, ScaleLayout, as_bytes, ceil_to, empty_storage, of_storage, stored_shape
from ..scale_layout.triton import offset, stored_rows
from .spec import (
    FP8_GROUP,
    MX_GROUP,
    NV_GROUP,
    NV_TENSOR_MAX,
    PROGRAMS,
    SMALLEST_SCALE,
    WORD_CODES,
    ScaleKind,
    Tile,
    check_groups,
    check_live,
    thread_values,
    tile,
)

_E4M3FN = torch.float8_e4m3fn
_AMAX_BLOCK: Final = 8192  # values that a program of 8 warps reads at a time for a scale of all rows: four 16-byte loads a thread
_AMAX_WARPS: Final = 8
_AMAX_PROGRAMS: Final = 1024  # at most, so that one program reads what they found

_TENSOR = tl.constexpr(ScaleKind.TENSOR.value)
_FLOAT32 = tl.constexpr(ScaleKind.FLOAT32.value)
_E8M0 = tl.constexpr(ScaleKind.E8M0.value)
_FP4_BITS = tl.constexpr(E2M1.bits)
_WORD_CODES = tl.constexpr(WORD_CODES)
_FP4_MAX = tl.constexpr(E2M1.max)
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)


def quantize_fp8_groups(
    rows: Tensor,
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    dtype: torch.dtype = _E4M3FN,
    live: Tensor | None = None,
    only: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.quantize_fp8_groups. ``only``: see quantize_fp8_rows."""
    return _quantized(rows, live, None, dtype, FP8_GROUP, ScaleKind.FLOAT32, torch.float32, layout, only=only)


def quantize_fp8_groups_ue8m0(rows: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.quantize_fp8_groups_ue8m0."""
    rule = power_of_two(NUMBERS[dtype], "up")
    return _quantized(rows, live, None, dtype, FP8_GROUP, ScaleKind.E8M0, torch.int32, ScaleLayout.PACKED, rule)


def quantize_fp8_rows(rows: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.quantize_fp8_rows. ``only``: int32 (n,), the rows to quantise, as slots of align name them; the others are not looked at."""
    data, scale = _quantized(rows, live, None, dtype, rows.shape[1], ScaleKind.FLOAT32, torch.float32, ScaleLayout.ROW_MAJOR, only=only)
    return data, scale.squeeze(1)


def quantize_int8_rows(rows: Tensor, live: Tensor | None = None, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See reference.quantize_int8_rows. ``only``: see quantize_fp8_rows."""
    return quantize_fp8_rows(rows, torch.int8, live, only)


def quantize_fp8_tensor(rows: Tensor, scale: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None) -> Tensor:
    """See reference.quantize_fp8_tensor."""
    return _quantized(rows, live, scale, dtype, FP8_GROUP, ScaleKind.TENSOR, torch.float32, ScaleLayout.ROW_MAJOR)[0]


def fp8_tensor_scale(rows: Tensor, dtype: torch.dtype = _E4M3FN, live: Tensor | None = None) -> Tensor:
    """See reference.fp8_tensor_scale."""
    return _tensor_scale(rows, NUMBERS[dtype].max, live)


def quantize_mxfp8(
    rows: Tensor,
    rounding: MXFP_ROUNDING = "up",
    layout: ScaleLayout = ScaleLayout.ROW_MAJOR,
    dtype: torch.dtype = _E4M3FN,
    live: Tensor | None = None,
    only: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See reference.quantize_mxfp8. ``only``: see quantize_fp8_rows."""
    rule = power_of_two(NUMBERS[dtype], rounding)
    return _quantized(rows, live, None, dtype, MX_GROUP, ScaleKind.E8M0, torch.float8_e8m0fnu, layout, rule, only)


def quantize_mxfp4(
    rows: Tensor, rounding: MXFP_ROUNDING = "up", layout: ScaleLayout = ScaleLayout.ROW_MAJOR, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.quantize_mxfp4."""
    rule = power_of_two(E2M1, rounding)
    return _quantized(rows, live, None, torch.float4_e2m1fn_x2, MX_GROUP, ScaleKind.E8M0, torch.float8_e8m0fnu, layout, rule)


def quantize_nvfp4(
    rows: Tensor, tensor_scale: Tensor, layout: ScaleLayout = ScaleLayout.ROW_MAJOR, live: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See reference.quantize_nvfp4."""
    return _quantized(rows, live, tensor_scale, torch.float4_e2m1fn_x2, NV_GROUP, ScaleKind.E4M3, _E4M3FN, layout)


def nvfp4_tensor_scale(rows: Tensor, live: Tensor | None = None) -> Tensor:
    """See reference.nvfp4_tensor_scale."""
    return _tensor_scale(rows, NV_TENSOR_MAX, live)


def _quantized(
    rows: Tensor,
    live: Tensor | None,
    given: Tensor | None,
    dtype: torch.dtype,
    group: int,
    kind: ScaleKind,
    scale_dtype: torch.dtype,
    layout: ScaleLayout,
    rule: PowerOfTwo | None = None,
    only: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    check_live(rows, live)
    if only is not None and layout is not ScaleLayout.ROW_MAJOR:
        raise ValueError(f"some rows alone are quantised with row-major scales; {layout.name} was asked for")
    if kind is not ScaleKind.TENSOR:
        check_groups(rows, group)
    count, hidden = rows.shape
    number = NUMBERS[dtype]
    width, whole = (hidden // WORD_CODES, torch.int32) if number is E2M1 else (hidden, torch.uint8)
    data = torch.empty((count, width), dtype=whole, device=rows.device)
    scale = empty_storage(count, 0 if kind is ScaleKind.TENSOR else hidden // group, scale_dtype, layout, rows.device)
    if count:
        _quantize_rows(
            rows.contiguous(), live, only, given, data, as_bytes(scale), group, kind.value, layout.value, scale.stride(0), *(rule or (0, 0)), *number
        )
    return data.view(dtype), of_storage(scale, count, layout)


@custom_op("quantize_rows", writes=("data", "scale"))
def _quantize_rows(
    rows: Tensor,
    live: Tensor | None,
    only: Tensor | None,
    given: Tensor | None,
    data: Tensor,
    scale: Tensor,
    group: int,
    kind: int,
    layout: int,
    scale_stride: int,
    carry: int,
    exponent: int,
    bits: int,
    mantissa: int,
    bias: int,
    largest: int,
    nan: int,
) -> None:
    count, hidden = rows.shape
    number = Number(bits, mantissa, bias, largest, nan)
    values = thread_values(bits, group, count)
    block, constants = _constants(hidden, group, kind, layout, PowerOfTwo(carry, exponent), number, values)
    listed = count if only is None else only.shape[0]
    stored = ceil_to(count, TILE_ROWS) if layout == ScaleLayout.SWIZZLED else listed
    programs = -(-stored // block.rows) * -(-constants["STORED"] // block.groups)
    if live is not None:
        programs = min(programs, PROGRAMS)
    if not programs:
        return
    tensors = (rows, live, only, given, data, scale)
    _quantize(programs, tensors, (count, listed, scale_stride), constants, num_warps=block.warps)


@cache
def _constants(hidden: int, group: int, kind: int, layout: int, rule: PowerOfTwo, number: Number, values: int) -> tuple[Tile, dict[str, int]]:
    """Return the tile and the constants of a kernel, once: to work them out takes as long as to launch it."""
    order = ScaleLayout(layout)
    block = tile(hidden, group, order, values)
    stored = stored_shape(0, ceil_to(hidden, group) // group, order)[1]
    constants = {"HIDDEN": hidden, "GROUP": group, "KIND": kind, "LAYOUT": layout, "STORED": stored, "CARRY": rule.carry, "EXPONENT": rule.exponent}
    constants |= {"BITS": number.bits, "MANTISSA": number.mantissa, "BIAS": number.bias, "MAX": number.max, "NAN": number.nan}
    return block, constants | {"ROWS": block.rows, "GROUPS": block.groups, "WIDTH": block.width}


@Launcher
@triton.jit(do_not_specialize=["count", "listed", "scale_stride"])
def _quantize(
    rows_ptr: tl.tensor,
    live_ptr: tl.tensor | None,
    only_ptr: tl.tensor | None,
    given_ptr: tl.tensor | None,
    data_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    count: tl.tensor,
    listed: tl.tensor,
    scale_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
    LAYOUT: tl.constexpr,
    STORED: tl.constexpr,
    CARRY: tl.constexpr,
    EXPONENT: tl.constexpr,
    BITS: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    MAX: tl.constexpr,
    NAN: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    limit = count if live_ptr is None else tl.minimum(tl.load(live_ptr), count)
    given = 1.0 if given_ptr is None else tl.load(given_ptr)
    pieces: tl.constexpr = (STORED + GROUPS - 1) // GROUPS
    first = tl.program_id(0)
    # One tile for each program, and no loop in what is compiled, unless the number of rows is only known here.
    end = first + 1 if live_ptr is None else tl.cdiv(stored_rows(limit, LAYOUT), ROWS) * pieces
    for index in tl.range(first, end, 1 if live_ptr is None else tl.num_programs(0)):
        row = (index // pieces * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        if only_ptr is not None:
            row = tl.load(only_ptr + row, mask=row < listed, other=count).to(tl.int64)
        group = index % pieces * GROUPS + tl.arange(0, GROUPS)
        column = group[None, :, None] * GROUP + tl.arange(0, WIDTH)[None, None, :]
        mask = (row < limit)[:, None, None] & (column < HIDDEN)
        value = tl.load(rows_ptr + row[:, None, None] * HIDDEN + column, mask=mask, other=0.0).to(tl.float32)
        if KIND == _TENSOR:
            held = tl.zeros((ROWS, GROUPS), tl.float32) + given
            reciprocal = tl.div_rn(1.0, held)
            value = tl.where(tl.abs(value) < float("inf"), value, float("nan"))
        else:
            amax = float_of(tl.max(bits_of(tl.abs(value)), 2))  # magnitudes are ordered as their bits are, and NaN is above infinity
            if KIND == _FLOAT32:
                held = _float32_scale(amax, MAX)
                reciprocal = tl.div_rn(1.0, held)
            elif KIND == _E8M0:
                held = encode_e8m0(amax, CARRY, EXPONENT)
                reciprocal = reciprocal_e8m0(held)
            else:
                ratio = tl.where(amax < float("inf"), tl.div_rn(amax, given * _FP4_MAX), float("nan"))
                held = encode_e4m3fn(ratio)
                factor = decode_e4m3fn(held) * given
                reciprocal = tl.where(factor < _SMALLEST_SCALE, 0.0, tl.div_rn(1.0, factor))
        code = encode(value * reciprocal[:, :, None], BITS, MANTISSA, BIAS, MAX, NAN)
        if BITS == _FP4_BITS:
            word = group[None, :, None] * (GROUP // _WORD_CODES) + tl.arange(0, WIDTH // _WORD_CODES)[None, None, :]
            codes = tl.reshape(code, (ROWS, GROUPS, WIDTH // _WORD_CODES, _WORD_CODES))
            written = (row < limit)[:, None, None] & (word < HIDDEN // _WORD_CODES)
            words = tl.sum(codes << (4 * tl.arange(0, _WORD_CODES)), 3)
            tl.store(data_ptr + row[:, None, None] * (HIDDEN // _WORD_CODES) + word, words, mask=written)
        else:
            tl.store(data_ptr + row[:, None, None] * HIDDEN + column, code.to(tl.uint8), mask=mask)
        if KIND != _TENSOR:
            # Last, since its way to the threads that write it takes a barrier.
            place = offset(row[:, None], group[None, :], scale_stride, HIDDEN // GROUP, LAYOUT)
            stored = (row < stored_rows(limit, LAYOUT))[:, None] & (group < STORED)[None, :]
            tl.store(scale_ptr + place, held.to(scale_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _float32_scale(amax: tl.tensor, MAX: tl.constexpr) -> tl.tensor:
    scale = tl.where(amax == 0.0, 1.0, tl.maximum(tl.div_rn(amax, MAX * 1.0), _SMALLEST_SCALE))
    return tl.where(amax < float("inf"), scale, float("nan"))


def _tensor_scale(rows: Tensor, largest: int, live: Tensor | None) -> Tensor:
    check_live(rows, live)
    if not rows.numel():
        return torch.ones(1, dtype=torch.float32, device=rows.device)
    scale = torch.empty(1, dtype=torch.float32, device=rows.device)
    found = torch.empty(min(_AMAX_PROGRAMS, triton.cdiv(rows.numel(), _AMAX_BLOCK)), dtype=torch.float32, device=rows.device)
    _find_tensor_scale(rows.contiguous(), live, found, scale, largest)
    return scale


@custom_op("find_tensor_scale", writes=("found", "scale"))
def _find_tensor_scale(rows: Tensor, live: Tensor | None, found: Tensor, scale: Tensor, largest: int) -> None:
    constants = {"HIDDEN": rows.shape[1], "BLOCK": _AMAX_BLOCK}
    _find_amax(found.shape[0], (rows, live, found), (rows.shape[0],), constants, num_warps=_AMAX_WARPS)
    _to_scale(1, (found, scale), (found.shape[0],), {"MAX": largest, "BLOCK": _AMAX_PROGRAMS}, num_warps=1)


@Launcher
@triton.jit(do_not_specialize=["count"])
def _find_amax(
    rows_ptr: tl.tensor, live_ptr: tl.tensor | None, found_ptr: tl.tensor, count: tl.tensor, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """Find the largest finite magnitude of each program's share."""
    limit = count if live_ptr is None else tl.minimum(tl.load(live_ptr), count)
    size = limit.to(tl.int64) * HIDDEN
    amax = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * BLOCK, size, tl.num_programs(0) * BLOCK):
        place = start + tl.arange(0, BLOCK)
        magnitude = tl.abs(tl.load(rows_ptr + place, mask=place < size, other=0.0).to(tl.float32))
        amax = tl.maximum(amax, tl.where(magnitude < float("inf"), magnitude, 0.0))
    tl.store(found_ptr + tl.program_id(0), tl.max(amax, 0))


@Launcher
@triton.jit(do_not_specialize=["count"])
def _to_scale(found_ptr: tl.tensor, scale_ptr: tl.tensor, count: tl.tensor, MAX: tl.constexpr, BLOCK: tl.constexpr) -> None:
    place = tl.arange(0, BLOCK)
    tl.store(scale_ptr, _float32_scale(tl.max(tl.load(found_ptr + place, mask=place < count, other=0.0), 0), MAX))

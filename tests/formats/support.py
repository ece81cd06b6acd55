"""Rows in every format, and what they mean: decoded byte by byte in float64, from addresses in memory, without the code under test."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import pytest
import torch
from torch import Tensor

from moe_typed import BoundaryError, Conversion, Fp32Rows, Payload, debug
from moe_typed.formats import (
    AnyDenseRows,
    Format,
    Fp8Block128PackedRows,
    Fp8Block128PackedSlabRows,
    Fp8Block128Rows,
    Fp8Block128SlabRows,
    Int4TokenRows,
    MxFp4PairRows,
    MxFp8PairRows,
    NvFp4Rows,
    ScaledRows,
    ScaleOrder,
    quantizers,
    upscalers,
)
from moe_typed.formats.int4 import pack_words
from tests.ops.support import floats

FN, FNUZ, FP4, E8 = torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2, torch.float8_e8m0fnu

P = TypeVar("P", bound=Payload)

DENSE_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_ALL: Final[list[Conversion[Any, Any]]] = [value for value in vars(quantizers).values() if isinstance(value, Conversion)]
QUANTIZERS: Final[Mapping[type[Payload], Conversion[AnyDenseRows, ScaledRows]]] = {value.target: value for value in _ALL}

# What libraries alone make, and the class of flat rows with the same data and the same scales in another order.
SLABS: Final[Mapping[type[ScaledRows], type[ScaledRows]]] = {
    Fp8Block128SlabRows: Fp8Block128Rows,
    Fp8Block128PackedSlabRows: Fp8Block128PackedRows,
}
SCALED: Final[tuple[type[Payload], ...]] = (*QUANTIZERS, *SLABS)


def _pairs(scale: Tensor) -> Tensor:
    return scale.view(scale.shape[0], scale.shape[1] // 2, 2)


def _int4(data: Tensor) -> Int4TokenRows:
    scale = data.abs().amax(1) / 7
    return Int4TokenRows(pack_words((data / scale.unsqueeze(1)).round()), scale)


def _mxfp8_pairs(data: Tensor) -> MxFp8PairRows:
    rows = quantizers.mxfp8.run(Fp32Rows(data))
    return MxFp8PairRows(rows.data, _pairs(rows.scale))


def _mxfp4_pairs(data: Tensor) -> MxFp4PairRows:
    rows = quantizers.mxfp4.run(Fp32Rows(data))
    return MxFp4PairRows(rows.data, _pairs(rows.scale))


# What the Ascend NPU alone has; its operators quantise to them.
NPU: Final[Mapping[type[Payload], Callable[[Tensor], ScaledRows]]] = {
    Int4TokenRows: _int4,
    MxFp8PairRows: _mxfp8_pairs,
    MxFp4PairRows: _mxfp4_pairs,
}

UPSCALERS: Final[tuple[Conversion[Any, Any], ...]] = (upscalers.bf16, upscalers.fp16, upscalers.fp32)


def noise(rows: int, hidden: int, seed: int = 0, spread: int = 20) -> Tensor:
    """Return float32 rows whose groups of 16 differ in size by powers of two up to ``spread`` either way."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-spread, spread + 1, (rows, hidden // 16), generator=generator).float()).repeat_interleave(16, 1)
    return torch.randn(rows, hidden, generator=generator) * sizes


def make(cls: type[P], *parts: object) -> P:
    """Return a payload of a class that is known at run time alone."""
    build: Callable[..., P] = cls
    return build(*parts)


def title(value: object) -> str | None:
    """Return what a conversion is called in the name of a test."""
    return value.name if isinstance(value, Conversion) else None


def refused(build: Callable[..., object], *values: object) -> BoundaryError:
    with debug("layout"), pytest.raises(BoundaryError) as caught:
        build(*values)
    return caught.value


def ones(dtype: torch.dtype, *shape: int) -> Tensor:
    """Return a contiguous tensor of any dtype whose bytes are all 1."""
    return torch.ones(torch.Size(shape).numel() * dtype.itemsize, dtype=torch.uint8).view(dtype).view(shape)


def wide(cls: type[Payload], hidden: int) -> int:
    """Return a width of the format that is not below ``hidden``: words of a packed slab are full."""
    return -(-hidden // 512) * 512 if cls is Fp8Block128PackedSlabRows else hidden


def slab_shape(rows: int) -> tuple[int, int]:
    """Return (local experts, capacity) of a slab of so many rows: up to three experts."""
    experts = next(count for count in (3, 2, 1) if rows % count == 0)
    return experts, rows // experts


def in_slab(scale: Tensor, experts: int, capacity: int) -> Tensor:
    """Return (rows, n) as (experts, capacity, n), each expert's part column-major."""
    memory = torch.empty(experts, scale.shape[1], capacity, dtype=scale.dtype)
    for expert in range(experts):
        for position in range(capacity):
            memory[expert, :, position] = scale[expert * capacity + position]
    return memory.transpose(1, 2)


def slab(cls: type[Payload], data: Tensor, experts: int, capacity: int) -> ScaledRows:
    """Return float32 rows (experts * capacity, hidden) as a slab."""
    flat = quantized(next(same for name, same in SLABS.items() if name is cls), data)
    return make(next(name for name in SLABS if name is cls), flat.data, in_slab(flat.scale, experts, capacity))


def quantized(target: type[Payload], data: Tensor) -> ScaledRows:
    """Return float32 rows in a format with scales."""
    with debug("strict"):
        if target in NPU:
            return NPU[target](data)
        if target in SLABS:
            return slab(target, data, *slab_shape(data.shape[0]))
        return QUANTIZERS[target].run(Fp32Rows(data))


# ---- numbers -----------------------------------------------------------------------------------------------------------------------


def minifloat(code: int, mantissa: int, bias: int, bits: int) -> float:
    """Return the value of a code with a sign and subnormals; the codes of NaN are not looked at."""
    sign = -1.0 if code >> (bits - 1) else 1.0
    exponent, fraction = code >> mantissa & (1 << (bits - 1 - mantissa)) - 1, code & (1 << mantissa) - 1
    return sign * math.ldexp(fraction + (exponent > 0) * 2**mantissa, max(exponent, 1) - bias - mantissa)


def e8m0_value(code: int) -> float:
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


E4M3FN: Final = [math.nan if code & 0x7F == 0x7F else minifloat(code, 3, 7, 8) for code in range(256)]
E4M3FNUZ: Final = [math.nan if code == 0x80 else minifloat(code, 3, 8, 8) for code in range(256)]
E2M1: Final = [minifloat(code, 1, 1, 4) for code in range(16)]
TABLES: Final = {
    FN: E4M3FN,
    FNUZ: E4M3FNUZ,
    torch.int8: [float(code - 256 if code > 127 else code) for code in range(256)],
    FP4: E2M1,
}


def table(dtype: torch.dtype) -> Tensor:
    """Return the values of all codes of a data dtype, float64."""
    return torch.tensor(TABLES[dtype], dtype=torch.float64)


def codes_of(data: Tensor) -> Tensor:
    """Return the codes of the data one by one, int64; those of fp4 from the low nibble of each byte on."""
    codes = data.view(torch.uint8).long()
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2) if data.dtype == FP4 else codes


# ---- scales ------------------------------------------------------------------------------------------------------------------------


def memory(tensor: Tensor) -> list[int]:
    """Return the bytes from the first element of a tensor to the end of its memory."""
    words = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[tensor.storage_offset() * tensor.dtype.itemsize :]
    return [int(byte) for byte in words]


def scale_address(fmt: Format, rows: int, hidden: int, capacity: int = 0) -> Callable[[int, int], int]:
    """Return where the scale of (row, channel) lies, in elements of the scale's own dtype, or bytes where several share an element.

    ``capacity``: how many rows an expert has in a slab.
    """
    scale = fmt.scale
    assert scale is not None
    width = scale.group[1] or hidden
    groups, aligned = hidden // width, -(-rows // 4) * 4

    def address(row: int, channel: int) -> int:
        group = channel // width
        match scale.order:
            case ScaleOrder.SCALAR:
                return 0
            case ScaleOrder.PER_ROW | ScaleOrder.ROW_MAJOR | ScaleOrder.ROW_MAJOR_PAIRS:
                return row * groups + group
            case ScaleOrder.COLUMN_MAJOR_ALIGNED:
                return (group // scale.per_element * aligned + row) * scale.per_element + group % scale.per_element
            case ScaleOrder.SLAB_COLUMN_MAJOR:
                expert, position = divmod(row, capacity)
                word = (expert * (groups // scale.per_element) + group // scale.per_element) * capacity + position
                return word * scale.per_element + group % scale.per_element
            case ScaleOrder.SWIZZLED_128X4:
                tile = row // 128 * -(-groups // 4) + group // 4
                return tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4

    return address


def scale_table(payload: ScaledRows) -> Tensor:
    """Return the scale of each value, float64 (rows, hidden), read from memory; that of nvfp4 with the global scale, rounded to float32."""
    fmt, rows, hidden = payload.format, payload.rows, payload.hidden
    scale = fmt.scale
    assert scale is not None
    capacity = payload.scale.shape[1] if scale.order is ScaleOrder.SLAB_COLUMN_MAJOR else 0
    address, held = scale_address(fmt, rows, hidden, capacity), memory(payload.scale)
    if scale.dtype == torch.float32:
        values = floats(torch.tensor(held, dtype=torch.uint8).view(torch.float32))
    elif scale.dtype == FN:
        values = [E4M3FN[byte] for byte in held]
    else:
        values = [e8m0_value(byte) for byte in held]
    width = scale.group[1] or hidden
    groups = [[values[address(row, first)] for first in range(0, hidden, width)] for row in range(rows)]
    found = torch.tensor(groups, dtype=torch.float64).view(rows, hidden // width).repeat_interleave(width, 1)
    return (found * payload.global_scale.factor.double()).float().double() if isinstance(payload, NvFp4Rows) else found


def meaning(payload: ScaledRows) -> Tensor:
    """Return the values of a payload, float64 (rows, hidden)."""
    return table(payload.format.data_dtype)[codes_of(payload.data)] * scale_table(payload)

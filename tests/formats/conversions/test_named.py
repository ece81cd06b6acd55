"""Every named conversion: what it takes and makes, and its numbers against an independent reading of its scales and codes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_typed import Conversion, Fp32Rows, debug
from moe_typed.formats import (
    Fp8Block128PackedRows,
    Fp8TensorRows,
    InverseScaleFactor,
    MxFp4Rows,
    MxFp8Rows,
    NvFp4Rows,
    ScaledRows,
    ScaleFactor,
    ScaleOrder,
    catalogue,
    quantizers,
    relayouts,
    upscalers,
)
from moe_typed.formats.catalogue import PAYLOADS
from moe_typed.ops.minifloat.spec import MXFP_ROUNDING
from tests.formats.support import (
    DENSE_DTYPES,
    FP4,
    QUANTIZERS,
    SLABS,
    UPSCALERS,
    codes_of,
    make,
    meaning,
    noise,
    quantized,
    scale_table,
    table,
    wide,
)
from tests.ops.support import floats

SCALED = tuple(QUANTIZERS)
every_format = pytest.mark.parametrize("cls", SCALED, ids=lambda cls: cls.__name__)
DENSE = {cls.format.data_dtype: cls for cls in PAYLOADS if cls.format.scale is None}
MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 240.0, torch.int8: 127.0, FP4: 6.0}
ROUNDINGS: tuple[MXFP_ROUNDING, ...] = ("up", "floor", "even")


def group_amax(data: Tensor, group: tuple[int, int]) -> Tensor:
    """Return for each value the largest magnitude of its group, float64."""
    rows, hidden = data.shape
    high, wide = group[0] or rows, group[1] or hidden
    blocks = data.double().abs().view(rows // high, high, hidden // wide, wide).amax((1, 3))
    return blocks.repeat_interleave(high, 0).repeat_interleave(wide, 1)


# ---- classes -----------------------------------------------------------------------------------------------------------------------


def test_every_format_can_be_made_and_undone() -> None:
    """But slabs, which libraries alone make, and the rows of the NPU, whose operators make them."""
    of_npu = {cls for cls in catalogue.PAYLOADS if cls.__module__.endswith(".payloads.ascend")}
    assert {*QUANTIZERS, *SLABS} == {cls for cls in catalogue.PAYLOADS if cls.format.scale is not None} - of_npu
    for upscale in UPSCALERS:
        assert set(upscale.source) == {*QUANTIZERS, *SLABS}


def test_names_are_those_of_the_formats() -> None:
    for cls, quantize in QUANTIZERS.items():
        assert quantize.name == "quantize_" + cls.format.name.replace("-", "_")
        assert set(quantize.source) == set(DENSE.values())
    assert [upscale.name for upscale in UPSCALERS] == ["upscale_bf16", "upscale_fp16", "upscale_fp32"]
    assert [upscale.target for upscale in UPSCALERS] == [DENSE[dtype] for dtype in DENSE_DTYPES]
    assert {value.name for value in vars(relayouts).values()} == {
        "scales_to_column_major",
        "scales_to_row_major",
        "slab_scales_to_row_major",
        "pack_scales",
        "unpack_scales",
        "swizzle_scales",
        "unswizzle_scales",
    }


@every_format
@pytest.mark.parametrize("dtype", DENSE_DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_conversion_makes_what_it_says_of_all_that_it_takes(cls: type[ScaledRows], dtype: torch.dtype, rows: int) -> None:
    dense: Any = make(DENSE[dtype], noise(rows, 256, spread=5).to(dtype))
    with debug("strict"):
        made = QUANTIZERS[cls].run(dense)
        made.check_live(rows)
        for upscale in UPSCALERS:
            back = upscale.run(made)
            assert type(back) is upscale.target
            assert (back.rows, back.hidden) == (rows, 256)
    assert type(made) is cls
    # float32 holds every bfloat16 and float16, so the dtype of the rows changes nothing
    again = quantized(cls, dense.data.float())
    assert torch.equal(made.dequantize(), again.dequantize())


# ---- numbers -----------------------------------------------------------------------------------------------------------------------


@every_format
@pytest.mark.parametrize("seed", range(2))
def test_every_code_is_the_nearest_to_value_over_scale(cls: type[ScaledRows], seed: int) -> None:
    data = noise(4, 256, seed)
    data[2] = 0
    made = quantized(cls, data)
    scale = scale_table(made)
    wanted = torch.where(scale > 0, data.double() / scale, 0.0)
    numbers = table(cls.format.data_dtype)
    numbers = numbers[~numbers.isnan()]
    nearest = (wanted.unsqueeze(-1) - numbers).abs().amin(-1)
    got = (wanted - table(cls.format.data_dtype)[codes_of(made.data)]).abs()
    assert bool((got <= nearest + wanted.abs() * 2.0**-22).all())  # the reciprocal of the scale and the product are rounded


FLOAT32_SCALED = [cls for cls in SCALED if cls.format.scale is not None and cls.format.scale.dtype == torch.float32]


@pytest.mark.parametrize("cls", FLOAT32_SCALED, ids=lambda cls: cls.__name__)
def test_float32_scales_are_the_largest_over_the_largest(cls: type[ScaledRows]) -> None:
    data = noise(4, 256)
    fmt = cls.format
    assert fmt.scale is not None
    amax = group_amax(data, fmt.scale.group)
    assert torch.equal(scale_table(quantized(cls, data)), (amax / MAX[fmt.data_dtype]).float().double())


def power(amax: float, dtype: torch.dtype, rounding: str) -> float:
    """Return the power of two that a rule chooses, from its definition in float64."""
    largest = MAX[dtype]
    top = math.floor(math.log2(largest))
    mantissa = 1 if dtype == FP4 else 3
    if rounding == "even":
        step = 2.0 ** (math.frexp(amax)[1] - 1 - mantissa)
        amax = math.floor(amax / step + 0.5) * step  # to the format's mantissa, ties up
    if rounding == "up":
        fraction, exponent = math.frexp(amax / largest)
        return math.ldexp(1.0, exponent - (fraction == 0.5))
    return math.ldexp(1.0, math.frexp(amax)[1] - 1 - top)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("cls", "dtype"), [(MxFp8Rows, torch.float8_e4m3fn), (MxFp4Rows, FP4)])
def test_powers_of_two_follow_their_rule(cls: type[ScaledRows], dtype: torch.dtype, rounding: MXFP_ROUNDING) -> None:
    tops = [1.0, 1.5, 1.74, 1.75, 1.76, 1.9, 1.9999, 448.0, 449.0, 6.0, 6.01, 3.0, 0.3, 1e-30, 3e38]
    data = torch.zeros(len(tops), 32)
    data[:, 7] = -torch.tensor(tops)
    conversion: Conversion[Any, Any] = (quantizers.mxfp8_rounded if cls is MxFp8Rows else quantizers.mxfp4_rounded)(rounding)
    assert conversion.name == QUANTIZERS[cls].name + ("" if rounding == "up" else f"_{rounding}")
    made = conversion.run(Fp32Rows(data))
    exact = [float(top) for top in torch.tensor(tops, dtype=torch.float32)]
    assert floats(scale_table(made)[:, 0]) == [power(top, dtype, rounding) for top in exact]
    largest = scale_table(made)[:, 7] * MAX[dtype]
    saturated = made.dequantize()[:, 7].double().abs() == largest
    above = data[:, 7].double().abs() > largest
    assert bool((saturated | ~above).all())
    assert bool(above.any()) is (rounding != "up")


def test_the_swizzled_quantiser_is_the_other_one_and_then_swizzled() -> None:
    rows = Fp32Rows(noise(130, 256))
    for rounding in ROUNDINGS:
        straight = relayouts.swizzle.run(quantizers.mxfp8_rounded(rounding).run(rows))
        made = quantizers.mxfp8_swizzled_rounded(rounding).run(rows)
        assert torch.equal(made.scale.view(torch.uint8), straight.scale.view(torch.uint8))
        assert torch.equal(made.data.view(torch.uint8), straight.data.view(torch.uint8))


@pytest.mark.parametrize("cls", [Fp8Block128PackedRows, MxFp8Rows, MxFp4Rows], ids=lambda cls: cls.__name__)
def test_power_of_two_formats_keep_what_they_hold(cls: type[ScaledRows]) -> None:
    once = quantized(cls, noise(5, 256))
    twice = quantized(cls, once.dequantize())
    assert torch.equal(twice.dequantize(), once.dequantize())


@every_format
def test_larger_values_never_come_back_smaller(cls: type[ScaledRows]) -> None:
    """Within a group, quantising is monotone."""
    ramp = torch.linspace(-3, 3, 256).sort().values.repeat(2, 1)
    group = cls.format.scale.group[1] if cls.format.scale is not None else 0
    back = quantized(cls, ramp).dequantize().view(2, -1, group or 256)
    assert bool((back.diff(dim=-1) >= 0).all())


@pytest.mark.parametrize("cls", [*SCALED, *SLABS], ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_upscaling_rounds_the_meaning_once(cls: type[ScaledRows], rows: int) -> None:
    made: Any = quantized(cls, noise(rows, wide(cls, 256)))
    exact = meaning(made).float()
    assert torch.equal(upscalers.fp32.run(made).data, exact)
    assert torch.equal(upscalers.bf16.run(made).data, exact.bfloat16())
    assert torch.equal(upscalers.fp16.run(made).data, exact.half())


# ---- zeros, what is not finite, what is tiny ------------------------------------------------------------------------------------------


@every_format
def test_zeros_come_back_as_zeros(cls: type[ScaledRows]) -> None:
    made = quantized(cls, torch.zeros(3, 256))
    made.check_live(3)
    assert not made.dequantize().any()


@every_format
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_poison_spoils_its_group_alone(cls: type[ScaledRows], poison: float) -> None:
    assert cls.format.scale is not None
    clean = noise(3, 256)
    dirty = clean.clone()
    dirty[1, 130] = poison
    got, expected = quantized(cls, dirty).dequantize(), quantized(cls, clean).dequantize()
    spoilt = torch.zeros(3, 256, dtype=torch.bool)
    if cls.format.scale.order is ScaleOrder.SCALAR:  # one given scale: the value alone
        spoilt[1, 130] = True
    else:
        width = cls.format.scale.group[1] or 256
        spoilt[1, 130 // width * width : (130 // width + 1) * width] = True
    assert torch.equal(got.isnan(), spoilt)
    if int(clean.abs().argmax()) - 256 != 130:  # the scale over all is that of the finite values
        assert torch.equal(got[~spoilt], expected[~spoilt])


@every_format
@pytest.mark.parametrize("top", [1e-45, 2.0**-140, 2.0**-126])
def test_tiny_rows_are_finite_and_no_larger(cls: type[ScaledRows], top: float) -> None:
    back = quantized(cls, torch.full((2, 256), top)).dequantize()
    assert bool((back >= 0).all())
    assert bool((back <= 2 * top).all())


@every_format
def test_the_largest_rows_are_finite(cls: type[ScaledRows]) -> None:
    """Up to 2^127: what is so near to float32's end that its code is 2^128 becomes infinite when it is read."""
    back = quantized(cls, torch.tensor([[2.0**127, -(2.0**127)] * 128])).dequantize()
    assert floats(back[0, :2]) == pytest.approx([2.0**127, -(2.0**127)], rel=2.0**-4)


# ---- scales that are given -----------------------------------------------------------------------------------------------------------


def test_a_static_scale_is_used_as_it_is_and_saturates() -> None:
    scale = ScaleFactor(torch.tensor([0.5]))
    with debug("strict"):
        made = quantizers.fp8_tensor_static(scale).run(Fp32Rows(torch.tensor([[1.0, -300.0, 224.0, 0.0]])))
    assert isinstance(made, Fp8TensorRows)
    assert made.scale is scale.factor
    assert floats(made.dequantize()[0]) == [1.0, -224.0, 224.0, 0.0]


def test_a_static_global_scale() -> None:
    data = noise(3, 64, spread=2)
    dynamic = quantizers.nvfp4.run(Fp32Rows(data))
    given = InverseScaleFactor(dynamic.global_scale.factor.reciprocal()).inverted()  # as engines keep it
    with debug("strict"):
        static = quantizers.nvfp4_static(dynamic.global_scale).run(Fp32Rows(data))
    assert isinstance(static, NvFp4Rows)
    assert torch.equal(static.dequantize(), dynamic.dequantize())
    torch.testing.assert_close(given.factor, dynamic.global_scale.factor)
    fourfold = quantizers.nvfp4_static(ScaleFactor(4 * dynamic.global_scale.factor)).run(Fp32Rows(data))
    assert torch.equal(scale_table(fourfold).max(), scale_table(dynamic).max())  # a power of two moves between the two scales


@pytest.mark.parametrize("value", [2.0**-20, 0.25, 1.0, 3.0, 224.0, 0.004464])
def test_a_scale_and_its_inverse(value: float) -> None:
    factor = ScaleFactor(torch.tensor([value]))
    inverse = factor.inverted()
    assert type(inverse) is InverseScaleFactor
    assert float(inverse.divisor) == pytest.approx(1 / value)
    back = inverse.inverted()
    assert type(back) is ScaleFactor
    assert float(back.factor) == pytest.approx(float(factor.factor), rel=2.0**-23)


def test_conversions_know_their_bytes() -> None:
    conversion: Conversion[MxFp8Rows, MxFp8Rows] = Conversion("same", (MxFp8Rows,), MxFp8Rows, lambda rows, _live=None: rows)
    assert conversion.bytes_moved(MxFp8Rows, 8, 256) == 0
    assert quantizers.nvfp4.bytes_moved(Fp32Rows, 8, 256) == 8 * (1024 + 128 + 16)
    assert relayouts.pack.bytes_moved(relayouts.pack.source[0], 8, 512) == 8 * (512 + 16 + 512 + 4)

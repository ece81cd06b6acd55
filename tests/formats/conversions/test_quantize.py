"""Quantising and upscaling: exact where it can be, bounded where it cannot, and the faults of one group stay in it."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_typed import (
    Bf16Rows,
    Conversion,
    Fp8Block128Rows,
    Fp16Rows,
    Fp32Rows,
    MxFp8Rows,
    Payload,
    bf16_as_is,
    debug,
    fp16_as_is,
    fp32_as_is,
    quantize_fp8_block128,
    quantize_mxfp8,
    upscale_bf16,
    upscale_fp16,
    upscale_fp32,
)
from moe_typed.formats import AnyDenseRows, ScaledRows, e8m0

Quantize = Conversion[AnyDenseRows, Fp8Block128Rows] | Conversion[AnyDenseRows, MxFp8Rows]

BOTH = pytest.mark.parametrize(
    ("quantize", "group"), [pytest.param(quantize_fp8_block128, 128, id="fp8 block 128"), pytest.param(quantize_mxfp8, 32, id="mxfp8")]
)
# e4m3 has three bits of mantissa: half an ulp is 2^-4 of the value, or, below its normal numbers, 2^-10 of a scale.
RELATIVE, ABSOLUTE = 2.0**-4, 2.0**-10


def scales(rows: ScaledRows) -> Tensor:
    return e8m0.decode(rows.scale) if isinstance(rows, MxFp8Rows) else rows.scale


def noise(rows: int, hidden: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-20, 20, (rows, hidden // 32), generator=generator).float()).repeat_interleave(32, 1)
    return torch.randn(rows, hidden, generator=generator) * spread


@BOTH
@pytest.mark.parametrize("cls", [Bf16Rows, Fp16Rows, Fp32Rows])
@pytest.mark.parametrize("seed", range(3))
def test_the_error_is_bounded_by_half_a_step(quantize: Quantize, group: int, cls: type[Bf16Rows | Fp16Rows | Fp32Rows], seed: int) -> None:
    wide = noise(5, 256, seed)
    rows = cls((wide.clamp(-6e4, 6e4) if cls is Fp16Rows else wide).to(cls.format.data_dtype))
    with debug("strict"):
        quantised = quantize.run(rows)
    exact = rows.dequantize()
    error = (quantised.dequantize() - exact).abs()
    bound = torch.maximum(exact.abs() * RELATIVE, scales(quantised).repeat_interleave(group, 1) * ABSOLUTE)
    assert bool((error <= bound * (1 + 2.0**-20)).all())


@BOTH
def test_scales_are_what_the_format_says(quantize: Quantize, group: int) -> None:
    rows = Fp32Rows(noise(4, 256))
    quantised = quantize.run(rows)
    amax = rows.data.view(4, 256 // group, group).abs().amax(2)
    scale = scales(quantised)
    if group == 128:
        assert torch.equal(scale, amax / 448)
    else:
        assert bool(e8m0.is_power_of_two(scale).all())
        assert bool((scale * 448 >= amax).all())
        assert bool((scale * 224 < amax).all())  # and half of it would not do
    assert float(quantised.data.to(torch.float32).abs().max()) == 448 or group == 32


@BOTH
@settings(max_examples=150, derandomize=True, deadline=None, database=None)
@given(top=st.floats(2.0**-149, 2.0**127, width=32), others=st.floats(-1, 1, width=32))
def test_nothing_saturates_whatever_the_size_of_the_largest(quantize: Quantize, group: int, top: float, others: float) -> None:
    data = torch.full((1, 128), others, dtype=torch.float32) * top
    data[0, 5] = -top
    quantised = quantize.run(Fp32Rows(data))
    back = quantised.dequantize()
    assert bool(torch.isfinite(back).all())
    step = float(scales(quantised)[0, 0]) * ABSOLUTE
    assert abs(float(back[0, 5]) + top) <= max(top * RELATIVE, step) * (1 + 2.0**-20)


@BOTH
def test_a_group_of_zeros_comes_back_as_zeros(quantize: Quantize, group: int) -> None:
    data = noise(2, 256)
    data[1, :group] = 0
    quantised = quantize.run(Fp32Rows(data))
    assert float(scales(quantised)[1, 0]) == (1.0 if group == 128 else 2.0**-127)
    assert not quantised.dequantize()[1, :group].any()


@BOTH
@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_poison_stays_in_its_group(quantize: Quantize, group: int, poison: float) -> None:
    clean = noise(3, 256)
    dirty = clean.clone()
    dirty[1, group + 3] = poison
    expected = quantize.run(Fp32Rows(clean)).dequantize()
    with debug("off"):  # a NaN scale raises in the values mode
        got = quantize.run(Fp32Rows(dirty)).dequantize()
    inside = torch.zeros(3, 256, dtype=torch.bool)
    inside[1, group : 2 * group] = True
    assert bool(got[inside].isnan().all())
    assert torch.equal(got[~inside], expected[~inside])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_rows_are_read_right(quantize: Quantize, group: int, dtype: torch.dtype) -> None:
    data = noise(256, 256).to(dtype)
    cls = Fp32Rows if dtype is torch.float32 else Bf16Rows
    for strided in (data.T, data[::2], data[:, 128:], data[0].expand(3, 256)):
        straight = quantize.run(cls(strided.contiguous()))
        with debug("strict"):
            got = quantize.run(cls(strided))
        assert torch.equal(got.dequantize(), straight.dequantize())


@BOTH
def test_no_rows_is_a_batch_like_any_other(quantize: Quantize, group: int) -> None:
    with debug("strict"):
        quantised = quantize.run(Bf16Rows(torch.empty(0, 256, dtype=torch.bfloat16)))
        assert quantised.scale.shape == (0, 256 // group)
        assert upscale_bf16.run(quantised).data.shape == (0, 256)


@BOTH
@pytest.mark.parametrize("hidden", [16, 200, 300])
def test_a_hidden_size_that_the_group_does_not_divide_is_refused(quantize: Quantize, group: int, hidden: int) -> None:
    with pytest.raises(ValueError, match=f"rows of {hidden} channels are no whole groups of {group}"):
        quantize.run(Bf16Rows(torch.zeros(2, hidden, dtype=torch.bfloat16)))


@BOTH
def test_upscaling_multiplies_and_rounds_once(quantize: Quantize, group: int) -> None:
    quantised = quantize.run(Fp32Rows(noise(4, 256)))
    exact = (quantised.data.to(torch.float64).view(4, -1, group) * scales(quantised).to(torch.float64).unsqueeze(2)).view(4, 256)
    assert torch.equal(upscale_fp32.run(quantised).data, exact.to(torch.float32))
    assert torch.equal(upscale_bf16.run(quantised).data, exact.to(torch.float32).to(torch.bfloat16))
    assert torch.equal(upscale_fp16.run(quantised).data, exact.to(torch.float32).to(torch.float16))


@BOTH
def test_what_the_format_holds_exactly_comes_back_exactly(quantize: Quantize, group: int) -> None:
    data = torch.randint(-15, 16, (3, 256), generator=torch.Generator().manual_seed(0)).float() / 16
    data[:, ::group] = 1.75  # 448 / 256: the scale is a power of two in both formats
    assert torch.equal(quantize.run(Fp32Rows(data)).dequantize(), data)


@pytest.mark.parametrize(
    ("conversion", "rows"),
    [
        (bf16_as_is, Bf16Rows(torch.zeros(1, 2, dtype=torch.bfloat16))),
        (fp16_as_is, Fp16Rows(torch.zeros(1, 2, dtype=torch.float16))),
        (fp32_as_is, Fp32Rows(torch.zeros(1, 2))),
    ],
)
def test_as_is_does_nothing(conversion: Conversion[Payload, Payload], rows: Payload) -> None:
    assert conversion.run(rows) is rows
    assert (conversion.source, conversion.target) == ((type(rows),), type(rows))
    assert conversion.bytes_moved(type(rows), 10, 256) == 0


@pytest.mark.parametrize(
    ("conversion", "source", "moved"),
    [
        (quantize_fp8_block128, Bf16Rows, 10 * (2 * 256 + 256 + 2 * 4)),
        (quantize_fp8_block128, Fp32Rows, 10 * (4 * 256 + 256 + 2 * 4)),
        (quantize_mxfp8, Bf16Rows, 10 * (2 * 256 + 256 + 8)),
        (upscale_bf16, MxFp8Rows, 10 * (2 * 256 + 256 + 8)),
        (upscale_fp32, Fp8Block128Rows, 10 * (4 * 256 + 256 + 2 * 4)),
    ],
)
def test_the_bytes_that_a_step_moves(conversion: Conversion[Payload, Payload], source: type[Payload], moved: int) -> None:
    assert source in conversion.source
    assert conversion.bytes_moved(source, 10, 256) == moved

"""Scales in another order are the same scales, by (row, group), there and back."""

from typing import Any

import pytest
import torch

from moe_typed import Conversion, Fp8Block128Rows, Fp32Rows, debug
from moe_typed.formats import Fp8Block128PackedRows, Fp8Block128SlabRows, MxFp8Rows, ScaledRows, quantizers, relayouts, upscalers
from tests.formats.support import FN, noise, quantized, scale_table, slab

SHAPES = [(0, 256), (1, 128), (1, 640), (3, 512), (4, 384), (5, 1152), (128, 128), (130, 160 * 4)]
PAIRS = [
    pytest.param(relayouts.to_column, relayouts.to_row, id="column"),
    pytest.param(relayouts.pack, relayouts.unpack, id="packed"),
    pytest.param(relayouts.swizzle, relayouts.unswizzle, id="swizzled"),
]


def source(conversion: Conversion[Any, Any], rows: int, hidden: int) -> ScaledRows:
    """Return rows that a relayout takes, their scales all different where e8m0 has as many; one group is of zeros."""
    data = noise(rows, hidden)
    data[1:2, :128] = 0
    return with_power_of_two_scales(data) if conversion is relayouts.pack else quantized(conversion.source[0], data)


def with_power_of_two_scales(data: torch.Tensor) -> Fp8Block128Rows:
    return relayouts.unpack.run(quantizers.fp8_block128_packed.run(Fp32Rows(data)))


@pytest.mark.parametrize(("there", "back"), PAIRS)
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_there_and_back(there: Conversion[Any, Any], back: Conversion[Any, Any], rows: int, hidden: int) -> None:
    given = source(there, rows, hidden)
    with debug("strict"):
        turned = there.run(given)
        again = back.run(turned)
    assert (type(turned), type(again)) == (there.target, type(given))
    assert turned.data is given.data  # it is the scales that move
    assert torch.equal(scale_table(turned), scale_table(given))
    assert torch.equal(again.scale.view(torch.uint8), given.scale.view(torch.uint8))
    assert torch.equal(turned.dequantize(), given.dequantize())


@pytest.mark.parametrize(("there", "back"), PAIRS)
def test_live_rows_alone_have_to_be_right(there: Conversion[Any, Any], back: Conversion[Any, Any]) -> None:
    given = source(there, 6, 512)
    for live in (0, 2, 6):
        count = torch.tensor([live], dtype=torch.int32)
        got = back.run(there.run(given, count), count)
        assert torch.equal(scale_table(got)[:live], scale_table(given)[:live])


@pytest.mark.parametrize(("experts", "capacity"), [(1, 6), (6, 1), (2, 3), (3, 2), (2, 0)])
@pytest.mark.parametrize("hidden", [128, 384, 1024])
def test_a_slab_becomes_flat_rows(experts: int, capacity: int, hidden: int) -> None:
    given = slab(Fp8Block128SlabRows, noise(experts * capacity, hidden), experts, capacity)
    assert isinstance(given, Fp8Block128SlabRows)
    with debug("strict"):
        turned = relayouts.slab_to_row.run(given)
    assert type(turned) is Fp8Block128Rows
    assert turned.data is given.data
    assert torch.equal(scale_table(turned), scale_table(given))
    assert torch.equal(turned.dequantize(), given.dequantize())


@pytest.mark.parametrize("bad", [0.3, 0.0, -1.0, float("inf"), float("nan"), 2.0**-128, 3.0])
def test_packing_refuses_scales_that_are_no_powers_of_two_and_says_what_to_do(bad: float) -> None:
    scale = torch.tensor([[0.25, 0.5], [2.0**-127, 2.0**127], [1.0, bad]])
    rows = Fp8Block128Rows(torch.ones(3, 256).to(FN), scale)
    with pytest.raises(ValueError, match="powers of two, and these are not") as caught:
        relayouts.pack.run(rows)
    assert "upscale_bf16 and then quantize_fp8_block128_packed does that" in str(caught.value)
    live = torch.tensor([2], dtype=torch.int32)
    assert torch.equal(scale_table(relayouts.pack.run(rows, live))[:2, ::128], scale[:2].double())
    with pytest.raises(ValueError, match="powers of two"):
        relayouts.pack.run(rows, live + 1)


def test_the_way_that_the_refusal_offers() -> None:
    rows = quantized(Fp8Block128Rows, noise(4, 256))
    assert isinstance(rows, Fp8Block128Rows)
    with pytest.raises(ValueError, match="powers of two"):
        relayouts.pack.run(rows)
    packed = quantizers.fp8_block128_packed.run(upscalers.bf16.run(rows))
    assert isinstance(packed, Fp8Block128PackedRows)
    exact = rows.dequantize()
    half_a_step = torch.maximum(exact.abs().double() * 2.0**-4, scale_table(packed) * 2.0**-10)
    assert bool(((packed.dequantize() - exact).abs() <= half_a_step + exact.abs() * 2.0**-8).all())  # and bfloat16 between


def test_where_the_swizzled_bytes_lie() -> None:
    """Against the figure in cuBLAS' manual: (row 0, group 0) at 0, (32, 0) at 4, (1, 0) at 16, (0, 4) in the next tile."""
    codes = torch.arange(256 * 8).remainder(251).to(torch.uint8).view(256, 8)
    rows = MxFp8Rows(torch.zeros(256, 256).to(FN), codes.view(torch.float8_e8m0fnu))
    flat = relayouts.swizzle.run(rows).scale.view(torch.uint8)
    for (row, group), at in {
        (0, 0): 0,
        (0, 3): 3,
        (32, 0): 4,
        (96, 1): 13,
        (1, 0): 16,
        (127, 3): 511,
        (0, 4): 512,
        (128, 0): 1024,
        (255, 7): 2047,
    }.items():
        assert flat[at] == codes[row, group]

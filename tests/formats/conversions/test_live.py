"""Every conversion with a count of live rows on the device: live rows are those of a shorter batch, and the others do not matter."""

import math
from typing import Any

import pytest
import torch

from moe_typed import Bf16Rows, Conversion, Fp32Rows, StandardDispatcher, from_topk, quantize_mxfp8
from moe_typed.formats import ScaledRows, quantizers, relayouts, upscalers
from moe_typed.routing import DeviceCount, mask_padded
from tests.formats.support import QUANTIZERS, SCALED, noise, quantized, wide

ROWS = 6


def count(live: int) -> torch.Tensor:
    return torch.tensor([live], dtype=torch.int32)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("quantize", QUANTIZERS.values(), ids=lambda conversion: conversion.name)
@pytest.mark.parametrize("live", [0, 1, 4, ROWS])
@pytest.mark.parametrize("tail", [math.nan, math.inf, 1e30])
def test_quantisers(quantize: Conversion[Any, ScaledRows], live: int, tail: float) -> None:
    data = noise(ROWS, 256)
    data[live:] = tail
    short = quantize.run(Fp32Rows(data[:live]))
    full = quantize.run(Fp32Rows(data), count(live))
    assert type(full) is quantize.target
    assert full.rows == ROWS
    assert same(full.data[:live], short.data)
    assert torch.equal(full.dequantize()[:live], short.dequantize())


@pytest.mark.parametrize("cls", SCALED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("upscale", [upscalers.bf16, upscalers.fp16, upscalers.fp32], ids=lambda conversion: conversion.name)
@pytest.mark.parametrize("live", [0, 1, 4, ROWS])
def test_upscalers(cls: type[ScaledRows], upscale: Conversion[Any, Any], live: int) -> None:
    rows = quantized(cls, noise(ROWS, wide(cls, 256)))
    rows.data.view(torch.uint8)[live:] = 0xFF  # NaN where the format has one
    got = upscale.run(rows, count(live)).data
    assert torch.equal(got[:live], upscale.run(rows).data[:live])


@pytest.mark.parametrize(
    "bad", [torch.tensor([3]), torch.tensor([3.0]), torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3], dtype=torch.int32, device="meta")]
)
@pytest.mark.parametrize("conversion", [quantizers.mxfp8, quantizers.nvfp4, quantizers.fp8_tensor, upscalers.bf16], ids=lambda value: value.name)
def test_a_count_is_one_int32_on_the_device(conversion: Conversion[Any, Any], bad: torch.Tensor) -> None:
    rows = quantized(relayouts.swizzle.source[0], noise(ROWS, 256)) if conversion is upscalers.bf16 else Fp32Rows(noise(ROWS, 256))
    with pytest.raises(ValueError, match="the count of live rows must be one int32 on"):
        conversion.run(rows, bad)


def test_a_dispatcher_quantises_live_rows_alone() -> None:
    rows = Bf16Rows(noise(ROWS, 256, spread=3).bfloat16())
    routing = mask_padded(from_topk(torch.zeros(ROWS, 1, dtype=torch.int32), torch.ones(ROWS, 1), 2), count(4))
    assert isinstance(routing.live, DeviceCount)
    seen: list[torch.Tensor | None] = []

    def run(given: Bf16Rows, live: torch.Tensor | None = None) -> Any:
        seen.append(live)
        return quantize_mxfp8.run(given, live)

    wire: Conversion[Bf16Rows, Any] = Conversion("spy", (Bf16Rows,), quantize_mxfp8.target, run)
    dispatched = StandardDispatcher(wire).dispatch(rows, routing)
    assert seen == [routing.live.count]
    assert torch.equal(dispatched.payload.dequantize()[:4], quantize_mxfp8.run(rows).dequantize()[:4])

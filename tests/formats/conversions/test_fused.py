"""The kernels of conversions at the typed level: the bits of the reference, and nothing of rows beyond the live ones."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, Conversion, Fp16Rows, Fp32Rows, debug, round_bf16
from moe_typed.formats import NvFp4Rows, Payload, ScaledRows, ScaleFactor, fused, quantizers, relayouts, upscalers
from tests.formats.support import QUANTIZERS, SCALED, make, noise, quantized, scale_table, title, wide
from tests.ops.support import devices, in_one_graph, on_cuda

pytestmark = pytest.mark.filterwarnings("ignore:divide by zero")  # NumPy's, under Triton's interpreter

DENSE = {torch.float32: Fp32Rows, torch.float16: Fp16Rows, torch.bfloat16: Bf16Rows}
RELAYOUTS: list[Conversion[Any, Any]] = [value for value in vars(relayouts).values() if isinstance(value, Conversion)]
UPSCALES: list[Conversion[Any, Any]] = [upscalers.fp32, upscalers.fp16, upscalers.bf16]
ROUNDED: list[Conversion[Any, Any]] = [
    of(rule) for of in (quantizers.mxfp8_rounded, quantizers.mxfp8_swizzled_rounded, quantizers.mxfp4_rounded) for rule in ("floor", "even")
]
QUANTIZES: list[Conversion[Any, Any]] = [*QUANTIZERS.values(), *ROUNDED]
ROWS, HIDDEN = (130 if torch.cuda.is_available() else 6), 384  # two row tiles, and words and tiles of groups that are not full


def moved(payload: Payload, device: str) -> Payload:
    """Return a payload on a device, strides kept."""
    tensors = {key: value for key, value in vars(payload).items() if isinstance(value, Tensor)}
    parts: list[object] = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in tensors.values()]
    if isinstance(payload, NvFp4Rows):
        parts.append(ScaleFactor(payload.global_scale.factor.to(device)))
    return make(type(payload), *parts)


def kernel_of(conversion: Conversion[Any, Any]) -> Conversion[Any, Any]:
    return fused.fused(conversion)


def source_of(conversion: Conversion[Any, Any]) -> ScaledRows:
    if conversion is relayouts.pack:
        return relayouts.unpack.run(quantizers.fp8_block128_packed.run(Fp32Rows(noise(ROWS, HIDDEN))))
    return quantized(conversion.source[0], noise(ROWS, HIDDEN))


def check(got: Payload, expected: Payload, live: int) -> None:
    """Compare data and scales of live rows, bit by bit, whatever order the scales lie in."""
    assert type(got) is type(expected)
    home = moved(got, "cpu")
    assert torch.equal(home.data[:live].contiguous().view(torch.uint8), expected.data[:live].contiguous().view(torch.uint8))
    if isinstance(home, ScaledRows):
        assert isinstance(expected, ScaledRows)
        assert torch.equal(scale_table(home)[:live].nan_to_num(-1), scale_table(expected)[:live].nan_to_num(-1))


def test_every_conversion_has_a_kernel_but_those_that_need_none() -> None:
    for conversion in (*QUANTIZES, *UPSCALES, *RELAYOUTS):
        kernel = kernel_of(conversion)
        assert kernel is not conversion
        assert (kernel.name, kernel.source, kernel.target) == (conversion.name, conversion.source, conversion.target)
    assert fused.fused(round_bf16) is round_bf16


@pytest.mark.parametrize("conversion", QUANTIZES, ids=title)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=on_cuda), pytest.param(torch.bfloat16, marks=on_cuda)])
@pytest.mark.parametrize("live", [None, 0, ROWS - 1])
@devices
def test_quantisers(conversion: Conversion[Any, Any], dtype: torch.dtype, live: int | None, device: str) -> None:
    data = noise(ROWS, HIDDEN, spread=5).to(dtype)
    data[1], data[2, 7] = 0, torch.inf
    if live is not None:
        data[live:] = torch.nan
    count = None if live is None else torch.tensor([live], dtype=torch.int32)
    expected = conversion.run(DENSE[dtype](data), count)
    with debug("strict"):
        got = kernel_of(conversion).run(DENSE[dtype](data.to(device)), None if count is None else count.to(device))
    check(got, expected, ROWS if live is None else live)


@pytest.mark.parametrize("cls", SCALED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize(
    "conversion", [upscalers.fp32, pytest.param(upscalers.fp16, marks=on_cuda), pytest.param(upscalers.bf16, marks=on_cuda)], ids=title
)
@pytest.mark.parametrize("live", [None, 0, ROWS - 1])
@devices
def test_upscalers(cls: type[ScaledRows], conversion: Conversion[Any, Any], live: int | None, device: str) -> None:
    rows = quantized(cls, noise(ROWS, wide(cls, HIDDEN), spread=5))
    count = None if live is None else torch.tensor([live], dtype=torch.int32)
    got = kernel_of(conversion).run(moved(rows, device), None if count is None else count.to(device))
    check(got, conversion.run(rows, count), ROWS if live is None else live)


@pytest.mark.parametrize("conversion", RELAYOUTS, ids=title)
@pytest.mark.parametrize("live", [None, 0, ROWS - 1])
@devices
def test_relayouts(conversion: Conversion[Any, Any], live: int | None, device: str) -> None:
    rows = source_of(conversion)
    count = None if live is None else torch.tensor([live], dtype=torch.int32)
    got = kernel_of(conversion).run(moved(rows, device), None if count is None else count.to(device))
    check(got, conversion.run(rows, count), ROWS if live is None else live)


@contextmanager
def marked_memory() -> Generator[None]:
    """Fill memory that is new with the largest integer of its dtype while the block runs."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("conversion", QUANTIZES, ids=title)
@devices
def test_rows_that_are_not_live_are_not_written(conversion: Conversion[Any, Any], device: str) -> None:
    live = torch.tensor([2], dtype=torch.int32, device=device)
    with marked_memory():
        made = kernel_of(conversion).run(Fp32Rows(noise(6, 256).to(device)), live)
    words = made.data.cpu().view(torch.int32)
    untouched = (words == -1) | (words == 2**31 - 1)  # memory of bytes, or of words
    assert bool(untouched[2:].all())
    assert not bool(untouched[:2].all())


# ---- graphs ------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("conversion", [*QUANTIZES, *UPSCALES, *(value for value in RELAYOUTS if value is not relayouts.pack)], ids=title)
@devices
def test_one_compiled_graph(conversion: Conversion[Any, Any], device: str) -> None:
    """Packing looks at its scales, and so is no part of a graph."""
    if device == "cpu" and conversion.target in (Fp16Rows, Bf16Rows):
        pytest.skip("Triton's interpreter rounds to them wrongly")
    torch.compiler.reset()
    kernel = kernel_of(conversion)
    given = Fp32Rows(noise(6, 256)) if conversion in QUANTIZES else quantized(conversion.source[0], noise(6, 256))
    live = torch.tensor([4], dtype=torch.int32)
    expected = conversion.run(given, live)
    got = in_one_graph(kernel.run)(moved(given, device), live.to(device))
    check(got, expected, 4)


@pytest.mark.parametrize("conversion", [*QUANTIZES, *UPSCALES, *(value for value in RELAYOUTS if value is not relayouts.pack)], ids=title)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_one_cuda_graph_for_every_count(conversion: Conversion[Any, Any], device: str) -> None:
    kernel = kernel_of(conversion)
    given = Fp32Rows(noise(ROWS, HIDDEN)) if conversion in QUANTIZES else quantized(conversion.source[0], noise(ROWS, HIDDEN))
    on_device, live = moved(given, device), torch.full((1,), ROWS, dtype=torch.int32, device=device)
    kernel.run(on_device, live)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = kernel.run(on_device, live)
    is_new = made.data is not on_device.data
    for count in (ROWS, 5, 0, ROWS - 1):
        if is_new:
            made.data.view(torch.uint8).fill_(0xA5)
        live.fill_(count)
        graph.replay()
        check(made, conversion.run(given, torch.tensor([count], dtype=torch.int32)), count)
        if is_new and count:  # a graph may keep what it needs on the way in the first bytes of its result
            assert bool((made.data[count:].view(torch.uint8) == 0xA5).all())

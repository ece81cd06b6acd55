"""How kernels are timed here: replays of one CUDA graph over rotating inputs with a cold L2, and a loop of calls from Python.

A graph holds one call for each set of inputs, and its time is divided by their number: what is left of launching is about what one empty kernel
takes (``empty_kernel``). A floor is the bytes that must move (inputs once, outputs once) at the bandwidth of a large copy, plus that.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median, quantiles
from typing import Final, NamedTuple, TypeAlias

import torch
import triton

Call: TypeAlias = Callable[[], object]

_FLUSHED_BYTES = 256 * 2**20  # several times any L2 of today; the H200's is 60 MB
_COPIED_BYTES = 4 * 2**30


class Timing(NamedTuple):
    """Microseconds of one call on the GPU: the median of the replays, and their 10th and 90th percentiles."""

    median: float
    p10: float
    p90: float


NOT_TIMED: Final = Timing(float("nan"), float("nan"), float("nan"))


def in_graph(calls: Sequence[Call], replays: int = 30) -> Timing:
    """Return the time of one call in a graph of all ``calls``, each replay with a cold L2."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    flushed = torch.empty(_FLUSHED_BYTES // 4, dtype=torch.int32, device="cuda")
    pairs = [(torch.Event("cuda", enable_timing=True), torch.Event("cuda", enable_timing=True)) for _ in range(replays + 3)]
    for start, end in pairs:
        flushed.zero_()
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e3 / len(calls) for start, end in pairs[3:]]
    tenths = quantiles(times, n=10)
    return Timing(median(times), tenths[0], tenths[-1])


def from_python(calls: Sequence[Call], seconds: float = 0.02) -> float:
    """Return the microseconds of one call in a loop from Python, the best of five loops: the larger of host time and GPU time."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        count, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            for call in calls:
                call()
            count += len(calls)
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) * 1e6 / count)
    return best


@triton.jit
def _nothing() -> None:
    pass


def empty_kernel() -> float:
    """Return the microseconds of a kernel that does nothing, measured as every other."""
    return in_graph([lambda: _nothing[(1,)]()] * 16).median


def copy_bandwidth() -> float:
    """Return bytes read plus written in a microsecond by a kernel that copies (a copy_ in a graph is left to the copy engine, which is slower)."""
    source = torch.randint(0, 2**31 - 1, (_COPIED_BYTES // 4,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPIED_BYTES / in_graph([partial(torch.bitwise_not, source, out=target)], replays=10).median


def environment() -> dict[str, str]:
    """Return what was measured on."""
    return {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}

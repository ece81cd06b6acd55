"""How kernels are timed: replays of one CUDA graph with a cold L2.

A graph holds one call for each set of inputs, and its time is divided by their number: what is left of launching is about what one empty kernel
takes.
"""

from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Final, NamedTuple, TypeAlias

import torch

Call: TypeAlias = Callable[[], object]

_FLUSHED_BYTES: Final = 256 * 2**20  # several times any L2 of today; the H200's is 60 MB


class Timing(NamedTuple):
    """Microseconds of one call on the GPU: the median of the replays, and their 10th and 90th percentiles."""

    median: float
    p10: float
    p90: float


NOT_TIMED: Final = Timing(float("nan"), float("nan"), float("nan"))


def in_graph(calls: Sequence[Call], replays: int = 30) -> Timing:
    """Return the time of one call in a graph of all ``calls``, each replay with a cold L2, on the current device."""
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

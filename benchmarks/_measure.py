"""How kernels are timed here: replays of one CUDA graph over rotating inputs with a cold L2, and a loop of calls from Python.

A floor is the bytes that must move (inputs once, outputs once) at the bandwidth of a large copy, plus what one empty kernel takes
(``empty_kernel``).
"""

import time
from collections.abc import Sequence
from functools import partial

import torch
import triton

from moe_typed.tuning.measure import NOT_TIMED, Call, Timing, in_graph

__all__ = ["NOT_TIMED", "Call", "Timing", "copy_bandwidth", "empty_kernel", "environment", "from_python", "in_graph"]

_COPIED_BYTES = 4 * 2**30


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

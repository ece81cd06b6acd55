"""How kernels are timed here: replays of one CUDA graph over rotating inputs with a cold L2, and a loop of calls from Python.

A floor is the bytes that must move (inputs once, outputs once) at the bandwidth of a large copy, plus what one empty kernel takes
(``empty_kernel``).
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import triton

from moe_typed.tuning.measure import NOT_TIMED, Call, Timing, in_graph

__all__ = ["NOT_TIMED", "Call", "Timing", "arguments_of", "copy_bandwidth", "empty_kernel", "environment", "from_python", "in_graph", "save"]

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


def arguments_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows what every benchmark of a GPU is asked: where its figures go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="write the figures into FOLDER, as DEVICE_NAME.json")
    return parser


def save(folder: Path | None, name: str, rows: Sequence[Mapping[str, object]], **facts: object) -> None:
    """Write what was measured so far, where that was asked for; the tables of the documentation are made of such files."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        device = torch.cuda.get_device_name().split()[-1].lower()
        figures = {**environment(), **facts, "rows": rows}
        (folder / f"{device}_{name}.json").write_text(json.dumps(figures, indent=1) + "\n")

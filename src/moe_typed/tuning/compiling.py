"""Compile plans in processes of their own: Triton keeps what they make in its cache on disk, where the process that measures finds it.

Kernels are compiled over tensors on the meta device: with the shapes of the layer, and without memory.
"""

import functools
import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Final, NamedTuple, final

import attrs
import torch

from ..formats import Bf16ExpertWeights, Bf16Rows, Fp8Block128ExpertWeights, Fp8Block128Rows, GateUp, Payload
from ..ops.activation.spec import GROUP
from ..ops.product_plans.files import LayerKey
from ..ops.product_plans.spec import How, Plan
from ..routing import LocalIds, Routing, Settled
from ..runners import SiluAndMul
from ..runners.triton.weights import TritonExpertWeights
from ..stages import FlatRowsInput

_MOST: Final = 16  # processes: each takes some hundred MB
_FEW: Final = 4  # plans that are not worth a process


class _Job(NamedTuple):
    """A plan to compile for a layer at a number of tokens."""

    layer: LayerKey
    tokens: int
    plan: Plan


@final
class Compilers:
    """Processes that compile, started when there is something to do."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._pool: ProcessPoolExecutor | None = None
        self._seen: set[tuple[object, ...]] = set()

    def compile(self, layer: LayerKey, tokens: int, plans: Sequence[Plan]) -> Iterator[int]:
        """Compile the plans that were not compiled before, and yield how many are done. What goes wrong shows when a plan is run."""
        # The wide kernel has two variants a layer, whatever the plan, which are compiled where they run.
        jobs = [_Job(layer, tokens, plan) for plan in plans if plan.how is not How.WIDE and self._is_new(layer, tokens, plan)]
        if len(jobs) < _FEW:
            return
        pool = self._pool or ProcessPoolExecutor(
            min(_MOST, os.cpu_count() or 1), multiprocessing.get_context("spawn"), initializer=_begin, initargs=(self._device,)
        )
        self._pool = pool
        waiting: list[Future[None]] = [pool.submit(_compile, job) for job in jobs]
        try:
            for done, future in enumerate(as_completed(waiting), 1):
                if isinstance(future.exception(), BrokenProcessPool):
                    self._pool = None  # what is left is compiled by whoever runs it
                    return
                yield done
        finally:
            for future in waiting:
                future.cancel()

    def close(self) -> None:
        """End the processes, without waiting for what they are at."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    def _is_new(self, layer: LayerKey, tokens: int, plan: Plan) -> bool:
        # What walks has the routes as a constant; what streams sums in the same launch up to some tokens, or not.
        by_tokens = 1 << (tokens * layer.top_k - 1).bit_length() if plan.how is How.WALK else tokens if plan.how is How.STREAM else 0
        key = (layer, by_tokens, plan)
        is_new = key not in self._seen
        self._seen.add(key)
        return is_new


def _begin(device: int) -> None:
    os.setsid()  # the process that measures is the one that is interrupted; here it would end the assembler, and call that a bug of Triton
    with Path(os.devnull).open("w") as nowhere:  # Triton prints the whole assembly of what it cannot assemble
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device:  # setting the device makes a context of some hundred MB, which compiling does not need
        torch.cuda.set_device(device)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _compile(job: _Job) -> None:
    from ..runners.triton.runner import make_runner

    runner = make_runner(_weights(job.layer), SiluAndMul(), torch.bfloat16)
    plans = runner.plans._replace(wide=True, tuned={job.layer.top_k: ((job.tokens, job.plan),)})  # only what the device takes is tried
    forced = attrs.evolve(runner, plans=plans)
    forced.run(_input(job))


def _meta(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@functools.cache
def _weights(layer: LayerKey) -> TritonExpertWeights:
    experts, hidden, inter = layer.experts, layer.hidden, layer.inter
    if layer.format == "bf16":
        return Bf16ExpertWeights(_meta(torch.bfloat16, experts, 2 * inter, hidden), _meta(torch.bfloat16, experts, hidden, inter), GateUp)
    fp8 = torch.float8_e4m3fn
    s13 = _meta(torch.float32, experts, 2 * inter // GROUP, hidden // GROUP)
    s2 = _meta(torch.float32, experts, hidden // GROUP, inter // GROUP)
    return Fp8Block128ExpertWeights(_meta(fp8, experts, 2 * inter, hidden), _meta(fp8, experts, hidden, inter), s13, s2, GateUp)


def _input(job: _Job) -> FlatRowsInput:
    layer, tokens = job.layer, job.tokens
    rows: Payload = Bf16Rows(_meta(torch.bfloat16, tokens, layer.hidden))
    if layer.format == "fp8":
        rows = Fp8Block128Rows(_meta(torch.float8_e4m3fn, tokens, layer.hidden), _meta(torch.float32, tokens, layer.hidden // GROUP))
    ids, weights = _meta(torch.int32, tokens, layer.top_k), _meta(torch.float32, tokens, layer.top_k)
    return FlatRowsInput(rows, Routing(ids, weights, LocalIds, layer.experts, Settled(), False, tokens))

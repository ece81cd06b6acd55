"""Measure plans on an NVIDIA GPU: random weights, rows and routes; every plan's result is compared before it is timed."""

import hashlib
import io
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple, final

import attrs
import torch
import triton
from torch import Tensor
from triton.errors import TritonError
from triton.runtime import driver
from typing_extensions import override

from ..formats import Bf16Rows, Payload, quantize_fp8_block128
from ..ops.product_plans.files import LayerKey
from ..ops.product_plans.spec import Plan
from ..routing import UniformLoad, ZipfLoad, localize
from ..runners import SiluAndMul, UnsupportedError, reference_experts
from ..runners.aiter import gfx_of
from ..runners.triton.runner import TritonRunner
from ..stages import FlatRowsInput
from .compiling import Compilers
from .layers import random_weights, tuned_runner
from .measure import in_graph
from .measurer import CellMeasurer, DeviceLostError, Machine, Measurer, PlanFailed
from .space import Cell, Limits

_LOADS: Final = {"uniform": UniformLoad(), "zipf": ZipfLoad()}
# Relative error of a row: rounding of the result and of the two steps between; twice that against the plan by rule, which rounds as well.
_TOLERANCE: Final = {"bf16": 1.5e-2, "fp8": 8e-2}
_CHECKED: Final = 16  # tokens that are compared with float32
_OPS: Final = Path(__file__).parent.parent / "ops"
_ANY: Final = 2**31  # tokens


@final
class CudaMeasurer(Measurer):
    """Measures on a CUDA device. Close it in the end. Raises: UnsupportedError for AMD GPUs."""

    def __init__(self, device: torch.device) -> None:
        if gfx_of(device):
            raise UnsupportedError("plans are measured on NVIDIA GPUs alone; on AMD GPUs they are made by rule")
        with torch.cuda.device(device):
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._compilers = Compilers(self._device.index)
        self._made: tuple[LayerKey, TritonRunner] | None = None
        with torch.cuda.device(self._device):
            shared = driver.active.utils.get_device_properties(self._device.index)["max_shared_mem"]
        limits = Limits(shared, torch.cuda.get_device_capability(self._device))
        name = torch.cuda.get_device_name(self._device)
        self._machine = Machine(name, limits, torch.__version__, triton.__version__, _version(), digest_kernels())

    @property
    @override
    def machine(self) -> Machine:
        return self._machine

    @override
    @contextmanager
    def open(self, cell: Cell) -> Generator[CellMeasurer]:
        with torch.cuda.device(self._device):
            if self._made is None or self._made[0] != cell.layer:
                self._made = None  # before the next weights are made
                self._made = (cell.layer, tuned_runner(random_weights(cell.layer)))
            yield _CudaCell(cell, self._made[1], self._compilers)

    def close(self) -> None:
        """End the processes that compile."""
        self._compilers.close()


def _version() -> str:
    try:
        return metadata.version("moe-typed")
    except metadata.PackageNotFoundError:
        return "unknown"  # a source tree that is not installed; the digest tells its kernels apart


def digest_kernels() -> str:
    """Return a digest of the source of all kernels."""
    files = (file for file in sorted(_OPS.rglob("*.py")) if file.parent.name != "product_plans")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


class _Draw(NamedTuple):
    """Rows and their routes, and what the plan by rule makes of them."""

    rows: FlatRowsInput
    expected: Tensor


@final
class _CudaCell(CellMeasurer):
    """Measures plans of one cell. Raises: UnsupportedError where the plan by rule does not run, or is wrong."""

    def __init__(self, cell: Cell, runner: TritonRunner, compilers: Compilers) -> None:
        self._cell, self._runner, self._compilers = cell, runner, compilers
        self._checked: set[Plan] = set()
        by_rule = self._forced(runner.plans.by_rule(cell.tokens, cell.layer.top_k))
        inputs = [self._draw(seed) for seed in range(_draws(cell.tokens))]
        try:
            self._draws = [_Draw(rows, by_rule.run(rows).hidden_states) for rows in inputs]
        except (ValueError, TritonError) as error:
            raise UnsupportedError(f"{self._by_rule()} does not run on this device: {error}") from error
        self._compare_with_float32()

    @override
    def compile(self, plans: Sequence[Plan]) -> Iterator[int]:
        yield from self._compilers.compile(self._cell.layer, self._cell.tokens, plans)

    @override
    def time(self, plan: Plan, replays: int) -> float:
        try:
            runner = self._forced(plan)
            if plan not in self._checked:
                with redirect_stdout(io.StringIO()):  # Triton prints the whole assembly of what it cannot assemble
                    self._check(runner)
                self._checked.add(plan)
            return fmean(in_graph([partial(runner.run, draw.rows)], replays).median for draw in self._draws)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError, TritonError) as error:
            try:
                torch.cuda.synchronize()
            except RuntimeError as lost:
                raise DeviceLostError(plan, str(lost)) from error
            raise PlanFailed(str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__qualname__) from error

    def _by_rule(self) -> str:
        return f"the plan by rule for {self._cell.layer} at {self._cell.tokens} tokens"

    def _forced(self, plan: Plan) -> TritonRunner:
        plans = self._runner.plans._replace(tuned={self._cell.layer.top_k: ((_ANY, plan),)})
        return attrs.evolve(self._runner, plans=plans)

    def _draw(self, seed: int) -> FlatRowsInput:
        layer, tokens = self._cell.layer, self._cell.tokens
        routing = _LOADS[self._cell.load].route(tokens, layer.top_k, self._cell.routed, device=torch.device("cuda"), seed=seed)
        generator = torch.Generator("cuda").manual_seed(seed)
        rows = Bf16Rows(torch.randn(tokens, layer.hidden, device="cuda", generator=generator).to(torch.bfloat16))
        payload: Payload = quantize_fp8_block128.run(rows) if layer.format == "fp8" else rows
        return FlatRowsInput(payload, localize(routing, 0, layer.experts))

    def _check(self, runner: TritonRunner) -> None:
        """Raise PlanFailed where a row is not that of the plan by rule."""
        for rows, expected in self._draws:
            torch.full_like(expected, float("nan"))  # what the result is written over, most probably
            self._compare(runner.run(rows).hidden_states, expected, 2 * _TOLERANCE[self._cell.layer.format])

    def _compare_with_float32(self) -> None:
        rows, expected = self._draws[0]
        some = slice(_CHECKED)
        payload, routing = rows.payload.dequantize()[some], rows.routing
        wanted = reference_experts(payload, routing.topk_ids[some], routing.topk_weights[some], self._runner.weights, SiluAndMul())
        try:
            self._compare(expected[some], wanted, _TOLERANCE[self._cell.layer.format])
        except PlanFailed as failed:
            raise UnsupportedError(f"{self._by_rule()} is wrong on this device: {failed}") from None

    @staticmethod
    def _compare(found: Tensor, expected: Tensor, tolerance: float) -> None:
        error, norm = ((values.float().square().sum(1).sqrt()) for values in (found.float() - expected.float(), expected))
        wrong = ~(error <= tolerance * norm)  # NaN is wrong, too
        if bool(wrong.any()):
            raise PlanFailed(f"{int(wrong.sum())} rows are wrong: the relative error of the first is {float((error / norm)[wrong][0]):.1e}")


def _draws(tokens: int) -> int:
    """Return over how many draws of routes a time is averaged: what few tokens hit differs from draw to draw."""
    return 4 if tokens <= 16 else 2 if tokens <= 128 else 1

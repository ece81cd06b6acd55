"""``moe-typed tune``: measure which kernels and tiles are fastest for a layer on this GPU, and write the file that layers then look it up in."""

import argparse
import importlib.util
import sys
from contextlib import closing
from pathlib import Path
from typing import Final, final

import attrs
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from ..formats import Fp8Block128ExpertWeights
from ..ops.product_plans.files import VARIABLE
from ..ops.product_plans.spec import Plan, Tile
from ..plan import MoEProblem
from ..plan.product_plans import key_of, tuned_format
from ..plan.ways import divisibility_fault
from ..runners import UnsupportedError
from ..tuning import Cell, Compiled, DeviceLostError, Measurer, Skipped, Started, Store, Tried, Tuned, families, tune
from ..tuning import Progress as Happening
from .options import counts, request
from .plan import add_layer_arguments, problem_of_arguments

DONE: Final = 0
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells have it
_TOKENS: Final = "1,2,4,8,16,32,64,128,256,512,1024,2048,4096,8192,16384"


@final
@attrs.frozen
class TuneOptions:
    """What is tuned, and where it is written. ``again``: forget what is there of it first."""

    cells: tuple[Cell, ...]
    out: Path
    again: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: the layer as ``plan`` takes it, the numbers of tokens, the load, and where to write."""
    add_layer_arguments(parser)
    parser.add_argument("--tokens", type=counts, default=counts(_TOKENS), help=f"numbers of tokens, by commas (default: {_TOKENS})")
    parser.add_argument("--load", choices=["uniform", "zipf"], default="uniform", help="how routes are drawn (default: uniform)")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help=f"where the file is written; let {VARIABLE} name it then")
    parser.add_argument("--again", action="store_true", help="forget what was measured of these cells before")
    parser.add_argument("--device", default="auto", help="cuda, cuda:1, ... (default: cuda where there is one)")


def cells_of(problem: MoEProblem, tokens: tuple[int, ...], load: str) -> tuple[Cell, ...]:
    """Return what is tuned for a layer. Raises: ValueError for a layer that has no plans to tune."""
    fmt = tuned_format(problem.weights)
    if fmt is None:
        raise ValueError(f"nothing is tuned for {problem.weights} weights; bf16, fp16 and fp8-block128 have kernels that are")
    sizes = {"hidden": problem.hidden, "inter": problem.inter}
    fault = divisibility_fault(Fp8Block128ExpertWeights.format, **sizes) if fmt == "fp8" else None
    if fault is not None:
        raise ValueError(fault)
    key = key_of(problem, fmt)
    # Where a row arrives with one route, that is to an expert of this rank, and the rows lie by expert.
    by_expert = problem.backend.one_route_a_row
    routed = problem.local_experts if by_expert else problem.num_experts
    return tuple(Cell(key, routed, count, load, by_expert) for count in tokens)


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Tune a layer on a GPU, and return the exit code. Raises: UnsupportedError without one; ValueError; CheckpointError; OSError."""
    asked = request("triton", "auto", arguments.device)
    problem = problem_of_arguments(arguments, asked, console)
    options = TuneOptions(cells_of(problem, arguments.tokens, arguments.load), arguments.out, arguments.again)
    if asked.device.type != "cuda":
        raise UnsupportedError(f"plans are measured on an NVIDIA GPU; the device is {asked.device}, and torch sees {torch.cuda.device_count()} GPUs")
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedError("the kernels that are tuned need Triton: pip install 'moe-typed[triton]'")
    from ..tuning.bench import CudaMeasurer

    with closing(CudaMeasurer(asked.device)) as measurer:
        return tune_layer(options, measurer, console)


def tune_layer(options: TuneOptions, measurer: Measurer, console: Console) -> int:
    """Tune the cells of a layer under a progress bar, and return the exit code. Raises: UnsupportedError; ValueError for a file that is not ours."""
    machine = measurer.machine
    store = Store(options.out, machine.device, machine.limits.capability)
    # A path is no markup, and is not wrapped.
    console.print(f"{options.cells[0].layer}, on {machine.device}: to {store.path}", markup=False, emoji=False, highlight=False, soft_wrap=True)
    text = TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))  # the others stay whole
    columns = (text, BarColumn(12), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, expand=True, disable=not console.is_terminal) as progress:
        shown = _Shown(progress, {cell: sum(len(family.plans()) for family in families(cell, machine.limits)) for cell in options.cells})
        try:
            for happening in tune(options.cells, measurer, store, again=options.again):
                shown.show(happening)
        except KeyboardInterrupt:
            progress.stop()
            again = ", without --again" if options.again else ""
            print(f"moe-typed: interrupted; what was measured is in {options.out}. The same command{again} goes on from there.", file=sys.stderr)
            return INTERRUPTED
        except DeviceLostError as lost:
            raise UnsupportedError(f"{lost}. The same command goes on without this plan") from lost
    console.print(f"export {VARIABLE}={store.directory.resolve()}", markup=False, emoji=False, soft_wrap=True)
    return DONE


@final
class _Shown:
    """The bar, and a line for each cell that is done."""

    def __init__(self, progress: Progress, plans: dict[Cell, int]) -> None:
        self._progress, self._plans = progress, plans
        self._task: TaskID = progress.add_task("", total=sum(plans.values()))
        self._done = 0

    def show(self, happening: Happening) -> None:
        match happening:
            case Started(cell=cell, plans=plans, known=known):
                self._say(cell, f"{plans} plans, {known} of them measured before")
            case Compiled(cell=cell, done=done, total=total):
                self._say(cell, f"compiled {done} of {total}")
            case Tried(cell=cell, plan=plan, best=best):
                self._say(cell, f"best {'none yet' if best is None else _us(best)}, {_plan(plan)}")
                self._progress.advance(self._task)
            case Skipped(cell=cell, known=known):
                self._end(cell, f"{_us(known.us)}, {_plan(known.plan)}: measured before")
            case Tuned(cell=cell, won=won, before=before, before_us=before_us, tried=tried, failed=failed):
                kept = "as before" if won.plan == before else f"before {_us(before_us)}, {_plan(before)}"
                self._end(cell, f"{_us(won.us)}, {_plan(won.plan)}; {kept}; {tried} plans tried, of which {failed} do not run here")

    def _say(self, cell: Cell, text: str) -> None:
        self._progress.update(self._task, description=f"{cell.tokens} tokens: {text}")

    def _end(self, cell: Cell, text: str) -> None:
        self._done += self._plans[cell]  # those too that were not worth trying
        self._progress.update(self._task, completed=self._done)
        self._progress.console.print(f"{cell.tokens} tokens: {text}", markup=False, emoji=False, highlight=False, soft_wrap=True)


def _us(us: float | None) -> str:
    return "no time" if us is None else f"{us:.1f} us"


def _plan(plan: Plan) -> str:
    return f"{plan.how.value} {_tile(plan.up)} and {_tile(plan.down)}"


def _tile(tile: Tile) -> str:
    return "x".join(map(str, tile))

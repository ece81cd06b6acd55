"""Tables of what benchmarks measured, out of the JSON that they wrote."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import attrs
from cattrs.preconf.json import make_converter

_RESULTS: Final = Path(__file__).parent.parent / "benchmarks" / "results"
T = TypeVar("T")


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


@attrs.frozen
class Run(Generic[T]):
    """One run of a benchmark, and its cells."""

    device: str
    torch: str
    triton: str
    rows: tuple[T, ...]
    transformers: str | None = None

    def title(self) -> str:
        """Return the line that says where it was."""
        libraries = f"torch {self.torch}, Triton {self.triton}"
        return f"{self.device}, {libraries}{f', transformers {self.transformers}' if self.transformers else ''}.\n\n"


def _read(name: str, run: type[Run[T]]) -> Run[T]:
    return make_converter().structure(json.loads((_RESULTS / f"h200_{name}.json").read_text()), run)


@attrs.frozen
class Timed:
    """One measured cell of a benchmark's JSON."""

    cell: str
    rows: int
    implementation: str
    graph_us: float
    floor_us: float


def routing() -> str:
    """Return the figures of the routing kernels."""
    run = _read("routing", Run[Timed])
    sizes = sorted({timed.rows for timed in run.rows})
    lines: list[tuple[str, ...]] = []
    for cell in dict.fromkeys(timed.cell for timed in run.rows):
        found = {(timed.implementation, timed.rows): timed for timed in run.rows if timed.cell == cell}
        others = [name for name in dict.fromkeys(name for name, _ in found) if name != "moe_typed"]
        ours = [found["moe_typed", size] for size in sizes]
        lines.append((cell, "moe_typed", *(f"{timed.graph_us:.1f} (floor {timed.floor_us:.1f})" for timed in ours)))
        for name in others:
            cells = (found[name, timed.rows] for timed in ours)
            lines.append(("", name, *(_compared(other, timed) for other, timed in zip(cells, ours, strict=True))))
    head = ("what", "how", *(f"{size} rows" for size in sizes))
    return run.title() + table(head, lines)


@attrs.frozen
class Scaled:
    """One measured cell of the quantising benchmark; ``wire_bytes`` where rows are sent."""

    what: str
    rows: int
    live: int
    moved: int
    graph_us: float
    floor_us: float
    wire_bytes: int | None


def quantize() -> str:
    """Return the figures of quantising and upscaling kernels."""
    run = _read("quantize", Run[Scaled])
    kernels = [cell for cell in run.rows if cell.wire_bytes is None]
    sizes = sorted({cell.rows for cell in kernels})
    by_place = {(cell.what, cell.rows): cell for cell in kernels}
    lines = [(what, *(_bandwidth(by_place[what, size]) for size in sizes)) for what in dict.fromkeys(cell.what for cell in kernels)]
    return run.title() + table(("what", *(f"{size} rows" for size in sizes)), lines)


def _bandwidth(cell: Scaled) -> str:
    return f"{cell.graph_us:.1f} ({cell.moved / cell.graph_us / 1e6:.2f})"


def wire() -> str:
    """Return quantise-then-send against send-then-quantise."""
    cells = [cell for cell in _read("quantize", Run[Scaled]).rows if cell.wire_bytes is not None]
    by_place = {(cell.what, cell.live): cell for cell in cells}
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(cell.what.partition(":")[0] for cell in cells):
        for live in sorted({cell.live for cell in cells}):
            first, last = by_place[f"{name}: quantise, send", live], by_place[f"{name}: send, quantise", live]
            sent = (f"{(cell.wire_bytes or 0) / 1e6:.2f}" for cell in (first, last))
            ratio = f"{last.graph_us / first.graph_us:.1f}"
            lines.append((name, str(live), f"{first.graph_us:.1f}", f"{last.graph_us:.1f}", ratio, f"{first.graph_us / first.floor_us:.2f}", *sent))
    times = ("quantise first, us", "send first, us", "ratio", "quantise first / floor")
    return table(("format", "live rows", *times, "MB sent, quantise first", "MB sent, send first"), lines)


@attrs.frozen
class Layered:
    """One measured cell of the benchmark of whole layers."""

    shape: str
    format: str
    load: str
    tokens: int
    graph_us: float
    floor_us: float
    torch_us: float | None
    peer_us: float | None
    peer_ratio: float | None


def fused_moe() -> str:
    """Return the figures of whole layers."""
    run = _read("fused_moe", Run[Layered])
    by_place = {(cell.shape, cell.format, cell.load, cell.tokens): cell for cell in run.rows}
    sizes = sorted({cell.tokens for cell in run.rows})
    lines: list[tuple[str, ...]] = []
    for shape, fmt in dict.fromkeys((cell.shape, cell.format) for cell in run.rows):
        cells = [by_place[shape, fmt, "uniform", size] for size in sizes]
        lines.append((f"{shape}, {fmt}", "moe_typed", *(f"{cell.graph_us:.1f} ({cell.graph_us / cell.floor_us:.2f})" for cell in cells)))
        if cells[0].peer_us is not None:
            lines.append(("", "best peer", *(f"{cell.peer_us:.1f} ({cell.peer_ratio:.2f})" for cell in cells)))
        if cells[0].torch_us is not None:
            lines.append(("", "torch grouped", *(f"{cell.torch_us:.0f} ({(cell.torch_us or 0) / cell.floor_us:.2f})" for cell in cells)))
        zipf = [by_place[shape, fmt, "zipf", size] for size in sizes]
        lines.append(("", "moe_typed, Zipf", *(f"{cell.graph_us:.1f} ({cell.graph_us / cell.floor_us:.2f})" for cell in zipf)))
    head = ("layer", "how", *(f"{size} tokens" for size in sizes))
    return run.title() + table(head, lines)


@attrs.frozen
class Client:
    """One measured cell of the benchmark of transformers' models; NaN where it cannot be captured."""

    model: str
    what: str
    tokens: int
    implementation: str
    graph_us: float
    python_us: float


def transformers() -> str:
    """Return the figures of experts and models of transformers, in a graph."""
    run = _read("transformers", Run[Client])
    return run.title() + _by_size([(f"{cell.model}, {cell.what}", cell.implementation, cell.tokens, cell.graph_us) for cell in run.rows])


def transformers_python() -> str:
    """Return the same in a loop of calls from Python."""
    run = _read("transformers", Run[Client])
    return _by_size([(f"{cell.model}, {cell.what}", cell.implementation, cell.tokens, cell.python_us) for cell in run.rows])


def _by_size(cells: Sequence[tuple[str, str, int, float]]) -> str:
    """Return a table of (what, by whom, tokens, microseconds), with ratios to the first of each kind."""
    sizes = sorted({tokens for _, _, tokens, _ in cells})
    times = {(what, by, tokens): time for what, by, tokens, time in cells}
    lines: list[tuple[str, ...]] = []
    for what, by in dict.fromkeys((what, by) for what, by, _, _ in cells):
        of_ours = "" if by == "moe_typed" else " ({:.2f}x)"
        found = ((times.get((what, by, size)), times[what, "moe_typed", size]) for size in sizes)
        lines.append(
            (what if not of_ours else "", by, *("not run" if time is None else f"{time:.0f}{of_ours.format(time / ours)}" for time, ours in found))
        )
    return table(("what", "by", *(f"{size} tokens" for size in sizes)), lines)


@attrs.frozen
class Placed:
    """One measured cell of the benchmark of slabs."""

    format: str
    capacity: int
    live: int
    how: str
    graph_us: float
    floor_us: float


def slabs() -> str:
    """Return the figures of slabs, by both of their ways into the Triton runner."""
    run = _read("slabs", Run[Placed])
    by_place = {(cell.format, cell.capacity, cell.live, cell.how): cell for cell in run.rows}
    lines: list[tuple[str, ...]] = []
    for fmt, capacity, live in dict.fromkeys((cell.format, cell.capacity, cell.live) for cell in run.rows):
        ours, other = (by_place[fmt, capacity, live, how] for how in ("in place", "by routes"))
        times = (f"{cell.graph_us:.0f} ({cell.graph_us / cell.floor_us:.2f})" for cell in (ours, other))
        lines.append((fmt, f"32 x {capacity}", str(live), *times, f"{other.graph_us / ours.graph_us:.2f}"))
    head = ("format", "slab", "live rows", "where they lie, us (x floor)", "by routes, us (x floor)", "ratio")
    return run.title() + table(head, lines)


@attrs.frozen
class Held:
    """One measured cell of the benchmark of weight formats."""

    shape: str
    weights: str
    rows: str
    tokens: int
    graph_us: float
    floor_us: float
    bf16_us: float


def formats() -> str:
    """Return the figures of layers over weights in other formats."""
    run = _read("formats", Run[Held])
    by_place = {(cell.shape, cell.weights, cell.rows, cell.tokens): cell for cell in run.rows}
    sizes = sorted({cell.tokens for cell in run.rows})
    lines: list[tuple[str, ...]] = []
    for shape in dict.fromkeys(cell.shape for cell in run.rows):
        kinds = list(dict.fromkeys((cell.weights, cell.rows) for cell in run.rows if cell.shape == shape))
        bf16 = (by_place[shape, *kinds[0], size].bf16_us for size in sizes)
        lines.append((shape, "bf16", "bf16", *(f"{time:.1f}" for time in bf16)))
        for weights, rows in kinds:
            cells = (by_place[shape, weights, rows, size] for size in sizes)
            figures = (f"{cell.graph_us:.1f} ({cell.graph_us / cell.floor_us:.2f}, {cell.graph_us / cell.bf16_us:.2f})" for cell in cells)
            lines.append(("", weights, rows, *figures))
    head = ("layer", "weights", "rows", *(f"{size} tokens" for size in sizes))
    return run.title() + table(head, lines)


def _compared(other: Timed, ours: Timed) -> str:
    return "no graph" if math.isnan(other.graph_us) else f"{other.graph_us:.1f} ({other.graph_us / ours.graph_us:.1f}x)"

"""Write the generated parts of the documentation: ``python docs/generate.py``. A test compares them with the code.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import attrs
from cattrs.preconf.json import make_converter

from moe_typed.formats import AnyConversion, Conversion, Payload, catalogue, quantizers, relayouts, round_bf16, upscalers
from moe_typed.formats.conversions.upscale import SCALED
from moe_typed.integrations.transformers.survey import find_experts_classes, need_of
from moe_typed.plan import Backend, supports
from moe_typed.plan.ways import DENSE_MODELS, bridge
from moe_typed.runners.acceptance import ACCEPTANCE, RunnerName, accepted_by
from moe_typed.stages import RunnerInput
from moe_typed.table import TRANSITIONS, Row
from moe_typed.tuning.space import ROUTES, TILES

ROOT: Final = Path(__file__).parent.parent
_PART: Final = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _code(rows: Iterable[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    return ((f"`{first}`", *rest) for first, *rest in rows)


def payload_formats() -> str:
    """Return the facts of every payload class."""
    return _table(catalogue.FACTS, _code(catalogue.payload_facts()))


def weight_formats() -> str:
    """Return the facts of every weight class."""
    return _table(catalogue.FACTS, _code(catalogue.weight_facts()))


def conversion_table() -> str:
    """Return every named conversion."""
    named = (round_bf16, *(value for group in (quantizers, upscalers, relayouts) for value in vars(group).values()))
    found: list[AnyConversion] = [value for value in named if isinstance(value, Conversion)]
    rows = ((f"`{item.name}`", _sources(item), f"`{item.target.__qualname__}`") for item in found)
    return _table(("conversion", "from", "to"), rows)


def _sources(conversion: AnyConversion) -> str:
    if conversion.source == SCALED:
        return "every class with scales"
    return ", ".join(f"`{cls.__qualname__}`" for cls in conversion.source)


def acceptance() -> str:
    """Return which weights a runner takes, and which payloads then."""
    rows = (
        (
            row.runner.value,
            f"`{row.weights.__qualname__}`",
            f"`{row.prepared.__qualname__}`",
            ", ".join(payload.format.name for payload in row.payloads),
        )
        for row in ACCEPTANCE
    )
    return _table(("runner", "weights in checkpoint layout", "prepared weights", "payloads that they take"), rows)


def transitions() -> str:
    """Return the transition table."""
    rows: list[tuple[str, ...]] = []
    for (variant, runner_input), cell in TRANSITIONS.items():
        if isinstance(cell, Row):
            pre, post = cell.functions
            way = (f"`{pre.__name__}`", f"`{post.__name__}`", f"`{cell.ends_at.__qualname__}`")
        else:
            way = (f"unsupported: {cell.reason.value}", cell.detail, "")
        rows.append((f"`{variant.__qualname__}`", f"`{runner_input.__qualname__}`", *way))
    return _table(("dispatch output", "runner input", "pre", "post", "combine input"), rows)


def backends() -> str:
    """Return which runner works behind which backend."""
    rows = (
        (backend.value, *("yes" if supports(backend, runner) else "no" for runner in RunnerName), ", ".join(wire.value for wire in backend.carries))
        for backend in Backend
    )
    return _table(("backend", *(runner.value for runner in RunnerName), "wires"), rows)


def aiter_decisions() -> str:
    """Return what becomes of each wire in front of each of AITER's weights."""
    wires = Backend.MORI_NORMAL.carries
    rows = (
        (f"`{row.prepared.__qualname__}`", *(_decision(payload, row.payloads) for payload in wires.values())) for row in accepted_by(RunnerName.AITER)
    )
    return _table(("weights", *(wire.value for wire in wires)), rows)


def _decision(arrives: type[Payload], payloads: tuple[type[Payload], ...]) -> str:
    found = [(bridge(arrives, payloads, model), name) for name, model in DENSE_MODELS.items()]
    ways = [conversions for conversions, _ in found if conversions is not None]
    if not ways:
        return "unsupported"
    return ", ".join(f"`{conversion.name}`" for conversion in ways[0]) or "as it is"


def diagram() -> str:
    """Return the states and the ways between them, as one Mermaid diagram a runner input."""
    rows = [cell for cell in TRANSITIONS.values() if isinstance(cell, Row)]
    return "\n".join(_diagram_of(runner_input, rows) for runner_input in dict.fromkeys(row.key[1] for row in rows))


def _diagram_of(runner_input: type[RunnerInput], rows: Iterable[Row]) -> str:
    middle = runner_input.__qualname__
    there: list[str] = []
    run: list[str] = []
    back: list[str] = []
    for row in rows:
        if row.key[1] is runner_input:
            pre, post = row.functions
            there.append(f"    {row.key[0].__qualname__} --> {middle}: {pre.__name__}")
            run.append(f"    {middle} --> {_output(post)}: run")
            back.append(f"    {_output(post)} --> {row.ends_at.__qualname__}: {post.__name__}")
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR", *there, *dict.fromkeys(run), *dict.fromkeys(back), "```"]
    return f"Through `{middle}`:\n\n" + "\n".join(lines) + "\n"


def _output(post: Callable[..., object]) -> str:
    first = next(iter(post.__annotations__.values()))
    return str(getattr(first, "__qualname__", first))


def transformers_classes() -> str:
    """Return what every experts class of the installed transformers needs, classes that need the same together."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    refused: list[tuple[str, ...]] = []
    for need in map(need_of, find_experts_classes()):
        if need.refusal:
            refused.append((f"`{need.experts}`", "", "", need.refusal))
        else:
            # Classes that bring a function of their own need the same of a runner: to call it.
            activation = "calls its own function" if need.activation.startswith("calls ") else need.activation
            groups.setdefault((need.weights, need.order, activation), []).append(f"`{need.experts}`")
    rows = [(", ".join(names), f"`{weights}`", order, activation) for (weights, order, activation), names in groups.items()]
    return _table(("classes", "weights of a bf16 model", "gate and up", "between the products"), (*rows, *refused))


def tuning_space() -> str:
    """Return what tuning tries of tiles, by format and height."""
    head = ("weights", "rows", "routes an expert", "columns of the first product", "of the second", "depth", "stages", "warps", "blocks side by side")
    rows: list[tuple[str, ...]] = []
    for (fmt, height), sizes in TILES.items():
        least, most = ROUTES[height]
        routes = f"above {least}" if most > 2**30 else f"up to {most}" if not least else f"{least} to {most}"
        rows.append((fmt, str(height), routes, *(", ".join(map(str, sorted(values))) for values in sizes)))
    return _table(head, rows)


@attrs.frozen
class Timed:
    """One measured cell of a benchmark's JSON."""

    cell: str
    rows: int
    implementation: str
    graph_us: float
    floor_us: float


@attrs.frozen
class Run:
    """One run of a benchmark."""

    device: str
    torch: str
    triton: str
    rows: tuple[Timed, ...]


def figures_routing() -> str:
    """Return the figures of the routing kernels."""
    run = make_converter().structure(json.loads((ROOT / "benchmarks" / "results" / "h200_routing.json").read_text()), Run)
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
    return f"{run.device}, torch {run.torch}, Triton {run.triton}.\n\n" + _table(head, lines)


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


@attrs.frozen
class ScaledRun:
    """One run of the quantising benchmark."""

    device: str
    torch: str
    triton: str
    rows: tuple[Scaled, ...]


def _scaled_run() -> ScaledRun:
    return make_converter().structure(json.loads((ROOT / "benchmarks" / "results" / "h200_quantize.json").read_text()), ScaledRun)


def figures_quantize() -> str:
    """Return the figures of quantising and upscaling kernels."""
    run = _scaled_run()
    kernels = [cell for cell in run.rows if cell.wire_bytes is None]
    sizes = sorted({cell.rows for cell in kernels})
    by_place = {(cell.what, cell.rows): cell for cell in kernels}
    lines = [(what, *(_bandwidth(by_place[what, size]) for size in sizes)) for what in dict.fromkeys(cell.what for cell in kernels)]
    return f"{run.device}, torch {run.torch}, Triton {run.triton}.\n\n" + _table(("what", *(f"{size} rows" for size in sizes)), lines)


def _bandwidth(cell: Scaled) -> str:
    return f"{cell.graph_us:.1f} ({cell.moved / cell.graph_us / 1e6:.2f})"


def figures_wire() -> str:
    """Return quantise-then-send against send-then-quantise."""
    cells = [cell for cell in _scaled_run().rows if cell.wire_bytes is not None]
    by_place = {(cell.what, cell.live): cell for cell in cells}
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(cell.what.partition(":")[0] for cell in cells):
        for live in sorted({cell.live for cell in cells}):
            first, last = by_place[f"{name}: quantise, send", live], by_place[f"{name}: send, quantise", live]
            sent = (f"{(cell.wire_bytes or 0) / 1e6:.2f}" for cell in (first, last))
            ratio = f"{last.graph_us / first.graph_us:.1f}"
            lines.append((name, str(live), f"{first.graph_us:.1f}", f"{last.graph_us:.1f}", ratio, f"{first.graph_us / first.floor_us:.2f}", *sent))
    times = ("quantise first, us", "send first, us", "ratio", "quantise first / floor")
    return _table(("format", "live rows", *times, "MB sent, quantise first", "MB sent, send first"), lines)


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


@attrs.frozen
class LayeredRun:
    """One run of the benchmark of whole layers."""

    device: str
    torch: str
    triton: str
    rows: tuple[Layered, ...]


def figures_fused_moe() -> str:
    """Return the figures of whole layers."""
    run = make_converter().structure(json.loads((ROOT / "benchmarks" / "results" / "h200_fused_moe.json").read_text()), LayeredRun)
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
    return f"{run.device}, torch {run.torch}, Triton {run.triton}.\n\n" + _table(head, lines)


@attrs.frozen
class Client:
    """One measured cell of the benchmark of transformers' models; NaN where it cannot be captured."""

    model: str
    what: str
    tokens: int
    implementation: str
    graph_us: float
    python_us: float


@attrs.frozen
class ClientRun:
    """One run of the benchmark of transformers' models."""

    device: str
    torch: str
    triton: str
    transformers: str
    rows: tuple[Client, ...]


def _client_run() -> ClientRun:
    return make_converter().structure(json.loads((ROOT / "benchmarks" / "results" / "h200_transformers.json").read_text()), ClientRun)


def figures_transformers() -> str:
    """Return the figures of experts and models of transformers, in a graph."""
    run = _client_run()
    title = f"{run.device}, torch {run.torch}, Triton {run.triton}, transformers {run.transformers}.\n\n"
    return title + _by_size([(f"{cell.model}, {cell.what}", cell.implementation, cell.tokens, cell.graph_us) for cell in run.rows])


def figures_transformers_python() -> str:
    """Return the same in a loop of calls from Python."""
    return _by_size([(f"{cell.model}, {cell.what}", cell.implementation, cell.tokens, cell.python_us) for cell in _client_run().rows])


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
    return _table(("what", "by", *(f"{size} tokens" for size in sizes)), lines)


@attrs.frozen
class Placed:
    """One measured cell of the benchmark of slabs."""

    format: str
    capacity: int
    live: int
    how: str
    graph_us: float
    floor_us: float


@attrs.frozen
class PlacedRun:
    """One run of the benchmark of slabs."""

    device: str
    torch: str
    triton: str
    rows: tuple[Placed, ...]


def figures_slabs() -> str:
    """Return the figures of slabs, by both of their ways into the Triton runner."""
    run = make_converter().structure(json.loads((ROOT / "benchmarks" / "results" / "h200_slabs.json").read_text()), PlacedRun)
    by_place = {(cell.format, cell.capacity, cell.live, cell.how): cell for cell in run.rows}
    lines: list[tuple[str, ...]] = []
    for fmt, capacity, live in dict.fromkeys((cell.format, cell.capacity, cell.live) for cell in run.rows):
        ours, other = (by_place[fmt, capacity, live, how] for how in ("in place", "by routes"))
        times = (f"{cell.graph_us:.0f} ({cell.graph_us / cell.floor_us:.2f})" for cell in (ours, other))
        lines.append((fmt, f"32 x {capacity}", str(live), *times, f"{other.graph_us / ours.graph_us:.2f}"))
    head = ("format", "slab", "live rows", "where they lie, us (x floor)", "by routes, us (x floor)", "ratio")
    return f"{run.device}, torch {run.torch}, Triton {run.triton}.\n\n" + _table(head, lines)


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


@attrs.frozen
class HeldRun:
    """One run of the benchmark of weight formats."""

    device: str
    torch: str
    triton: str
    rows: tuple[Held, ...]


def figures_formats() -> str:
    """Return the figures of layers over weights in other formats."""
    path = ROOT / "benchmarks" / "results" / "h200_formats.json"
    if not path.exists():
        return "Whole layers have not been measured yet.\n"
    run = make_converter().structure(json.loads(path.read_text()), HeldRun)
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
    return f"{run.device}, torch {run.torch}, Triton {run.triton}.\n\n" + _table(head, lines)


def _compared(other: Timed, ours: Timed) -> str:
    return "no graph" if math.isnan(other.graph_us) else f"{other.graph_us:.1f} ({other.graph_us / ours.graph_us:.1f}x)"


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "payload-formats": payload_formats,
    "weight-formats": weight_formats,
    "aiter-decisions": aiter_decisions,
    "backends": backends,
    "conversions": conversion_table,
    "acceptance": acceptance,
    "transitions": transitions,
    "diagram": diagram,
    "transformers-classes": transformers_classes,
    "tuning-space": tuning_space,
    "figures-routing": figures_routing,
    "figures-quantize": figures_quantize,
    "figures-wire": figures_wire,
    "figures-fused-moe": figures_fused_moe,
    "figures-slabs": figures_slabs,
    "figures-formats": figures_formats,
    "figures-transformers": figures_transformers,
    "figures-transformers-python": figures_transformers_python,
}


def rewrite(text: str) -> str:
    """Return a page with its generated parts made anew. Raises: KeyError for a part that nothing generates."""
    return _PART.sub(lambda match: match[1] + PARTS[match[2]]() + match[3], text)


def pages() -> tuple[Path, ...]:
    """Return every page of the documentation."""
    return (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


if __name__ == "__main__":
    for page in pages():
        page.write_text(rewrite(page.read_text()))

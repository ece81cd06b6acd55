"""Print plans and traces as tables."""

from rich.console import Console
from rich.table import Table

from ..capture import Trace
from ..formats import catalogue
from ..plan import PlanReport


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def print_formats(console: Console) -> None:
    """Print the facts of every payload and weight class."""
    for title, rows in (("Payloads", catalogue.payload_facts()), ("Expert weights, in checkpoint layout", catalogue.weight_facts())):
        table = Table(title=title, title_justify="left")
        for name in catalogue.FACTS:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)


def print_plan(console: Console, report: PlanReport) -> None:
    """Print what was chosen, each step with its bytes, what was rejected and why, and what is degraded."""
    problem, environment = report.problem, report.environment
    chosen = Table(title="Plan", show_header=False, title_justify="left")
    chosen.add_row(
        "layer", f"{problem.num_experts} experts, top {problem.top_k}, hidden {problem.hidden}, inter {problem.inter}, {problem.activation}"
    )
    chosen.add_row("formats", f"model {problem.model}, weights {problem.weights}, wire {report.wire} (asked: {problem.wire.value})")
    chosen.add_row("device", f"{environment.device_name} ({environment.device})")
    chosen.add_row("dispatcher", report.dispatcher)
    chosen.add_row("runner", f"{report.runner} (asked: {problem.runner.value})")
    if report.product_plans is not None:
        chosen.add_row("tiles", str(report.product_plans))
    chosen.add_row("prepared weights", f"{report.prepared_weights}, which take {', '.join(report.accepts)}")
    for item in report.rejected:
        chosen.add_row("not chosen", f"{item.runner}: {item.reason.explanation} ({item.detail})")
    for loss in report.degradations:
        chosen.add_row("degraded", f"{loss.subject}: {loss.used} instead of {loss.preferred}: {loss.detail}")
    console.print(chosen)

    steps = Table(title=f"Steps ({problem.rows} rows)", title_justify="left")
    for name in ("step", "kind", "from", "to"):
        steps.add_column(name, overflow="fold")
    steps.add_column("bytes moved", justify="right")
    for step in report.steps:
        steps.add_row(step.name, step.kind.value, step.source, step.target, _bytes(step.bytes_moved))
    steps.add_section()
    steps.add_row("all conversions", "", "", "", _bytes(report.bytes_moved))
    console.print(steps)


def print_crossings(console: Console, trace: Trace) -> None:
    """Print each boundary that was crossed, with its class and its tensors' dtypes, shapes, strides and devices."""
    table = Table(title="Boundaries crossed", title_justify="left")
    for name in ("stage", "class", "field", "tensor"):
        table.add_column(name, overflow="fold")
    for crossing in trace.crossings:
        lines = crossing.tensors or (("", ""),)
        for number, (path, tensor) in enumerate(lines):
            stage, boundary = (crossing.stage, crossing.boundary) if number == 0 else ("", "")
            table.add_row(stage, boundary, path, tensor, end_section=number == len(lines) - 1)
    console.print(table)


def print_times(console: Console, times: list[tuple[str, float]]) -> None:
    """Print the time of each stage in milliseconds."""
    table = Table(title="Time per stage", title_justify="left")
    table.add_column("stage")
    table.add_column("ms", justify="right")
    for stage, seconds in times:
        table.add_row(stage, f"{seconds * 1e3:.3f}")
    console.print(table)

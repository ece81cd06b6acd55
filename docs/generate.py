"""Write the generated parts of the documentation: ``python -m docs.generate``. A test compares them with the code.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from docs import figures
from docs.figures import table
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


def _code(rows: Iterable[tuple[str, ...]]) -> Iterable[tuple[str, ...]]:
    return ((f"`{first}`", *rest) for first, *rest in rows)


def payload_formats() -> str:
    """Return the facts of every payload class."""
    return table(catalogue.FACTS, _code(catalogue.payload_facts()))


def weight_formats() -> str:
    """Return the facts of every weight class."""
    return table(catalogue.FACTS, _code(catalogue.weight_facts()))


def conversion_table() -> str:
    """Return every named conversion."""
    named = (round_bf16, *(value for group in (quantizers, upscalers, relayouts) for value in vars(group).values()))
    found: list[AnyConversion] = [value for value in named if isinstance(value, Conversion)]
    rows = ((f"`{item.name}`", _sources(item), f"`{item.target.__qualname__}`") for item in found)
    return table(("conversion", "from", "to"), rows)


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
    return table(("runner", "weights in checkpoint layout", "prepared weights", "payloads that they take"), rows)


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
    return table(("dispatch output", "runner input", "pre", "post", "combine input"), rows)


def backends() -> str:
    """Return which runner works behind which backend."""
    rows = (
        (backend.value, *("yes" if supports(backend, runner) else "no" for runner in RunnerName), ", ".join(wire.value for wire in backend.carries))
        for backend in Backend
    )
    return table(("backend", *(runner.value for runner in RunnerName), "wires"), rows)


def aiter_decisions() -> str:
    """Return what becomes of each wire in front of each of AITER's weights."""
    wires = Backend.MORI_NORMAL.carries
    rows = (
        (f"`{row.prepared.__qualname__}`", *(_decision(payload, row.payloads) for payload in wires.values())) for row in accepted_by(RunnerName.AITER)
    )
    return table(("weights", *(wire.value for wire in wires)), rows)


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
    return table(("classes", "weights of a bf16 model", "gate and up", "between the products"), (*rows, *refused))


def tuning_space() -> str:
    """Return what tuning tries of tiles, by format and height."""
    head = ("weights", "rows", "routes an expert", "columns of the first product", "of the second", "depth", "stages", "warps", "blocks side by side")
    rows: list[tuple[str, ...]] = []
    for (fmt, height), sizes in TILES.items():
        least, most = ROUTES[height]
        routes = f"above {least}" if most > 2**30 else f"up to {most}" if not least else f"{least} to {most}"
        rows.append((fmt, str(height), routes, *(", ".join(map(str, sorted(values))) for values in sizes)))
    return table(head, rows)


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
    "figures-routing": figures.routing,
    "figures-quantize": figures.quantize,
    "figures-wire": figures.wire,
    "figures-fused-moe": figures.fused_moe,
    "figures-slabs": figures.slabs,
    "figures-formats": figures.formats,
    "figures-transformers": figures.transformers,
    "figures-transformers-python": figures.transformers_python,
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

"""Write the generated parts of the documentation: ``python docs/generate.py``. A test compares them with the code.

A part stands between ``<!-- generated: NAME -->`` and ``<!-- end -->``.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from moe_typed.formats import AnyConversion, Conversion, catalogue, quantizers, relayouts, round_bf16, upscalers
from moe_typed.formats.conversions.upscale import SCALED
from moe_typed.runners.acceptance import ACCEPTANCE
from moe_typed.table import TRANSITIONS, Row

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


def diagram() -> str:
    """Return the states and the ways between them, as a Mermaid diagram."""
    lines = ["```mermaid", "stateDiagram-v2", "    direction LR"]
    for (variant, runner_input), cell in TRANSITIONS.items():
        if isinstance(cell, Row):
            pre, post = cell.functions
            lines += [
                f"    {variant.__qualname__} --> {runner_input.__qualname__}: {pre.__name__}",
                f"    {runner_input.__qualname__} --> {_output(post)}: run",
                f"    {_output(post)} --> {cell.ends_at.__qualname__}: {post.__name__}",
            ]
    return "\n".join([*dict.fromkeys(lines), "```"]) + "\n"


def _output(post: Callable[..., object]) -> str:
    first = next(iter(post.__annotations__.values()))
    return str(getattr(first, "__qualname__", first))


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "payload-formats": payload_formats,
    "weight-formats": weight_formats,
    "conversions": conversion_table,
    "acceptance": acceptance,
    "transitions": transitions,
    "diagram": diagram,
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

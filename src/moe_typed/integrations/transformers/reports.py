"""What becomes of each expert layer of a model, as values and as one table."""

from collections.abc import Iterable
from typing import final

import attrs
from rich.console import Console
from rich.table import Table
from torch import nn

from ...plan import PlanReport, Step, StepKind
from ...runners import OpaqueActivation, ThenNorm, UnsupportedError
from ...runners.activations import Activation
from .layers import Found
from .registration import experts_of, find_out


@final
@attrs.frozen(kw_only=True)
class LayerReport:
    """One expert layer. ``steps``: the plan's, with what is done to weights before, and the call of an unknown function between.

    ``refusal``: why there is no plan; empty where there is one. ``relaid``: bytes of weights that were laid out anew in place. ``copied``: bytes
    of weights that are held twice.
    """

    layer: str
    experts: str
    plan: PlanReport | None
    activation: str
    weights: str
    steps: tuple[Step, ...]
    relaid: int
    copied: int
    refusal: str

    @property
    def conversions(self) -> tuple[str, ...]:
        """Return the names of the conversions that move bytes."""
        return tuple(step.name for step in self.steps if step.kind is StepKind.CONVERSION and step.bytes_moved)

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that the conversions of one row move."""
        return 0 if self.plan is None else self.plan.bytes_moved


def layer_reports(model: nn.Module) -> tuple[LayerReport, ...]:
    """Return the report of every expert layer of a model, which is prepared for it. Raises: RuntimeError before ``register``."""
    return tuple(_report(name, module) for name, module in experts_of(model))


def _report(name: str, module: nn.Module) -> LayerReport:
    title = type(module).__qualname__
    try:
        found = find_out(module)
    except UnsupportedError as error:
        return LayerReport(
            layer=name,
            experts=title,
            plan=None,
            activation="",
            weights="",
            steps=(),
            relaid=0,
            copied=0,
            refusal=str(error).removeprefix(f"{title}: "),
        )
    return LayerReport(
        layer=name,
        experts=title,
        plan=found.report,
        activation=describe(found.activation),
        weights=found.weights,
        steps=_steps(found),
        relaid=found.relaid,
        copied=found.copied,
        refusal="",
    )


def describe(activation: Activation) -> str:
    """Return what an activation is called in reports: its formula's name and parameters, or the function that it calls."""
    match activation:
        case OpaqueActivation(title=title):
            return f"calls {title}"
        case ThenNorm(inner=inner):
            return f"{describe(inner)}, then a norm"
        case _:
            parameters = ", ".join(f"{name} {value:g}" for name, value in _parameters(activation).items())
            return f"{activation.name} ({parameters})" if parameters else activation.name


def _parameters(activation: Activation) -> dict[str, float]:
    values = {name: getattr(activation, name, None) for name in ("alpha", "limit")}
    return {name: value for name, value in values.items() if isinstance(value, float)}


def _steps(found: Found) -> tuple[Step, ...]:
    first: list[Step] = []
    steps = list(found.report.steps)
    for name, source, target, size in (
        ("relay weights in place, once", "transposed", "row-major", found.relaid),
        ("copy weights, once", "module", "layer", found.copied),
    ):
        if size:
            first.append(Step(kind=StepKind.CONVERSION, name=name, source=source, target=target, bytes_moved=2 * size))
    inner = found.activation.inner if isinstance(found.activation, ThenNorm) else found.activation
    if isinstance(inner, OpaqueActivation):
        at = next(index for index, step in enumerate(steps) if step.kind is StepKind.RUN)
        steps.insert(at + 1, Step(kind=StepKind.RUN, name=f"calls {inner.title} between the products", source=inner.order.title, target="inter"))
    return (*first, *steps)


def report(model: nn.Module, console: Console | None = None) -> tuple[LayerReport, ...]:
    """Print one table of every expert layer of a model, and return its rows. ``console``: where to; a new one if None.

    Bytes are those of one row's conversions, and of weights. Raises: RuntimeError before ``register``.
    """
    layers = layer_reports(model)
    print_layers(layers, console or Console())
    return layers


def print_layers(layers: Iterable[LayerReport], console: Console) -> None:
    """Print one table of expert layers."""
    table = Table(title="Expert layers", title_justify="left")
    for heading in ("layer", "class", "plan", "conversions", "bytes"):
        table.add_column(heading, overflow="fold")
    for row in layers:
        if row.plan is None:
            table.add_row(row.layer, row.experts, f"refused: {row.refusal}", "", "")
            continue
        way = " > ".join(step.name for step in row.steps if step.kind in (StepKind.RUN, StepKind.COMBINE))
        tiles = "" if row.plan.product_plans is None else f"; tiles {row.plan.product_plans.origin.value}"
        relaid = f", {row.relaid} relaid" if row.relaid else ""
        copied = f", {row.copied} copied" if row.copied else ""
        kept = f"{row.bytes_moved} a row{relaid}{copied}"
        table.add_row(row.layer, row.experts, f"{row.weights}, {row.activation}: {way}{tiles}", ", ".join(row.conversions) or "none", kept)
    console.print(table)

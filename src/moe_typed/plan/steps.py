"""The steps of a plan, as its report shows them."""

from typing import get_type_hints

from ..formats import AnyConversion, Payload
from ..runners.acceptance import RunnerName
from ..table import Row
from .problem import MoEProblem
from .report import Step, StepKind
from .ways import DenseModel, WireWay


def steps_of(
    problem: MoEProblem, model: DenseModel, row: Row, wire: WireWay, before_experts: tuple[AnyConversion, ...], runner: RunnerName
) -> tuple[Step, ...]:
    """Return every step from the model's rows to the combined output, conversions with the bytes that they read and write."""
    steps = [_convert(problem, model.rows, wire.sent)]
    at = wire.sent.target
    if wire.by_library:
        moved = sum(payload.format.payload_bytes(problem.rows, problem.hidden) for payload in (at, wire.arrives))
        name = f"{problem.backend.value} quantises"
        steps.append(Step(kind=StepKind.CONVERSION, name=name, source=at.__qualname__, target=wire.arrives.__qualname__, bytes_moved=moved))
    at = wire.arrives
    for conversion in before_experts:
        steps.append(_convert(problem, at, conversion))
        at = conversion.target
    variant, runner_input = row.key
    output = next(iter(get_type_hints(row.functions[1]).values())).__qualname__
    return (
        *steps,
        Step(kind=StepKind.TRANSITION, name="pre", source=f"{variant.__qualname__}[{at.__qualname__}]", target=runner_input.__qualname__),
        Step(kind=StepKind.RUN, name=runner.value, source=runner_input.__qualname__, target=output),
        Step(kind=StepKind.TRANSITION, name="post", source=output, target=row.ends_at.__qualname__),
        Step(kind=StepKind.COMBINE, name="combine", source=row.ends_at.__qualname__, target="hidden_states"),
    )


def _convert(problem: MoEProblem, source: type[Payload], conversion: AnyConversion) -> Step:
    return Step(
        kind=StepKind.CONVERSION,
        name=conversion.name,
        source=source.__qualname__,
        target=conversion.target.__qualname__,
        bytes_moved=conversion.bytes_moved(source, problem.rows, problem.hidden),
    )

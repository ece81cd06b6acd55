"""Choose a way through the tables for an engine that is driven by configuration. Pure: it looks at the problem and the environment alone."""

import functools
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

import attrs

from ..formats import (
    AnyConversion,
    Bf16Rows,
    DenseRows,
    Format,
    Fp16Rows,
    Fp32Rows,
    Payload,
    bf16_as_is,
    fp16_as_is,
    fp32_as_is,
    quantize_fp8_block128,
    quantize_mxfp4,
    quantize_mxfp8,
    round_bf16,
    upscale_bf16,
    upscale_fp16,
    upscale_fp32,
)
from ..runners import ACTIVATIONS, SwigluOai, UnsupportedError
from ..runners.acceptance import Acceptance, RunnerName, accepted_by
from ..runners.aiter import suits
from ..stages import AiterSinkInput, FlatRowsInput, StandardCombineInput, StandardDispatchOutput
from .problem import Environment, MoEProblem, RunnerRequest, Wire
from .report import Degradation, PlanReport, Rejected, RejectReason, Step, StepKind

_log = logging.getLogger("moe_typed.plan")


@final
@attrs.frozen(eq=False)
class DenseModel:
    """What a model dtype means for a plan: its rows, and the conversions that begin and end at them."""

    rows: type[DenseRows]
    as_is: AnyConversion
    upscale: AnyConversion


DENSE_MODELS: Final[Mapping[str, DenseModel]] = MappingProxyType(
    {
        "bf16": DenseModel(Bf16Rows, bf16_as_is, upscale_bf16),
        "fp16": DenseModel(Fp16Rows, fp16_as_is, upscale_fp16),
        "fp32": DenseModel(Fp32Rows, fp32_as_is, upscale_fp32),
    }
)
_WIRES: Final[Mapping[Wire, AnyConversion]] = MappingProxyType(
    {Wire.BF16: round_bf16, Wire.FP8_BLOCK128: quantize_fp8_block128, Wire.MXFP8: quantize_mxfp8, Wire.MXFP4: quantize_mxfp4}
)
_FP8_CAPABILITY = (8, 9)  # Ada: the first with an e4m3 matrix instruction (CUDA programming guide, arithmetic by compute capability)


@final
class PlanError(UnsupportedError):
    """Say that no runner can do what was asked; ``rejected`` holds the reason for each."""

    def __init__(self, rejected: tuple[Rejected, ...]) -> None:
        self.rejected = rejected
        super().__init__("no runner can do this: " + "; ".join(f"{item.runner}: {item.reason.explanation} ({item.detail})" for item in rejected))


@final
@attrs.frozen(eq=False)
class Route:
    """A way that was found: the conversion on the wire, the one before the experts (if any), and the prepared weights at its end."""

    acceptance: Acceptance
    wire: AnyConversion
    before_experts: AnyConversion | None


def _reject(runner: RunnerName, reason: RejectReason, detail: str) -> Rejected:
    return Rejected(runner=runner.value, reason=reason, detail=detail)


def _wire_candidates(problem: MoEProblem, model: DenseModel, payloads: tuple[type[Payload], ...]) -> list[AnyConversion]:
    """Return the wire conversions to try: the one that was asked for, or for ``auto`` the model's own rows and then what the experts take."""
    if problem.wire is not Wire.AUTO:
        asked = _WIRES[problem.wire]
        return [model.as_is if asked.target is model.rows else asked]
    return [model.as_is, *(wire for wire in _WIRES.values() if wire.target in payloads and model.rows in wire.source)]


def _group_fault(wire: AnyConversion, problem: MoEProblem) -> str | None:
    return _divisibility_fault(wire.target.format, hidden=problem.hidden)


def _divisibility_fault(scaled: Format, **sizes: int) -> str | None:
    """Say which size the scales of a format do not divide. Weights are reduced along both of theirs, so that the widest group counts."""
    group = 1 if scaled.scale is None else max(scaled.scale.group)
    faults = (f"{name} = {size} is not a multiple of {group}, the group of {scaled.name}" for name, size in sizes.items() if group and size % group)
    return next(faults, None)


def _try_acceptance(problem: MoEProblem, model: DenseModel, row: Acceptance) -> Route | Rejected:
    candidates = _wire_candidates(problem, model, row.payloads)
    fault = None
    for wire in candidates:
        fault = _group_fault(wire, problem)
        if fault is not None:
            continue
        if wire.target in row.payloads:
            return Route(row, wire, None)
        if wire.target in model.upscale.source and model.rows in row.payloads:
            return Route(row, wire, model.upscale)
    if fault is not None:
        return _reject(row.runner, RejectReason.DIVISIBILITY, fault)
    accepted = ", ".join(payload.format.name for payload in row.payloads)
    asked = " or ".join(wire.target.format.name for wire in candidates)
    return _reject(row.runner, RejectReason.WIRE_FORMAT, f"{row.prepared.__qualname__} takes {accepted}; the wire would carry {asked}")


def _suits(row: Acceptance, problem: MoEProblem, environment: Environment) -> bool:
    """Say whether prepared weights are for this device and activation; AITER has more than one class for some formats."""
    return row.runner is not RunnerName.AITER or suits(row.prepared, environment.gfx, clamped=problem.activation == SwigluOai.name)


def _try_runner(problem: MoEProblem, environment: Environment, model: DenseModel, runner: RunnerName) -> Route | Rejected:
    if runner is RunnerName.TRITON:
        if "triton" not in environment.libraries:
            return _reject(runner, RejectReason.LIBRARY_MISSING, "triton is not installed")
        if environment.device != "cuda":
            return _reject(runner, RejectReason.DEVICE, f"it needs a CUDA device; this is {environment.device}")
        if problem.weights.startswith("fp8") and environment.capability < _FP8_CAPABILITY:
            return _reject(runner, RejectReason.CAPABILITY, f"compute capability {environment.capability} has no fp8 matrix instruction")
    if runner is RunnerName.AITER:
        if not environment.gfx:
            return _reject(runner, RejectReason.DEVICE, f"it needs an AMD GPU; this is {environment.device_name}")
        if "amd-aiter" not in environment.libraries:
            return _reject(runner, RejectReason.LIBRARY_MISSING, "amd-aiter is not installed")
    rows = [row for row in accepted_by(runner) if row.weights.format.name == problem.weights and _suits(row, problem, environment)]
    if not rows:
        known = ", ".join(row.weights.format.name for row in accepted_by(runner))
        return _reject(runner, RejectReason.WEIGHT_FORMAT, f"weights are {problem.weights}; it takes {known or 'none yet'}")
    fault = _divisibility_fault(rows[0].weights.format, hidden=problem.hidden, inter=problem.inter)
    if fault is not None:
        return _reject(runner, RejectReason.DIVISIBILITY, fault)
    if problem.activation not in ACTIVATIONS:
        return _reject(runner, RejectReason.ACTIVATION, f"activation is {problem.activation}; it does {', '.join(ACTIVATIONS)}")
    return _try_acceptance(problem, model, rows[0])


def _steps(problem: MoEProblem, model: DenseModel, route: Route) -> tuple[Step, ...]:
    steps: list[Step] = []
    at: type[Payload] = model.rows

    def convert(conversion: AnyConversion) -> None:
        nonlocal at
        steps.append(
            Step(
                kind=StepKind.CONVERSION,
                name=conversion.name,
                source=at.__qualname__,
                target=conversion.target.__qualname__,
                bytes_moved=conversion.bytes_moved(at, problem.rows, problem.hidden),
            )
        )
        at = conversion.target

    convert(route.wire)
    dispatched = f"{StandardDispatchOutput.__qualname__}[{at.__qualname__}]"
    if route.before_experts is not None:
        convert(route.before_experts)
        dispatched = f"{StandardDispatchOutput.__qualname__}[{at.__qualname__}]"
    runner = route.acceptance.runner.value
    runner_input = (AiterSinkInput if route.acceptance.runner is RunnerName.AITER else FlatRowsInput).__qualname__
    steps += [
        Step(kind=StepKind.TRANSITION, name="pre", source=dispatched, target=runner_input),
        Step(kind=StepKind.RUN, name=runner, source=runner_input, target="SummedRowsOutput"),
        Step(kind=StepKind.TRANSITION, name="post", source="SummedRowsOutput", target=StandardCombineInput.__qualname__),
        Step(kind=StepKind.COMBINE, name="combine", source=StandardCombineInput.__qualname__, target="hidden_states"),
    ]
    return tuple(steps)


def _degradations(problem: MoEProblem, environment: Environment, chosen: RunnerName, rejected: tuple[Rejected, ...]) -> tuple[Degradation, ...]:
    """Return what is worse than it need be: a GPU that is left to the reference runner."""
    if problem.runner is not RunnerRequest.AUTO or chosen is not RunnerName.REFERENCE or environment.device != "cuda":
        return ()
    return tuple(
        Degradation(subject="runner", preferred=item.runner, used=chosen.value, detail=f"{item.reason.explanation}: {item.detail}")
        for item in rejected
        if item.reason is not RejectReason.DEVICE  # a runner for other devices is no loss to this one
    )


def find_route(problem: MoEProblem, environment: Environment) -> tuple[Route, tuple[Rejected, ...]]:
    """Return the way that a plan takes, and the runners that it does not take.

    Raises: PlanError with a reason for each runner when there is no way.
    """
    model = DENSE_MODELS.get(problem.model)
    if model is None:
        raise ValueError(f"model dtype {problem.model!r} is not one of {', '.join(DENSE_MODELS)}")
    chosen: Route | None = None
    rejected: list[Rejected] = []
    candidates = problem.runner.candidates()
    if environment.gfx:
        candidates = tuple(sorted(candidates, key=lambda candidate: candidate is not RunnerName.AITER))
    for runner in candidates:
        if chosen is not None:
            rejected.append(_reject(runner, RejectReason.NOT_NEEDED, chosen.acceptance.runner.value))
            continue
        found = _try_runner(problem, environment, model, runner)
        if isinstance(found, Rejected):
            rejected.append(found)
        else:
            chosen = found
    if chosen is None:
        raise PlanError(tuple(rejected))
    return chosen, tuple(rejected)


@functools.cache
def warn_once(item: Degradation) -> None:
    """Log a degradation the first time that it is met: every layer of a model has the same."""
    _log.warning("%s: %s instead of %s: %s", item.subject, item.used, item.preferred, item.detail)


def plan(problem: MoEProblem, environment: Environment) -> PlanReport:
    """Return the plan for a problem in an environment.

    A wire or a runner that is asked for by name is honoured or refused. ``auto`` takes the first way that there is, and what was passed over is in
    the report; a degradation is logged as well, the first time that it is met. Raises: PlanError; ValueError for an unknown model dtype.
    """
    route, rejected = find_route(problem, environment)
    chosen = route.acceptance
    degradations = _degradations(problem, environment, chosen.runner, rejected)
    for item in degradations:
        warn_once(item)
    return PlanReport(
        problem=problem,
        environment=environment,
        runner=chosen.runner.value,
        dispatcher="standard",
        prepared_weights=chosen.prepared.__qualname__,
        wire=route.wire.target.format.name,
        accepts=tuple(payload.format.name for payload in chosen.payloads),
        steps=_steps(problem, DENSE_MODELS[problem.model], route),
        rejected=rejected,
        degradations=degradations,
    )

"""Choose a way through the tables for an engine that is driven by configuration.

It looks at the problem and the environment alone, but for the note on where tiles come from, for which it reads files of tuned plans.
"""

import functools
import logging
from typing import final

import attrs

from ..formats import AnyConversion, Bf16Rows, Fp8TensorExpertWeights, Fp16ExpertWeights, Payload
from ..runners import ACTIVATIONS, ALL_ACTIVATIONS, SiluAndMul, SwigluOai, UnsupportedError
from ..runners.acceptance import Acceptance, RunnerName, accepted_by
from ..runners.aiter import NEEDS_STATIC, suits
from ..runners.ascend import ASCEND_ACTIVATIONS, AscendMxFp8Weights
from ..runners.triton.devices import FP8_CAPABILITY, TRITON_CAPABILITY
from ..table import Row
from .aiter_wire import wire_for_aiter
from .backends import supports
from .problem import Environment, MoEProblem, RunnerRequest
from .product_plans import product_plans
from .report import Degradation, PlanReport, Rejected, RejectReason
from .steps import steps_of
from .ways import DENSE_MODELS, DenseModel, WireWay, bridge, divisibility_fault, wire_ways

_log = logging.getLogger("moe_typed.plan")


@final
class PlanError(UnsupportedError):
    """Say that no runner can do what was asked; ``rejected`` holds the reason for each."""

    def __init__(self, rejected: tuple[Rejected, ...]) -> None:
        self.rejected = rejected
        super().__init__("no runner can do this: " + "; ".join(f"{item.runner}: {item.reason.explanation} ({item.detail})" for item in rejected))


@final
@attrs.frozen(eq=False)
class Route:
    """A way that was found: the row of the table, the wire, the conversions before the experts, and the prepared weights at their end."""

    row: Row
    acceptance: Acceptance
    wire: WireWay
    before_experts: tuple[AnyConversion, ...]
    degradations: tuple[Degradation, ...] = ()

    @property
    def taken(self) -> type[Payload]:
        """Return the payload class that the experts take."""
        return self.before_experts[-1].target if self.before_experts else self.wire.arrives


def _reject(runner: RunnerName, reason: RejectReason, detail: str) -> Rejected:
    return Rejected(runner=runner.value, reason=reason, detail=detail)


def _device_fault(problem: MoEProblem, environment: Environment, runner: RunnerName) -> Rejected | None:
    """Return why a runner cannot run here at all."""
    if problem.backend.module and problem.backend.module not in environment.libraries:
        return _reject(runner, RejectReason.LIBRARY_MISSING, f"{problem.backend.module}, which the backend {problem.backend.value} is of")
    if problem.backend.on_npu and environment.device != "npu":
        return _reject(runner, RejectReason.DEVICE, f"the backend {problem.backend.value} is of Ascend NPUs; this is {environment.device}")
    match runner:
        case RunnerName.TRITON:
            if "triton" not in environment.libraries:
                return _reject(runner, RejectReason.LIBRARY_MISSING, "triton is not installed")
            if environment.device != "cuda":
                return _reject(runner, RejectReason.DEVICE, f"it needs a CUDA device; this is {environment.device}")
            if "fp8" in problem.weights and environment.gfx:
                return _reject(runner, RejectReason.DEVICE, f"{problem.weights} weights need an NVIDIA GPU; this is {environment.device_name}")
            if "fp8" in problem.weights and environment.capability < FP8_CAPABILITY:
                return _reject(runner, RejectReason.CAPABILITY, f"compute capability {environment.capability} has no fp8 matrix instruction")
            if not environment.gfx and environment.capability < TRITON_CAPABILITY:
                return _reject(runner, RejectReason.CAPABILITY, f"compute capability {environment.capability} is below {TRITON_CAPABILITY}")
        case RunnerName.AITER:
            if not environment.gfx:
                return _reject(runner, RejectReason.DEVICE, f"it needs an AMD GPU; this is {environment.device_name}")
            if "amd-aiter" not in environment.libraries:
                return _reject(runner, RejectReason.LIBRARY_MISSING, "amd-aiter is not installed")
        case RunnerName.ASCEND:
            if environment.device != "npu":
                return _reject(runner, RejectReason.DEVICE, f"it needs an Ascend NPU; this is {environment.device}")
            if "torch_npu" not in environment.libraries:
                return _reject(runner, RejectReason.LIBRARY_MISSING, "torch_npu is not installed")
        case RunnerName.REFERENCE:
            pass
    return None


def _suits(row: Acceptance, problem: MoEProblem, environment: Environment) -> bool:
    """Say whether prepared weights are for this device, activation and model; AITER and Ascend have more than one class for some formats.

    Backends of the NPU that send rows take and return bf16, whatever the model: quantised weights give what they combine.
    """
    if row.runner is RunnerName.ASCEND:
        keeps = not problem.backend.sends or row.weights is Fp16ExpertWeights  # weights without scales give their own dtype
        return (DENSE_MODELS[problem.model].rows if keeps else Bf16Rows) in row.payloads
    return row.runner is not RunnerName.AITER or suits(row.prepared, environment.gfx, clamped=problem.activation == SwigluOai.name)


def _activations(row: Acceptance) -> tuple[str, ...]:
    """Return the names of the activations that a runner does with prepared weights."""
    match row.runner:
        case RunnerName.REFERENCE | RunnerName.TRITON:
            return ALL_ACTIVATIONS
        case RunnerName.ASCEND:
            return (SiluAndMul.name,) if row.prepared is AscendMxFp8Weights else ASCEND_ACTIVATIONS
        case RunnerName.AITER:
            return ACTIVATIONS


def _try_runner(problem: MoEProblem, environment: Environment, model: DenseModel, runner: RunnerName) -> Route | Rejected:
    fault = _device_fault(problem, environment, runner)
    if fault is not None:
        return fault
    support = supports(problem.backend, runner)
    if support.row is None:
        return _reject(runner, RejectReason.BACKEND, "; ".join(support.reasons))
    if runner is RunnerName.AITER and problem.weights == Fp8TensorExpertWeights.format.name:
        return _reject(runner, RejectReason.WEIGHT_FORMAT, NEEDS_STATIC)  # a problem has none
    rows = [row for row in accepted_by(runner) if row.weights.format.name == problem.weights and _suits(row, problem, environment)]
    if not rows:
        known = ", ".join(dict.fromkeys(row.weights.format.name for row in accepted_by(runner)))
        return _reject(runner, RejectReason.WEIGHT_FORMAT, f"weights are {problem.weights}; it takes {known or 'none yet'}")
    indivisible = divisibility_fault(rows[0].weights.format, hidden=problem.hidden, inter=problem.inter)
    if indivisible is not None:
        return _reject(runner, RejectReason.DIVISIBILITY, indivisible)
    activations = _activations(rows[0])
    if problem.activation not in activations:
        return _reject(runner, RejectReason.ACTIVATION, f"activation is {problem.activation}; it does {', '.join(activations)}")
    tried = [_try_wires(problem, environment, model, support.row, row) for row in rows]
    routes = [route for route in tried if isinstance(route, Route)]
    return min(routes, key=lambda route: len(route.before_experts)) if routes else tried[0]


def _try_wires(problem: MoEProblem, environment: Environment, model: DenseModel, row: Row, acceptance: Acceptance) -> Route | Rejected:
    fault = acceptance.prepared.widths.fault(hidden=problem.hidden, inter=problem.inter)
    if fault is not None:
        return _reject(acceptance.runner, RejectReason.DIVISIBILITY, fault)
    degradations: tuple[Degradation, ...] = ()
    if acceptance.runner is RunnerName.AITER:
        decision = wire_for_aiter(problem.wire, environment.aiter)
        if decision.degradation is not None:
            problem, degradations = attrs.evolve(problem, wire=decision.wire), (decision.degradation,)
    ways = wire_ways(problem, model, acceptance.payloads)
    for way in ways:
        fault = divisibility_fault(way.arrives.format, hidden=problem.hidden)
        if fault is not None:
            continue
        conversions = bridge(way.arrives, acceptance.payloads, model)
        if conversions is not None:
            return Route(row, acceptance, way, conversions, degradations)
    if fault is not None:
        return _reject(acceptance.runner, RejectReason.DIVISIBILITY, fault)
    if not ways:
        carried = ", ".join(wire.value for wire in problem.backend.carries)
        detail = f"the backend {problem.backend.value} carries {carried}; {problem.wire.value} was asked for {model.rows.format.name} rows"
        return _reject(acceptance.runner, RejectReason.WIRE_FORMAT, detail)
    accepted = ", ".join(payload.format.name for payload in acceptance.payloads)
    asked = " or ".join(way.arrives.format.name for way in ways)
    return _reject(acceptance.runner, RejectReason.WIRE_FORMAT, f"{acceptance.prepared.__qualname__} takes {accepted}; the wire would carry {asked}")


def _degradations(problem: MoEProblem, environment: Environment, route: Route, rejected: tuple[Rejected, ...]) -> tuple[Degradation, ...]:
    """Return what is worse than it need be: a wire that fell back, a GPU that is left to the reference runner."""
    chosen = route.acceptance.runner
    if problem.runner is not RunnerRequest.AUTO or chosen is not RunnerName.REFERENCE or environment.device != "cuda":
        return route.degradations
    return route.degradations + tuple(
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

    A wire or a runner that is asked for by name is honoured or refused; mxfp8 for an AITER that would misread it falls back to bf16, and the report
    says so. ``auto`` takes the first way that there is, and what was passed over is in the report; a degradation is logged as well, the first time
    that it is met. Raises: PlanError; ValueError for an unknown model dtype, and for a file of tuned plans that cannot be read.
    """
    route, rejected = find_route(problem, environment)
    chosen = route.acceptance
    degradations = _degradations(problem, environment, route, rejected)
    for item in degradations:
        warn_once(item)
    return PlanReport(
        problem=problem,
        environment=environment,
        runner=chosen.runner.value,
        dispatcher=problem.backend.value,
        prepared_weights=chosen.prepared.__qualname__,
        wire=route.wire.arrives.format.name,
        accepts=tuple(payload.format.name for payload in chosen.payloads),
        steps=steps_of(problem, DENSE_MODELS[problem.model], route.row, route.wire, route.before_experts, chosen.runner),
        rejected=rejected,
        degradations=degradations,
        product_plans=product_plans(problem, environment) if chosen.runner is RunnerName.TRITON else None,
    )

"""From a plan to the layer that it describes."""

from typing import TypeVar, cast

from ..dispatchers import MoELayer, StandardDispatcher
from ..experts import Experts, ExpertStage
from ..formats import AnyConversion, Conversion, DenseRows, Payload
from ..runners import Activation, PreparedWeights, ReferenceCheckpoint, prepare_reference
from ..runners.acceptance import Acceptance, RunnerName
from ..runners.aiter import prepare_aiter_as
from ..runners.aiter.prepare import AiterExpertWeights
from ..runners.ascend import AscendCheckpoint, prepare_ascend_as
from ..runners.triton import TritonCheckpoint, prepare_triton
from ..stages import StandardCombineInput
from ..table import AnyRunner
from .backends import Backend
from .planner import find_route
from .problem import Environment
from .report import PlanReport

M = TypeVar("M", bound=DenseRows)


def _prepare(acceptance: Acceptance, weights: ReferenceCheckpoint) -> PreparedWeights[AnyRunner, Payload]:
    # The plan has found the runner to take these weights, and the wire to carry what they take; a plan is data, so no checker sees it.
    match acceptance.runner:
        case RunnerName.REFERENCE:
            return cast("PreparedWeights[AnyRunner, Payload]", prepare_reference(weights))
        case RunnerName.TRITON:
            return cast("PreparedWeights[AnyRunner, Payload]", prepare_triton(cast("TritonCheckpoint", weights)))
        case RunnerName.ASCEND:
            return cast("PreparedWeights[AnyRunner, Payload]", prepare_ascend_as(acceptance.prepared, cast("AscendCheckpoint", weights)))
        case RunnerName.AITER:
            return cast("PreparedWeights[AnyRunner, Payload]", prepare_aiter_as(acceptance.prepared, cast("AiterExpertWeights", weights)))


def _implementation(conversion: AnyConversion, environment: Environment) -> AnyConversion:
    """Return the kernel of a conversion where the environment runs it."""
    if environment.device != "cuda" or "triton" not in environment.libraries:
        return conversion
    from ..formats.fused import fused

    return fused(conversion)


def build_experts(report: PlanReport, weights: ReferenceCheckpoint, activation: Activation) -> ExpertStage[Payload]:
    """Return the experts of a plan over this rank's weights in checkpoint layout, conversions included; ``dispatcher.then(experts)`` is the layer.

    Raises: ValueError when weights or activation are not those that the plan was made for.
    """
    problem = report.problem
    _demand(
        ("weights", problem.weights, weights.format.name),
        ("activation", problem.activation, activation.name),
        ("num_experts of this rank", problem.local_experts, weights.num_experts),
        ("hidden", problem.hidden, weights.hidden),
        ("inter", problem.inter, weights.inter),
    )
    route, _ = find_route(problem, report.environment)
    experts: ExpertStage[Payload] = Experts(_prepare(route.acceptance, weights), activation)
    for conversion in reversed(route.before_experts):
        experts = experts.accepting(cast("Conversion[Payload, Payload]", _implementation(conversion, report.environment)))
    return experts


def build_layer(
    report: PlanReport, rows: type[M], weights: ReferenceCheckpoint, activation: Activation
) -> MoELayer[M, Payload, StandardCombineInput]:
    """Return the layer of a plan without communication, over weights in checkpoint layout.

    ``rows``: the class of the rows that the layer will be called with. Raises: ValueError when rows, weights or activation are not those that
    the plan was made for, and for a plan with another backend, whose dispatcher needs a library's object that no plan holds.
    """
    problem = report.problem
    if problem.backend is not Backend.STANDARD:
        raise ValueError(f"the plan is for the backend {problem.backend.value}: make its dispatcher, and give it build_experts(...) with then()")
    _demand(("rows", problem.model, rows.format.name))
    experts = build_experts(report, weights, activation)
    route, _ = find_route(problem, report.environment)
    return StandardDispatcher(cast("Conversion[M, Payload]", _implementation(route.wire.sent, report.environment))).then(experts)


def _demand(*facts: tuple[str, object, object]) -> None:
    for what, planned, given in facts:
        if planned != given:
            raise ValueError(f"the plan is for {what} = {planned}, but {given} was given")

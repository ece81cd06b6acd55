"""Plans: for engines that are driven by configuration, which way a layer takes and why."""

from .build import build_layer
from .planner import PlanError, plan
from .problem import Environment, MoEProblem, RunnerRequest, Wire, probe_environment
from .report import Degradation, PlanReport, Rejected, RejectReason, Step, StepKind, from_json, to_json
from .tolerance import relative_error, tolerance

__all__ = [
    "Degradation",
    "Environment",
    "MoEProblem",
    "PlanError",
    "PlanReport",
    "RejectReason",
    "Rejected",
    "RunnerRequest",
    "Step",
    "StepKind",
    "Wire",
    "build_layer",
    "from_json",
    "plan",
    "probe_environment",
    "relative_error",
    "to_json",
    "tolerance",
]

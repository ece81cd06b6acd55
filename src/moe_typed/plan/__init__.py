"""Plans: for engines that are driven by configuration, which way a layer takes and why."""

from ..runners.aiter import AiterFacts, probe_aiter_source, probe_installed_aiter
from .aiter_wire import WireDecision, wire_for_aiter
from .build import build_layer
from .planner import PlanError, plan
from .problem import Environment, MoEProblem, RunnerRequest, Wire, probe_environment
from .report import Degradation, PlanReport, Rejected, RejectReason, Step, StepKind, from_json, to_json
from .tolerance import relative_error, tolerance

__all__ = [
    "AiterFacts",
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
    "WireDecision",
    "build_layer",
    "from_json",
    "plan",
    "probe_aiter_source",
    "probe_environment",
    "probe_installed_aiter",
    "relative_error",
    "to_json",
    "tolerance",
    "wire_for_aiter",
]

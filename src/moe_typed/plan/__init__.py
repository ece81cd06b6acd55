"""Plans: for engines that are driven by configuration, which way a layer takes and why."""

from ..runners.aiter import AiterFacts, probe_aiter_source, probe_installed_aiter
from .aiter_wire import WireDecision, wire_for_aiter
from .backends import Backend, Support, Wire, backends_of, supports
from .build import build_experts, build_layer
from .planner import PlanError, plan
from .problem import Environment, MoEProblem, RunnerRequest, probe_environment
from .report import Degradation, PlanReport, Rejected, RejectReason, Step, StepKind, from_json, to_json
from .tolerance import relative_error, tolerance

__all__ = [
    "AiterFacts",
    "Backend",
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
    "Support",
    "Wire",
    "WireDecision",
    "backends_of",
    "build_experts",
    "build_layer",
    "from_json",
    "plan",
    "probe_aiter_source",
    "probe_environment",
    "probe_installed_aiter",
    "relative_error",
    "supports",
    "to_json",
    "tolerance",
    "wire_for_aiter",
]

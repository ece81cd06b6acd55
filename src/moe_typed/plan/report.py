"""What a plan says: the row that was chosen, the ones that were not and why, each conversion with its bytes, each degradation."""

import enum
import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

import attrs
import cattrs
from cattrs.preconf.json import make_converter

from ..ops.product_plans.files import Source
from .problem import Environment, MoEProblem


@final
class RejectReason(enum.Enum):
    """Say why a runner was not chosen; ``explanation`` is the clause for people."""

    NOT_NEEDED = "not-needed"
    LIBRARY_MISSING = "library-missing"
    DEVICE = "device"
    CAPABILITY = "capability"
    WEIGHT_FORMAT = "weight-format"
    ACTIVATION = "activation"
    WIRE_FORMAT = "wire-format"
    DIVISIBILITY = "divisibility"
    BACKEND = "backend"

    @property
    def explanation(self) -> str:
        """Return the reason as a clause."""
        return _EXPLANATIONS[self]


_EXPLANATIONS: Final[Mapping[RejectReason, str]] = MappingProxyType(
    {
        RejectReason.NOT_NEEDED: "a runner before it in the order of preference was chosen",
        RejectReason.LIBRARY_MISSING: "a library that it needs is not installed",
        RejectReason.DEVICE: "it does not run on this device",
        RejectReason.CAPABILITY: "the device lacks an instruction that it needs",
        RejectReason.WEIGHT_FORMAT: "it does not take weights in this format",
        RejectReason.ACTIVATION: "it cannot do this activation",
        RejectReason.WIRE_FORMAT: "it takes no payload that the requested wire format can be converted to",
        RejectReason.DIVISIBILITY: "a width is none that the weights or rows can have",
        RejectReason.BACKEND: "it has no way from what this backend dispatches",
    }
)


@final
class StepKind(enum.Enum):
    """Say what a step of a plan does."""

    CONVERSION = "conversion"
    TRANSITION = "transition"
    RUN = "run"
    COMBINE = "combine"


@final
@attrs.frozen(kw_only=True)
class Step:
    """One step. ``bytes_moved``: read and written; set for conversions alone."""

    kind: StepKind
    name: str
    source: str
    target: str
    bytes_moved: int | None = None


@final
@attrs.frozen(kw_only=True)
class Rejected:
    """A runner that was not chosen."""

    runner: str
    reason: RejectReason
    detail: str


@final
@attrs.frozen(kw_only=True)
class Degradation:
    """Something that was done in a lesser way than the environment would suggest, and why."""

    subject: str
    preferred: str
    used: str
    detail: str


@final
@attrs.frozen(kw_only=True)
class PlanReport:
    """A plan. ``wire``: the payload format that is sent; ``accepts``: what the prepared weights take.

    ``product_plans``: where the Triton runner's choice of kernels and tiles comes from, measurements or a rule; None for the other runners.
    """

    problem: MoEProblem
    environment: Environment
    runner: str
    dispatcher: str
    prepared_weights: str
    wire: str
    accepts: tuple[str, ...]
    steps: tuple[Step, ...]
    rejected: tuple[Rejected, ...]
    degradations: tuple[Degradation, ...]
    product_plans: Source | None = None

    @property
    def bytes_moved(self) -> int:
        """Return the bytes that all conversions move."""
        return sum(step.bytes_moved or 0 for step in self.steps)


_converter = make_converter(forbid_extra_keys=True)


def to_json(report: PlanReport) -> str:
    """Return the report as JSON text."""
    return json.dumps(_converter.unstructure(report), indent=2)


def from_json(text: str) -> PlanReport:
    """Return the report that ``to_json`` wrote. Raises: ValueError that names each wrong place."""
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a plan report: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError("not a plan report: the JSON is not an object")
    try:
        return _converter.structure(parsed, PlanReport)
    except cattrs.BaseValidationError as error:
        raise ValueError("not a plan report: " + "; ".join(cattrs.transform_error(error))) from None

"""The bases of runners and of the weights that are prepared for them."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Generic, TypeVar, final, get_args, get_origin

from ..boundary import BoundaryError, Rename, boundary
from ..formats import ExpertWeights, GateUpOrder, Payload
from ..stages import FlatRowsInput, RunnerInput, RunnerOutput, SegmentRowsInput, SlabRowsInput
from .activations import Activation
from .errors import UnsupportedError as UnsupportedError
from .widths import ANY_WIDTHS, Widths

RI_contra = TypeVar("RI_contra", bound=RunnerInput, contravariant=True)
RO_co = TypeVar("RO_co", bound=RunnerOutput, covariant=True)
R_co = TypeVar("R_co", covariant=True)
P_contra = TypeVar("P_contra", bound=Payload, contravariant=True)


class Runner(ABC, Generic[RI_contra, RO_co]):
    """The base of all runners: prepared weights and an activation, ready to run.

    ``inputs`` lists the classes that ``run`` takes, the preferred one first.
    """

    name: ClassVar[str]
    inputs: ClassVar[tuple[type[RunnerInput], ...]]

    @abstractmethod
    def run(self, runner_input: RI_contra, /) -> RO_co:
        """Run both grouped GEMMs. An empty batch launches nothing and returns an empty result of the right dtype and width."""


@final
@boundary
class FlatRowsMeetWeights:
    """Where a runner brings flat rows and weights together: with debug on, both have one hidden width, one number of experts, one device."""

    weights: ExpertWeights[GateUpOrder]
    runner_input: FlatRowsInput


@final
@boundary
class ExpertRowsMeetWeights:
    """Where a runner brings rows that lie by expert and weights together: with debug on, as for flat rows."""

    weights: ExpertWeights[GateUpOrder]
    runner_input: Annotated[SlabRowsInput | SegmentRowsInput, Rename({"local_experts": "experts"})]


class PreparedWeights(ABC, Generic[R_co, P_contra]):
    """The base of weights in the layout that one runner reads, with the payload classes that it can then take (the accept-set).

    ``widths``: which widths the weights may have; preparation refuses others, and plans pass the class over.
    """

    widths: ClassVar[Widths] = ANY_WIDTHS

    @abstractmethod
    def runner(self, activation: Activation) -> R_co:
        """Return the runner over these weights. Raises: UnsupportedError for an activation that it cannot do."""

    @classmethod
    def accepts(cls) -> tuple[type[Payload], ...]:
        """Return the accept-set as the class declares it: the payload argument of its PreparedWeights base."""
        for base in getattr(cls, "__orig_bases__", ()):
            if get_origin(base) is PreparedWeights:
                payloads = get_args(base)[1]
                return (payloads,) if isinstance(payloads, type) else tuple(get_args(payloads))
        raise TypeError(f"{cls.__qualname__} does not derive from PreparedWeights[runner, payloads] directly")


def refuse_payload(payload: type[Payload], taker: str, accepts: tuple[type[Payload], ...]) -> BoundaryError:
    """Return the error for experts that are given a payload class outside their accept-set."""
    accepted = " | ".join(cls.__qualname__ for cls in accepts)
    return BoundaryError(
        f"payload is {payload.__qualname__} ({payload.format.name}), but {taker} takes {accepted}",
        boundary="Experts",
        field="payload",
        declared=accepted,
        got=payload.__qualname__,
        hint="put a named conversion before the experts: experts.accepting(conversion)",
    )

"""Experts: prepared weights and an activation, as one function from any dispatch output they accept to its combine input."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Never, TypeVar, cast, final

from typing_extensions import override

from .formats import AnyConversion, Conversion, Payload
from .runners.activations import Activation, SiluAndMul
from .runners.base import PreparedWeights, refuse_payload
from .stages import CombineInput, DispatchOutput
from .table import AnyRunner, connect

P = TypeVar("P", bound=Payload)
Q = TypeVar("Q", bound=Payload)
P_contra = TypeVar("P_contra", bound=Payload, contravariant=True)
C = TypeVar("C", bound=CombineInput)

_SILU = SiluAndMul()


class ExpertStage(ABC, Generic[P_contra]):
    """The base of the experts of one layer; ``P_contra`` is what may be dispatched to them."""

    @property
    @abstractmethod
    def accepts(self) -> tuple[type[Payload], ...]:
        """Return the payload classes that may be dispatched to these experts."""

    @property
    @abstractmethod
    def runner(self) -> AnyRunner:
        """Return the runner at the end of all conversions."""

    @property
    @abstractmethod
    def conversions(self) -> tuple[AnyConversion, ...]:
        """Return the named conversions before the runner, in order."""

    @abstractmethod
    def bind(self, variant: type[DispatchOutput[P_contra, C]]) -> Callable[[DispatchOutput[P_contra, C]], C]:
        """Return these experts for one dispatch variant, with nothing left to look up per call.

        Raises: UnsupportedError when the table has no way from ``variant`` to the runner.
        """

    @abstractmethod
    def refuse(self, payload: type[Payload]) -> TypeError:
        """Return the error for a payload class that these experts do not accept."""

    def accepting(self, conversion: Conversion[P, P_contra]) -> "ConvertedExperts[P]":
        """Return experts that take what ``conversion`` takes, and convert it first."""
        return ConvertedExperts(conversion, self)

    def __call__(self, dispatched: DispatchOutput[P_contra, C], /) -> C:
        """Run the experts on a dispatch output and return the combine input of its dispatcher. An error of the runner ends the dispatch.

        Raises: BoundaryError for a payload outside ``accepts``, and UnsupportedError as ``bind``, after which other experts may be tried.
        """
        if not isinstance(dispatched.payload, self.accepts):
            raise self.refuse(type(dispatched.payload))
        run = self.bind(type(dispatched))
        try:
            return run(dispatched)
        except Exception as error:
            dispatched.fail(error)
            raise


@final
class Experts(ExpertStage[P_contra]):
    """The experts of one layer over weights that are prepared for a runner.

    Raises: TypeError for weights that are not prepared; UnsupportedError for an activation that the runner cannot do.
    """

    def __init__(self, weights: PreparedWeights[AnyRunner, P_contra], activation: Activation = _SILU) -> None:
        if not isinstance(weights, PreparedWeights):  # pyright: ignore[reportUnnecessaryIsInstance]  not every caller runs a checker
            raise TypeError(
                f"experts are made of weights that are prepared for a runner, as prepare_reference does; got {type(weights).__qualname__}"
            )
        self.weights = weights
        self._runner = weights.runner(activation)
        self._accepts = weights.accepts()

    @property
    @override
    def accepts(self) -> tuple[type[Payload], ...]:
        return self._accepts

    @property
    @override
    def runner(self) -> AnyRunner:
        return self._runner

    @property
    @override
    def conversions(self) -> tuple[AnyConversion, ...]:
        return ()

    @override
    def bind(self, variant: type[DispatchOutput[P_contra, C]]) -> Callable[[DispatchOutput[P_contra, C]], C]:
        return connect(variant, self._runner)

    @override
    def refuse(self, payload: type[Payload]) -> TypeError:
        return refuse_payload(payload, type(self.weights).__qualname__, self._accepts)


@final
class ConvertedExperts(ExpertStage[P_contra]):
    """Experts behind a named conversion. Raises: BoundaryError when the experts do not accept what it makes."""

    def __init__(self, conversion: Conversion[P_contra, Q], experts: ExpertStage[Q]) -> None:
        if conversion.target not in experts.accepts:
            raise experts.refuse(conversion.target)
        self.conversion = conversion
        self.experts: ExpertStage[Never] = experts

    @property
    @override
    def accepts(self) -> tuple[type[Payload], ...]:
        return self.conversion.source

    @property
    @override
    def runner(self) -> AnyRunner:
        return self.experts.runner

    @property
    @override
    def conversions(self) -> tuple[AnyConversion, ...]:
        return (self.conversion, *self.experts.conversions)

    @override
    def bind(self, variant: type[DispatchOutput[P_contra, C]]) -> Callable[[DispatchOutput[P_contra, C]], C]:
        # The payload between the conversion and the experts was checked by the constructor and is forgotten since; the variant's class is one
        # and the same for every payload.
        inner = cast("ExpertStage[Payload]", self.experts).bind(cast("type[DispatchOutput[Payload, C]]", variant))
        convert = self.conversion.run

        def convert_first(dispatched: DispatchOutput[P_contra, C]) -> C:
            return inner(dispatched.with_payload(convert(dispatched.payload, dispatched.live_rows)))

        return convert_first

    @override
    def refuse(self, payload: type[Payload]) -> TypeError:
        return refuse_payload(payload, f"the conversion {self.conversion.name!r}", self.accepts)

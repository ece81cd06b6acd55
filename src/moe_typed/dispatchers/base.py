"""The base of dispatchers, and the whole layer that a dispatcher and experts make."""

from abc import ABC, abstractmethod
from typing import Generic, final

from torch import Tensor
from typing_extensions import TypeVar

from ..experts import ExpertStage
from ..formats import Payload
from ..routing import Ids, LogicalIds, Routing
from ..stages import CombineInput, DispatchOutput

M_contra = TypeVar("M_contra", bound=Payload, contravariant=True)
P_co = TypeVar("P_co", bound=Payload, covariant=True)
C = TypeVar("C", bound=CombineInput)
I_contra = TypeVar("I_contra", bound=Ids, contravariant=True, default=LogicalIds)
R_co = TypeVar("R_co", covariant=True, default=Tensor)


class Dispatcher(ABC, Generic[M_contra, P_co, C, I_contra, R_co]):
    """The base of all dispatchers: rows ``M`` of the model go out as payload ``P`` and come home through ``C``; routes are in the id space ``I``.

    ``R``: what combine returns, the routed output unless the type says otherwise.

    A dispatcher keeps nothing between dispatch and combine: what combine needs is in the combine input.
    """

    @property
    @abstractmethod
    def variant(self) -> type[DispatchOutput[P_co, C]]:
        """Return the class that ``dispatch`` returns."""

    @property
    @abstractmethod
    def payload(self) -> type[P_co]:
        """Return the payload class that goes over the wire."""

    @abstractmethod
    def dispatch(self, rows: M_contra, routing: Routing[I_contra]) -> DispatchOutput[P_co, C]:
        """Send each row to the experts that its routes name."""

    @abstractmethod
    def combine(self, combine_input: C) -> R_co:
        """Return the routed output (rows, hidden) in the model's dtype: weighted, summed, scaled."""

    def then(self, experts: ExpertStage[P_co]) -> "MoELayer[M_contra, P_co, C, I_contra, R_co]":
        """Return the layer of this dispatcher and these experts.

        Raises: BoundaryError when the experts do not accept the wire's payload; UnsupportedError when the table has no row.
        """
        if self.payload not in experts.accepts:
            raise experts.refuse(self.payload)
        return MoELayer(self, experts)


@final
class MoELayer(Generic[M_contra, P_co, C, I_contra, R_co]):
    """One MoE layer from routing to combined output; the way through the table is resolved when it is built."""

    def __init__(self, dispatcher: Dispatcher[M_contra, P_co, C, I_contra, R_co], experts: ExpertStage[P_co]) -> None:
        self.dispatcher = dispatcher
        self.experts = experts
        self._experts = experts.bind(dispatcher.variant)

    def __call__(self, rows: M_contra, routing: Routing[I_contra]) -> R_co:
        """Return the routed output (rows, hidden). An error of the experts ends the dispatch: its handle says so to whoever uses it later."""
        dispatched = self.dispatcher.dispatch(rows, routing)
        try:
            combine_input = self._experts(dispatched)
        except Exception as error:
            dispatched.fail(error)
            raise
        return self.dispatcher.combine(combine_input)

"""Where the routed scaling factor is: in the weights already, or still to be applied. Exactly one stage applies it."""

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor
from typing_extensions import override

from ..boundary import boundary, value_error


class RoutedScaling(ABC):
    """The base of the two states."""

    @property
    @abstractmethod
    def folded(self) -> float:
        """Return the factor that the router multiplies into the weights of its routes."""

    @property
    @abstractmethod
    def shared_weight(self) -> float:
        """Return the weight with which a shared expert, as one more route, counts once after everything that is still to come."""

    @abstractmethod
    def settle(self, combined: Tensor) -> Tensor:
        """Return the combined routed output with the factor applied, if it was still to be applied."""


@final
@boundary
class Settled(RoutedScaling):
    """Nothing is left to apply: ``factor`` is folded into ``topk_weights``; 1 where the model has none."""

    factor: float = 1.0

    @property
    @override
    def folded(self) -> float:
        return self.factor

    @property
    @override
    def shared_weight(self) -> float:
        return 1.0

    @override
    def settle(self, combined: Tensor) -> Tensor:
        return combined


@final
@boundary
class Pending(RoutedScaling):
    """Combine multiplies its result by ``factor``, which is not zero."""

    factor: float

    @property
    @override
    def folded(self) -> float:
        return 1.0

    @property
    @override
    def shared_weight(self) -> float:
        return 1.0 / self.factor

    @override
    def settle(self, combined: Tensor) -> Tensor:
        return combined * self.factor

    def check_values(self) -> None:
        """Raise BoundaryError for a factor of zero, after which no shared expert could count."""
        if self.factor == 0.0:
            raise value_error(self, "factor", "is 0", "a model without a routed scaling factor is Settled()")

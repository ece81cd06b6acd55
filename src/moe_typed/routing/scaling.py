"""Where the routed scaling factor is: in the weights already, or still to be applied. Exactly one stage applies it."""

from abc import ABC, abstractmethod
from typing import final

from torch import Tensor
from typing_extensions import override

from ..boundary import boundary


class RoutedScaling(ABC):
    """The base of the two states."""

    @abstractmethod
    def settle(self, combined: Tensor) -> Tensor:
        """Return the combined routed output with the factor applied, if it was still to be applied."""


@final
@boundary
class Settled(RoutedScaling):
    """Nothing is left to apply: the model has no factor, or it is folded into ``topk_weights``."""

    @override
    def settle(self, combined: Tensor) -> Tensor:
        return combined


@final
@boundary
class Pending(RoutedScaling):
    """Combine multiplies its result by ``factor``."""

    factor: float

    @override
    def settle(self, combined: Tensor) -> Tensor:
        return combined * self.factor

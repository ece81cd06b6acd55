"""The bases of all stage values, and the conventions that their classes fix.

``P`` is the payload class of a dispatch output. ``C`` is the combine-input class that its dispatcher's combine accepts, so that experts need no
overload to return the right one: ``DispatchOutput[P, C] -> C``.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Generic, TypeVar

from torch import Tensor

from ..formats import Payload


class CombineInput(ABC):
    """The base of what a dispatcher's combine takes: expert results, and what combine needs to bring them home."""


class RunnerInput(ABC):
    """The base of what a runner takes."""


class RunnerOutput(ABC):
    """The base of what a runner returns."""


class Carry(ABC):
    """The base of what ``pre`` hands to ``post`` past the runner: one class a row of the table, used once."""


P_co = TypeVar("P_co", bound=Payload, covariant=True)
Q = TypeVar("Q", bound=Payload)
C_co = TypeVar("C_co", bound=CombineInput, covariant=True)


class DispatchOutput(ABC, Generic[P_co, C_co]):
    """The base of what a dispatcher's dispatch returns. ``combine_input`` is the class ``C`` at run time."""

    combine_input: ClassVar[type[CombineInput]]
    payload: P_co

    @property
    @abstractmethod
    def live_rows(self) -> Tensor | None:
        """Return how many leading rows are real as int32 (1,) on the device, for conversions that leave the others alone; None for all."""

    @abstractmethod
    def with_payload(self, payload: Q) -> "DispatchOutput[Q, C_co]":
        """Return the same dispatch with other rows in it: the result of a conversion."""

    def fail(self, error: BaseException) -> None:
        """End the handle that combine would need, because of an error on the way there; nothing where there is none."""

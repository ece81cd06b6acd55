"""The spaces that expert ids live in. An id is a number; which expert it means depends on its space, so the space is a class.

Subclasses are never instantiated: ``Routing[LocalIds]`` holds the class itself in its field ``space``, where no annotation can relabel it.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, TypeAlias, final

from typing_extensions import override


class Ids(ABC):
    """The base of all id spaces over ``num_experts`` slots."""

    title: ClassVar[str]

    @staticmethod
    @abstractmethod
    def sentinel(num_experts: int) -> int | None:
        """Return the id that marks a route to no expert of this space; None where every route must go somewhere."""

    @classmethod
    def bounds(cls, num_experts: int) -> tuple[int, int]:
        """Return the lowest and the highest id that may occur, the sentinel included."""
        sentinel = cls.sentinel(num_experts)
        marks = () if sentinel is None else (sentinel,)
        return min(0, *marks, num_experts), max(num_experts - 1, *marks, -1)


@final
class LogicalIds(Ids):
    """Experts as the model numbers them, 0 to E - 1; -1 marks a row that is padding."""

    title = "logical"

    @staticmethod
    @override
    def sentinel(num_experts: int) -> int | None:
        return -1


@final
class PhysicalIds(Ids):
    """Expert slots over all ranks, redundant copies and shared slots included; every route goes somewhere."""

    title = "physical"

    @staticmethod
    @override
    def sentinel(num_experts: int) -> int | None:
        return None


@final
class PaddedPhysicalIds(Ids):
    """Physical slots; -1 marks a row that is padding."""

    title = "physical, padded"

    @staticmethod
    @override
    def sentinel(num_experts: int) -> int | None:
        return -1


SlotIds: TypeAlias = PhysicalIds | PaddedPhysicalIds
"""Physical slots, for dispatchers whose library skips a -1."""


@final
class LocalIds(Ids):
    """Expert slots of this rank, 0 to L - 1; -1 marks a route to another rank, or a row that is padding."""

    title = "local"

    @staticmethod
    @override
    def sentinel(num_experts: int) -> int | None:
        return -1


@final
class LocalSinkIds(Ids):
    """Expert slots of this rank, 0 to L - 1; the sink slot L takes the routes to other ranks (AITER's convention)."""

    title = "local with sink"

    @staticmethod
    @override
    def sentinel(num_experts: int) -> int | None:
        return num_experts

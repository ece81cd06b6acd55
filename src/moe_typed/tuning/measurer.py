"""What tuning asks of a device: an interface, so that a search can be tested without one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import final

import attrs

from ..ops.product_plans.spec import Plan
from .space import Cell, Limits


@final
class PlanFailed(Exception):  # noqa: N818  it is not an error of the program
    """Say that a plan does not compile, does not launch, or comes out wrong on this device."""


@final
class DeviceLostError(RuntimeError):
    """Say that the device does nothing any more for this process after a plan was run. ``plan``: which."""

    def __init__(self, plan: Plan, reason: str) -> None:
        self.plan = plan
        super().__init__(f"the device is lost to this process after the plan {plan.how.value} {list(plan.up)} {list(plan.down)}: {reason}")


@final
@attrs.frozen
class Machine:
    """What is measured on. ``kernels``: a digest of the kernels' source."""

    device: str
    limits: Limits
    torch: str
    triton: str
    moe_typed: str
    kernels: str


class CellMeasurer(ABC):
    """Measures plans of one cell."""

    @abstractmethod
    def compile(self, plans: Sequence[Plan]) -> Iterator[int]:
        """Compile plans beforehand, as many at a time as the machine can, and yield how many are done. A plan that fails says so when it is timed."""

    @abstractmethod
    def time(self, plan: Plan, replays: int) -> float:
        """Return the median time of a plan in microseconds, with a cold L2. Raises: PlanFailed, DeviceLostError."""


class Measurer(ABC):
    """Measures plans on a device."""

    @property
    @abstractmethod
    def machine(self) -> Machine:
        """Return what is measured on."""

    @abstractmethod
    def open(self, cell: Cell) -> AbstractContextManager[CellMeasurer]:
        """Return the measurer of a cell, whose inputs are made on entry and dropped on exit."""

"""What tuning tells while it goes on."""

from typing import TypeAlias, final

import attrs

from ..ops.product_plans.files import TunedPlan
from ..ops.product_plans.spec import Plan
from .space import Cell


@final
@attrs.frozen
class Skipped:
    """A cell was measured before, with the same candidates, kernels and versions."""

    cell: Cell
    known: TunedPlan


@final
@attrs.frozen
class Started:
    """A cell is begun. ``tried``: how many of its plans are known from a run that was interrupted."""

    cell: Cell
    plans: int
    known: int


@final
@attrs.frozen
class Compiled:
    """So many of the plans to compile beforehand are compiled."""

    cell: Cell
    done: int
    total: int


@final
@attrs.frozen
class Tried:
    """A plan was measured, in microseconds, or failed. ``best``: the fastest so far, None before the first."""

    cell: Cell
    plan: Plan
    us: float | None
    failure: str
    best: float | None


@final
@attrs.frozen
class Tuned:
    """A cell is done and on disk. ``failed``: plans that do not compile, launch, or come out right.

    ``before``: the plan that was used so far, and its time measured side by side with the winner's; None where it does not run.
    """

    cell: Cell
    won: TunedPlan
    before: Plan
    before_us: float | None
    tried: int
    failed: int


Progress: TypeAlias = Skipped | Started | Compiled | Tried | Tuned

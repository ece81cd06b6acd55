"""Tune the Triton runner's plans for layers of one's own: what to try, how it is measured, and the file that comes of it. ``moe-typed tune``."""

from .measurer import CellMeasurer, DeviceLostError, Machine, Measurer, PlanFailed
from .progress import Compiled, Progress, Skipped, Started, Tried, Tuned
from .search import tune
from .space import Cell, Family, Limits, families
from .store import Store

__all__ = [
    "Cell",
    "CellMeasurer",
    "Compiled",
    "DeviceLostError",
    "Family",
    "Limits",
    "Machine",
    "Measurer",
    "PlanFailed",
    "Progress",
    "Skipped",
    "Started",
    "Store",
    "Tried",
    "Tuned",
    "families",
    "tune",
]

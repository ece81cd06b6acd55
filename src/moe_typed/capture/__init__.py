"""Look at what crosses the boundaries of a layer."""

from .trace import Crossing, StageTime, Trace, timed, trace

__all__ = ["Crossing", "StageTime", "Trace", "timed", "trace"]

"""The debug switch: how much of a boundary is checked when it is built.

The level is one integer in the module that holds every generated ``__init__`` (``runtime``), so that one assignment reaches all classes, all
threads, and code that ``torch.compile`` has compiled (dynamo guards on it and compiles again).
"""

import enum
import logging
import os
from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, TypeAlias

from . import runtime
from .errors import BoundaryDefinitionError

_log = logging.getLogger("moe_typed.boundary")

ENVIRONMENT_VARIABLE = "MOE_TYPED_DEBUG"


class DebugLevel(enum.IntEnum):
    """Name what a boundary checks when it is built; each level does what the one before does.

    * ``OFF``: nothing.
    * ``LAYOUT``: metadata alone: dtype, shape, dims across fields and nested boundaries, divisibility, strides, alignment, device. No tensor is read.
    * ``VALUES``: the data too: ids in range, finite scales, counts. Reads devices, hence not inside ``torch.compile`` or graph capture.
    * ``STRICT``: jaxtyping and beartype on the same annotations and on the transition functions: the oracle that the tests run under.
    """

    OFF = 0
    LAYOUT = 1
    VALUES = 2
    STRICT = 3


LevelName: TypeAlias = Literal["off", "layout", "values", "strict"]


class _Switch:
    """Hold the base level and the ``debug`` blocks that are open, newest last."""

    def __init__(self) -> None:
        self.base = DebugLevel.OFF
        self.open: list[tuple[object, DebugLevel]] = []

    def apply(self) -> None:
        level = self.open[-1][1] if self.open else self.base
        if level >= DebugLevel.VALUES > runtime.current_level():
            _log.info("debug %s: inside torch.compile and CUDA graph capture only layout is checked", level.name.lower())
        runtime.set_level(int(level))

    def close(self, token: object) -> None:
        self.open = [entry for entry in self.open if entry[0] is not token]
        self.apply()


_switch = _Switch()


def _parse(level: DebugLevel | str) -> DebugLevel:
    if isinstance(level, DebugLevel):
        return level
    for member in DebugLevel:
        if level == member.name.lower():
            return member
    names = ", ".join(member.name.lower() for member in DebugLevel)
    raise ValueError(f"debug level must be one of {names}; got {level!r}")


def debug_level() -> DebugLevel:
    """Return the level in force."""
    return DebugLevel(runtime.current_level())


def set_debug_level(level: DebugLevel | LevelName) -> None:
    """Set the level that holds outside every ``debug`` block, for the whole process.

    Raises: ValueError for an unknown name; BoundaryDefinitionError, and nothing is changed, for a class that cannot be checked.
    """
    parsed = _parse(level)
    with runtime.lock:
        before, _switch.base = _switch.base, parsed
        try:
            _switch.apply()
        except BoundaryDefinitionError:
            _switch.base = before
            raise


@contextmanager
def debug(level: DebugLevel | LevelName = DebugLevel.LAYOUT) -> Generator[DebugLevel]:
    """Hold a debug level for the whole process, all threads included, while the block runs.

    Blocks nest, and may be open in several threads at once: the one entered last holds. Raises: as ``set_debug_level``.
    """
    parsed = _parse(level)
    token = object()
    try:
        with runtime.lock:
            _switch.open.append((token, parsed))
            _switch.apply()
        yield parsed
    finally:
        with runtime.lock:
            _switch.close(token)


def _from_environment() -> None:
    name = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if not name:
        return
    try:
        set_debug_level(_parse(name.lower()))
    except ValueError as error:
        raise ValueError(f"{ENVIRONMENT_VARIABLE}: {error}") from None


_from_environment()

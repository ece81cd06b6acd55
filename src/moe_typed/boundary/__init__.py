"""Immutable, checked classes for the values that cross between stages. This room knows nothing of MoE."""

from typing import TYPE_CHECKING

from .annotations import E8M0, Dim, Float4e2m1x2, Floating, Layout, Rename
from .debug import DebugLevel, debug, debug_level, set_debug_level
from .describe import describe
from .errors import BoundaryDefinitionError, BoundaryError
from .runtime import boundaries, fields_of, is_boundary, is_strict, judged, value_error

if TYPE_CHECKING:
    from ._static import boundary as boundary
else:
    from .runtime import boundary

__all__ = [
    "E8M0",
    "BoundaryDefinitionError",
    "BoundaryError",
    "DebugLevel",
    "Dim",
    "Float4e2m1x2",
    "Floating",
    "Layout",
    "Rename",
    "boundaries",
    "boundary",
    "debug",
    "debug_level",
    "describe",
    "fields_of",
    "is_boundary",
    "is_strict",
    "judged",
    "set_debug_level",
    "value_error",
]

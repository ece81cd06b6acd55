"""Scalar scales by which one multiplies, and scalar scales by which one divides. They have one shape and are reciprocals: two classes."""

from typing import final

from jaxtyping import Float32
from torch import Tensor

from ..boundary import boundary


@final
@boundary
class ScaleFactor:
    """value = data * factor. ``factor``: float32 (1,)."""

    factor: Float32[Tensor, "1"]

    def inverted(self) -> "InverseScaleFactor":
        """Return the same scale as one divides by it."""
        return InverseScaleFactor(self.factor.reciprocal())


@final
@boundary
class InverseScaleFactor:
    """value = data / divisor, as engines keep the global scale of an nvfp4 input (448 * 6 / amax). ``divisor``: float32 (1,)."""

    divisor: Float32[Tensor, "1"]

    def inverted(self) -> ScaleFactor:
        """Return the same scale as one multiplies by it."""
        return ScaleFactor(self.divisor.reciprocal())

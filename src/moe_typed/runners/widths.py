"""Which widths weights may have where a runner reads them: data on the class of prepared weights, for their preparation and for plans."""

from typing import Final, final

import attrs

from ..formats import ExpertWeights, GateUpOrder
from .errors import UnsupportedError


@final
@attrs.frozen
class Widths:
    """Of what hidden and inter must be multiples, how large they may be (None for any size), and why: a clause after "is not a multiple of N"."""

    hidden: int = 1
    inter: int = 1
    most: int | None = None
    why: str = ""

    def fault(self, *, hidden: int, inter: int) -> str | None:
        """Return which width these weights cannot have, and why; None where they can have both."""
        for name, size, unit in (("hidden", hidden, self.hidden), ("inter", inter, self.inter)):
            if size % unit:
                return f"{name} = {size} is not a multiple of {unit}, {self.why}; pad with zeros"
            if self.most is not None and size > self.most:
                return f"{name} = {size} is more than {self.most}, the most that these products take"
        return None

    def require(self, weights: ExpertWeights[GateUpOrder]) -> None:
        """Raise UnsupportedError for weights of a width that ``fault`` names."""
        fault = self.fault(hidden=weights.hidden, inter=weights.inter)
        if fault is not None:
            raise UnsupportedError(f"{weights.format.name} weights: {fault}")


ANY_WIDTHS: Final = Widths()

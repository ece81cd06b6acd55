"""One emulated AITER: its version, architecture, environment, and what its tuned rows choose."""

from collections.abc import Mapping
from enum import Enum
from typing import Literal, TypeAlias, final

import attrs
import torch
from torch import Tensor

from .dtypes import Dtypes, Gfx, dtypes_of
from .misuse import Judge
from .permutations import Layout

VersionName: TypeAlias = Literal["0.1.7", "head", "later", "no_combine"]


class Version(Enum):
    """The versions whose parameter lists differ."""

    WHEEL = "0.1.7"
    HEAD = "head"
    LATER = "later"
    NO_COMBINE = "no_combine"

    @property
    def is_wheel(self) -> bool:
        return self is Version.WHEEL


@final
@attrs.frozen(kw_only=True)
class Tuned:
    """What tuned rows choose, and a caller can neither see nor ask for."""

    self_quantizing: bool = False  # the kernel of stage 1 quantises itself: metadata.prequant is false
    split_k: bool = False
    flat: bool = False  # the kernels that bypass the sort


@final
@attrs.frozen
class Decision:
    """What one call chose, for tests to look at."""

    activation: torch.dtype  # the precision of stage 1
    branch: int  # the row of the contract's table of activation preparations
    w1_layout: Layout


@final
@attrs.frozen
class Library:
    """The state that the functions of one emulated AITER share. The lists grow; nothing of it is read by numerics."""

    version: Version
    gfx: Gfx
    judge: Judge
    env: Mapping[str, str]
    tuned: Tuned
    decisions: list[Decision] = attrs.field(factory=list[Decision])
    _shuffled: dict[int, tuple[Tensor, Layout]] = attrs.field(factory=dict[int, tuple[Tensor, Layout]])

    @property
    def dtypes(self) -> Dtypes:
        return dtypes_of(self.gfx, wheel=self.version.is_wheel)

    def flag(self, name: str) -> bool:
        """Say whether an environment variable is 1."""
        return self.env.get(name, "0") == "1"

    def number(self, name: str, default: int) -> int:
        """Return an environment variable that is a number."""
        return int(self.env.get(name, default))

    def remember(self, shuffled: Tensor, layout: Layout) -> None:
        """Note how this memory was shuffled. The tensor is kept, so that no other one gets its address."""
        self._shuffled[shuffled.untyped_storage().data_ptr()] = (shuffled, layout)

    def remembered(self, tensor: Tensor) -> Layout | None:
        """Return how this memory was shuffled; None where it was not by this library, or was copied since. For strict mode alone."""
        known = self._shuffled.get(tensor.untyped_storage().data_ptr())
        return None if known is None else known[1]

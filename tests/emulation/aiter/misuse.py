"""What the real library answers with wrong numbers or undefined memory, and the judge that decides what the emulation does about it."""

from enum import Enum
from typing import final

import attrs
from typing_extensions import override


class Reason(Enum):
    """A row of the contract whose consequence is not an exception. Together with an operand it names the row."""

    DTYPE = "its bytes are read as another dtype"
    SHAPE = "its memory is read in another shape"
    STRIDES = "its memory is read as if it was contiguous"
    MISSING = "a kernel reads from no address"
    NO_ROWS = "a call without rows is undefined"
    RANGE = "more rows than there are"
    NEGATIVE_ID = "an id below zero: memory before the first expert"
    ID_RANGE = "an id past the last expert"
    LOCAL_ID = "a local id past the weights of this rank"
    DUPLICATE_EXPERT = "an expert twice in a row: the weight of the last slot wins"
    SORT_LIMIT = "rows have 24 bits and slots 8 in a sorted id"
    MASK_VALUE = "a mask that is not 0 or 1 shifts every later local id"
    MASK_SUM = "the mask counts other experts than the weights have"
    UNSHUFFLED = "no is_shuffled: other kernels are chosen, which read another layout"
    WRONG_SHUFFLE = "shuffled for another kernel than the one that is chosen"
    SCALE_DISCARDED = "the scale is not read"
    CAST_WITHOUT_SCALE = "fp8 rows are cast as if their scale was 1"
    HIDDEN_DTYPE = "no kernel is made for these rows"
    BIAS_IGNORED = "the kernel has no bias"
    LIMIT_IGNORED = "the kernel gets no swiglu_limit"
    PAD_NOT_ZERO = "columns that are not zero are skipped"
    UNWRITTEN = "one scale is found among rows that no stage wrote"
    CONSTANTS_UNSET = "beta and linear_beta have other defaults in every kernel"
    FLAT_IGNORES = "the flat kernels do not look at it"


@final
class EmulatedMisuse(Exception):  # noqa: N818 - a misuse of the library, not an error that it raises
    """What strict mode raises where the real library raises nothing. It derives from no exception that the real library raises."""

    def __init__(self, reason: Reason, operand: str, detail: str) -> None:
        super().__init__(f"{operand}: {reason.value}. {detail}")
        self.reason = reason
        self.operand = operand


@final
class EmulationGap(Exception):  # noqa: N818 - neither side is wrong
    """The real library has this path, and the emulation has not."""


@final
class Undefined(Exception):  # noqa: N818 - never seen from outside
    """The whole result is undefined; ``fused_moe`` answers with poison."""


class Mode(Enum):
    """strict: raise for every misuse. faithful: compute what the real library computes from it, and poison what is undefined."""

    STRICT = "strict"
    FAITHFUL = "faithful"


@final
@attrs.frozen
class Judge:
    """What becomes of a misuse."""

    mode: Mode

    def silent(self, reason: Reason, operand: str, detail: str = "") -> None:
        """The real library goes on with wrong numbers: raise in strict mode, and return in faithful mode."""
        if self.mode is Mode.STRICT:
            raise EmulatedMisuse(reason, operand, detail)

    def undefined(self, reason: Reason, operand: str, detail: str = "") -> Undefined:
        """The real library reads or writes where it must not: raise in strict mode; in faithful mode return what is to be raised."""
        self.silent(reason, operand, detail)
        return Undefined(f"{operand}: {reason.value}")

    @override
    def __str__(self) -> str:
        return self.mode.value

"""What the device takes without a word, and what it refuses."""

from enum import Enum
from typing import final

import attrs

from tests.emulation.hazards import Mode


@final
class Device(Enum):
    """Name a series. A2 and A3 are Atlas 910B and 910C, A5 is Ascend 950, the last is Atlas inference."""

    A2 = "A2"
    A3 = "A3"
    A5 = "A5"
    P310 = "310P"


@final
class Reason(Enum):
    """Name a mistake whose consequence is a wrong number and no exception."""

    INDEX_ORDER = "a row index is read in the other order"
    INDEX_RANGE = "a row index out of range"
    GROUP_LIST_KIND = "cumulative counts are read as counts, or the reverse"
    GROUP_LIST_DEVICE = "this device gives cumulative counts whatever is asked"
    GROUP_LIST_FALLS = "cumulative counts fall"
    GROUP_TOTAL = "the groups have more rows than there are"
    GROUP_LIST_END = "the kernel reads one element after the list"
    COUNTS_ALWAYS = "this product reads counts, whatever type is said"
    BIAS_MISSING = "int8 by int4 without 8 sum(W scale) is off by eight in each element"
    SCALE_CARRIER = "an int64 scale in the other encoding"
    SCALE_SHAPE = "a scale of another scheme's shape broadcasts"
    STATIC_WITHOUT_SCALE = "static quantisation without a scale, which is the default"
    EXPERT_ID = "an expert id out of range"
    DUPLICATE_EXPERT = "a row names an expert twice"
    ACTIVE_NUM = "fewer active rows than there are routes"
    OTHER_DISPATCH = "not what the matching dispatch gave, or not its arguments"
    SHORT_ROWS = "fewer rows than were received"
    MASK_ORDER = "an active row after an inactive one"
    WEIGHTS_IGNORED = "weights and biases of a combine that reads its handle's"
    PAYLOAD_BY_ENVIRONMENT = "an environment variable chooses the payload"


@final
class EmulatedMisuse(Exception):  # noqa: N818 - the misuse is the caller's, the error is what would follow
    """Tell, in strict mode, what the device takes without a word."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


@final
class EmulatedRefusal(RuntimeError):  # noqa: N818 - torch's own class is what the operators raise
    """Tell, in both modes, what the operator's documents rule out and its checks refuse."""


@final
@attrs.frozen
class Judge:
    """Decide what a misuse leads to. ``limits``: documented limits of sizes and devices count too."""

    mode: Mode = "strict"
    device: Device = Device.A3
    limits: bool = False

    def silent(self, reason: Reason, detail: str) -> None:
        """Raise EmulatedMisuse in strict mode; the caller goes on to compute what the device does."""
        if self.mode == "strict":
            raise EmulatedMisuse(reason, detail)

    def limit(self, condition: bool, what: str) -> None:
        """Refuse a size or a device where limits count."""
        require(condition or not self.limits, what)

    def limit_mx(self) -> None:
        """Refuse formats with e8m0 scales on a device that has none, where limits count."""
        self.limit(self.device is Device.A5, f"MX formats are of A5, not {self.device.value}")


def require(condition: bool, what: str) -> None:
    """Raise EmulatedRefusal unless a documented condition holds."""
    if not condition:
        raise EmulatedRefusal(what)

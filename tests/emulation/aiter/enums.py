"""AITER's enumerations as pybind11 makes them: no ``enum.Enum``, but values with ``.name`` and ``.value``, equal to nothing of another type."""

from enum import Enum
from typing import ClassVar, Self, TypeVar, final

from typing_extensions import override


class PybindEnum:
    """The base of what ``py::enum_`` makes: hashed as its number, and equal to members of its own type alone."""

    __members__: ClassVar[dict[str, "PybindEnum"]]
    _names: ClassVar[dict[int, str]]

    def __init__(self, value: int) -> None:
        if value not in self._names:
            raise ValueError(f"{value} is no {type(self).__name__}")
        self._value = value

    @property
    def value(self) -> int:
        return self._value

    @property
    def name(self) -> str:
        return self._names[self._value]

    def __int__(self) -> int:
        return self._value

    def __index__(self) -> int:
        return self._value

    @override
    def __hash__(self) -> int:
        return self._value

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and other._value == self._value

    @override
    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"


@final
class ActivationType(PybindEnum):
    _names: ClassVar[dict[int, str]] = {-1: "No", 0: "Silu", 1: "Gelu", 2: "Swiglu", 3: "Situv2"}
    No: ClassVar[Self]
    Silu: ClassVar[Self]
    Gelu: ClassVar[Self]
    Swiglu: ClassVar[Self]
    Situv2: ClassVar[Self]


@final
class QuantType(PybindEnum):
    _names: ClassVar[dict[int, str]] = {
        0: "No",
        1: "per_Tensor",
        2: "per_Token",
        3: "per_1x32",
        4: "per_1x128",
        5: "per_128x128",
        6: "per_256x128",
        7: "per_1024x128",
    }
    No: ClassVar[Self]
    per_Tensor: ClassVar[Self]  # noqa: N815 - upstream's name
    per_Token: ClassVar[Self]  # noqa: N815 - upstream's name
    per_1x32: ClassVar[Self]
    per_1x128: ClassVar[Self]
    per_128x128: ClassVar[Self]
    per_256x128: ClassVar[Self]
    per_1024x128: ClassVar[Self]


EnumT = TypeVar("EnumT", bound=PybindEnum)


def _fill(cls: type[EnumT], values: range) -> None:
    cls.__members__ = {cls(value).name: cls(value) for value in values}
    for name, member in cls.__members__.items():
        setattr(cls, name, member)


_fill(ActivationType, range(-1, 4))
_fill(QuantType, range(8))


class GateMode(str, Enum):  # noqa: UP042 - as upstream has it
    """How gate and up rows stand in w1; a str Enum, and not in the wheel."""

    SEPARATED = "separated"
    MOCK_GATE_ONLY = "mock_gate_only"
    GATE_ONLY = "gate_only"
    INTERLEAVE = "interleave"


class MxRounding(Enum):
    """The rule for the power of two of a block."""

    RoundDown = 0
    RoundUp = 1
    Even = 2
    Ceil = 3

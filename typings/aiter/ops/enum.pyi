from collections.abc import Mapping
from typing import ClassVar, Literal

from _pybind import PybindEnum
from typing_extensions import TypeVar

_V_co = TypeVar("_V_co", bound=int, default=int, covariant=True)

class ActivationType(PybindEnum[_V_co]):
    No: ClassVar[ActivationType[Literal[-1]]]
    Silu: ClassVar[ActivationType[Literal[0]]]
    Gelu: ClassVar[ActivationType[Literal[1]]]
    Swiglu: ClassVar[ActivationType[Literal[2]]]
    Situv2: ClassVar[ActivationType[Literal[3]]]
    __members__: ClassVar[Mapping[str, ActivationType]]

class QuantType(PybindEnum[_V_co]):
    No: ClassVar[QuantType[Literal[0]]]
    per_Tensor: ClassVar[QuantType[Literal[1]]]
    per_Token: ClassVar[QuantType[Literal[2]]]
    per_1x32: ClassVar[QuantType[Literal[3]]]
    per_1x128: ClassVar[QuantType[Literal[4]]]
    per_128x128: ClassVar[QuantType[Literal[5]]]
    per_256x128: ClassVar[QuantType[Literal[6]]]
    per_1024x128: ClassVar[QuantType[Literal[7]]]
    __members__: ClassVar[Mapping[str, QuantType]]

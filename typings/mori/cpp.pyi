from collections.abc import Mapping
from typing import ClassVar, Literal

from _pybind import PybindEnum
from typing_extensions import TypeVar

_V_co = TypeVar("_V_co", bound=int, default=int, covariant=True)

class EpDispatchCombineKernelType(PybindEnum[_V_co]):
    IntraNode: ClassVar[EpDispatchCombineKernelType[Literal[0]]]
    InterNode: ClassVar[EpDispatchCombineKernelType[Literal[1]]]
    InterNodeV1: ClassVar[EpDispatchCombineKernelType[Literal[2]]]
    InterNodeV1LL: ClassVar[EpDispatchCombineKernelType[Literal[3]]]
    AsyncLL: ClassVar[EpDispatchCombineKernelType[Literal[4]]]
    IntraNodeLL: ClassVar[EpDispatchCombineKernelType[Literal[5]]]
    __members__: ClassVar[Mapping[str, EpDispatchCombineKernelType]]

class EpDispatchCombineQuantType(PybindEnum):
    None_: ClassVar[EpDispatchCombineQuantType]
    Fp8DirectCast: ClassVar[EpDispatchCombineQuantType]
    Fp8BlockwiseQuant: ClassVar[EpDispatchCombineQuantType]
    Fp4BlockwiseQuant: ClassVar[EpDispatchCombineQuantType]
    __members__: ClassVar[Mapping[str, EpDispatchCombineQuantType]]

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from _pybind import PybindEnum
from typing_extensions import TypeVar

_V_co = TypeVar("_V_co", bound=int, default=int, covariant=True)

class MxScaleRoundMode(PybindEnum[_V_co]):
    RoundDown: ClassVar[MxScaleRoundMode[Literal[0]]]
    RoundUp: ClassVar[MxScaleRoundMode[Literal[1]]]
    Even: ClassVar[MxScaleRoundMode[Literal[2]]]
    Ceil: ClassVar[MxScaleRoundMode[Literal[3]]]
    __members__: ClassVar[Mapping[str, MxScaleRoundMode]]

class MxDtype(PybindEnum[_V_co]):
    FP4_E2M1: ClassVar[MxDtype[Literal[0]]]
    FP8_E4M3: ClassVar[MxDtype[Literal[1]]]
    FP8_E4M3_FNUZ: ClassVar[MxDtype[Literal[2]]]
    __members__: ClassVar[Mapping[str, MxDtype]]

# The same as ints, for whom no extension is built.
class MxScaleRoundModeInt:
    RoundDown: Final = 0
    RoundUp: Final = 1
    Even: Final = 2
    Ceil: Final = 3

class MxDtypeInt:
    FP4_E2M1: Final = 0
    FP8_E4M3: Final = 1
    FP8_E4M3_FNUZ: Final = 2

MX_DEFAULT_ROUND_MODE: Final = 1

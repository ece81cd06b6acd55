"""The kernels of formats: the named conversions in one launch each, bit for bit those of the reference. Importing this imports Triton.

Where a device count of live rows is given, the rows beyond it are neither read nor written.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, get_args

from ..ops.minifloat.spec import MXFP_ROUNDING
from ..ops.quantize import triton as _quantize
from ..ops.scale_layout import triton as _relayout
from ..ops.upscale import triton as _upscale
from .conversions import AnyConversion, Conversion, Quantizers, Relayouts, Upscalers

quantizers: Final = Quantizers(_quantize)
upscalers: Final = Upscalers(_upscale)
relayouts: Final = Relayouts(_relayout)

_GROUPS: Final = (quantizers, upscalers, relayouts)
_NAMED: Final[list[AnyConversion]] = [value for group in _GROUPS for value in vars(group).values() if isinstance(value, Conversion)]
_ROUNDED: Final[list[AnyConversion]] = [
    make(rounding)
    for make in (quantizers.mxfp8_rounded, quantizers.mxfp8_swizzled_rounded, quantizers.mxfp4_rounded)
    for rounding in get_args(MXFP_ROUNDING)
]
_BY_NAME: Final[Mapping[str, AnyConversion]] = MappingProxyType({value.name: value for value in (*_NAMED, *_ROUNDED)})


def fused(conversion: AnyConversion) -> AnyConversion:
    """Return the kernel of a named conversion; the conversion itself where it has none (``as is``).

    A conversion over a scale that is given has no name of its own to be found by: ask ``quantizers`` for its kernel.
    """
    return _BY_NAME.get(conversion.name, conversion)

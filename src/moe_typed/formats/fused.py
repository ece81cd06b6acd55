"""The kernels of formats: the named conversions in one launch each, bit for bit those of the reference. Importing this imports Triton.

Where a device count of live rows is given, the rows beyond it are neither read nor written.
"""

from typing import Final

from ..ops.quantize import triton as _quantize
from ..ops.scale_layout import triton as _relayout
from ..ops.upscale import triton as _upscale
from .conversions import Quantizers, Relayouts, Upscalers

quantizers: Final = Quantizers(_quantize)
upscalers: Final = Upscalers(_upscale)
relayouts: Final = Relayouts(_relayout)

"""The AITER runner and the weights prepared for it. Importing this imports no AITER; preparing weights does."""

from .library import AiterLibrary, FusedMoe, gfx_of, load_aiter
from .prepare import AnyAiterFnuzWeights, AnyAiterWeights, prepare_aiter, prepare_aiter_as, prepare_aiter_fnuz, suits
from .prepared import AiterOptions
from .probe import AiterFacts, RowBounds, probe_aiter_source, probe_installed_aiter
from .runner import AiterRunner
from .weights_dense import AiterBf16Weights, AiterFp16Weights, AiterInt8TokenWeights
from .weights_fp8 import (
    NEEDS_STATIC,
    AiterFp8Block128Weights,
    AiterFp8FnuzBlock128Weights,
    AiterFp8FnuzTensorWeights,
    AiterFp8FnuzTokenWeights,
    AiterFp8TensorWeights,
    AiterFp8TokenWeights,
    StaticScales,
)
from .weights_mx import AiterMxFp4A4W4Weights, AiterMxFp4A8W4Weights, AiterMxFp4A16W4Weights, AiterMxFp8Weights, MxFp4Layout

__all__ = [
    "NEEDS_STATIC",
    "AiterBf16Weights",
    "AiterFacts",
    "AiterFp8Block128Weights",
    "AiterFp8FnuzBlock128Weights",
    "AiterFp8FnuzTensorWeights",
    "AiterFp8FnuzTokenWeights",
    "AiterFp8TensorWeights",
    "AiterFp8TokenWeights",
    "AiterFp16Weights",
    "AiterInt8TokenWeights",
    "AiterLibrary",
    "AiterMxFp4A4W4Weights",
    "AiterMxFp4A8W4Weights",
    "AiterMxFp4A16W4Weights",
    "AiterMxFp8Weights",
    "AiterOptions",
    "AiterRunner",
    "AnyAiterFnuzWeights",
    "AnyAiterWeights",
    "FusedMoe",
    "MxFp4Layout",
    "RowBounds",
    "StaticScales",
    "gfx_of",
    "load_aiter",
    "prepare_aiter",
    "prepare_aiter_as",
    "prepare_aiter_fnuz",
    "probe_aiter_source",
    "probe_installed_aiter",
    "suits",
]

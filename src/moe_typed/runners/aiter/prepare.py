"""From checkpoint-layout weights to weights that AITER reads."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal, Never, TypeAlias, overload

from ...formats import (
    Bf16ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp16ExpertWeights,
    GateUpOrder,
    Int8ChannelExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
)
from ..base import PreparedWeights
from .library import AiterLibrary, load_aiter
from .prepared import DEFAULT_OPTIONS, GFX942, GFX950, AiterOptions
from .weights_dense import AiterBf16Weights, AiterFp16Weights, AiterInt8TokenWeights, prepare_bf16, prepare_fp16, prepare_int8
from .weights_fp8 import (
    AiterFp8Block128Weights,
    AiterFp8FnuzBlock128Weights,
    AiterFp8FnuzTensorWeights,
    AiterFp8FnuzTokenWeights,
    AiterFp8TensorWeights,
    AiterFp8TokenWeights,
    StaticScales,
    prepare_fp8_block,
    prepare_fp8_block_fnuz,
    prepare_fp8_tensor,
    prepare_fp8_tensor_fnuz,
    prepare_fp8_token,
    prepare_fp8_token_fnuz,
)
from .weights_mx import (
    AiterMxFp4A4W4Weights,
    AiterMxFp4A8W4Weights,
    AiterMxFp4A16W4Weights,
    AiterMxFp8Weights,
    MxFp4Layout,
    prepare_mxfp4_a4w4,
    prepare_mxfp4_a8w4,
    prepare_mxfp4_a16w4,
    prepare_mxfp8,
)

AnyAiterWeights: TypeAlias = (
    AiterBf16Weights
    | AiterFp16Weights
    | AiterFp8TensorWeights
    | AiterFp8TokenWeights
    | AiterFp8Block128Weights
    | AiterInt8TokenWeights
    | AiterMxFp4A4W4Weights
    | AiterMxFp4A16W4Weights
    | AiterMxFp4A8W4Weights
    | AiterMxFp8Weights
)
AnyAiterFnuzWeights: TypeAlias = AiterFp8FnuzTensorWeights | AiterFp8FnuzTokenWeights | AiterFp8FnuzBlock128Weights
Fp8ExpertWeights: TypeAlias = Fp8TensorExpertWeights[GateUpOrder] | Fp8ChannelExpertWeights[GateUpOrder] | Fp8Block128ExpertWeights[GateUpOrder]
AiterExpertWeights: TypeAlias = (
    Fp8ExpertWeights
    | Bf16ExpertWeights[GateUpOrder]
    | Fp16ExpertWeights[GateUpOrder]
    | Int8ChannelExpertWeights[GateUpOrder]
    | MxFp4ExpertWeights[GateUpOrder]
    | MxFp8ExpertWeights[GateUpOrder]
)

_FP8: Final = (Fp8TensorExpertWeights, Fp8ChannelExpertWeights, Fp8Block128ExpertWeights)
_FNUZ: Final = (AiterFp8FnuzTensorWeights, AiterFp8FnuzTokenWeights, AiterFp8FnuzBlock128Weights)
_GFX950_ONLY: Final = (AiterFp8TensorWeights, AiterFp8TokenWeights, AiterFp8Block128Weights, AiterMxFp8Weights, AiterMxFp4A4W4Weights)
_LAYOUTS: Final[Mapping[type[PreparedWeights[object, Never]], MxFp4Layout]] = MappingProxyType(
    {
        AiterMxFp4A4W4Weights: MxFp4Layout.A4W4,
        AiterMxFp4A16W4Weights: MxFp4Layout.A16W4,
        AiterMxFp4A8W4Weights: MxFp4Layout.A8W4,
    }
)
_TAKEN: Final = (*_FP8, Bf16ExpertWeights, Fp16ExpertWeights, Int8ChannelExpertWeights, MxFp4ExpertWeights, MxFp8ExpertWeights)


@overload
def prepare_aiter(
    weights: Bf16ExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterBf16Weights: ...
@overload
def prepare_aiter(
    weights: Fp16ExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterFp16Weights: ...
@overload
def prepare_aiter(
    weights: Fp8TensorExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, static: StaticScales, options: AiterOptions = ...
) -> AiterFp8TensorWeights: ...
@overload
def prepare_aiter(
    weights: Fp8ChannelExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterFp8TokenWeights: ...
@overload
def prepare_aiter(
    weights: Fp8Block128ExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterFp8Block128Weights: ...
@overload
def prepare_aiter(
    weights: Int8ChannelExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterInt8TokenWeights: ...
@overload
def prepare_aiter(
    weights: MxFp8ExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterMxFp8Weights: ...
@overload
def prepare_aiter(
    weights: MxFp4ExpertWeights[GateUpOrder],
    library: AiterLibrary | None = None,
    *,
    layout: Literal[MxFp4Layout.A4W4],
    options: AiterOptions = ...,
) -> AiterMxFp4A4W4Weights: ...
@overload
def prepare_aiter(
    weights: MxFp4ExpertWeights[GateUpOrder],
    library: AiterLibrary | None = None,
    *,
    layout: Literal[MxFp4Layout.A16W4],
    options: AiterOptions = ...,
) -> AiterMxFp4A16W4Weights: ...
@overload
def prepare_aiter(
    weights: MxFp4ExpertWeights[GateUpOrder],
    library: AiterLibrary | None = None,
    *,
    layout: Literal[MxFp4Layout.A8W4],
    options: AiterOptions = ...,
) -> AiterMxFp4A8W4Weights: ...
def prepare_aiter(
    weights: AiterExpertWeights,
    library: AiterLibrary | None = None,
    *,
    layout: MxFp4Layout | None = None,
    options: AiterOptions = DEFAULT_OPTIONS,
    static: StaticScales | None = None,
) -> AnyAiterWeights:
    """Return checkpoint-layout weights as AITER takes them, shuffled copies in gate-then-up order.

    ``library``: None loads the installed one. ``layout``: of mxfp4 weights, which have three; it has no default, as none serves every activation.
    ``static``: calibrated scales of the rows; fp8-tensor weights need them, and no others take them.

    Raises: TypeError for anything else, weights that are prepared already among them; UnsupportedError, before any work, for what this AITER, its
    device or these sizes rule out, and for fp8-tensor weights without static scales; ImportError where AITER is not installed.
    """
    if not isinstance(weights, _TAKEN):  # pyright: ignore[reportUnnecessaryIsInstance]  not every caller runs a checker
        raise TypeError(f"prepare_aiter takes bf16, fp16, fp8, int8, mxfp4 or mxfp8 expert weights in checkpoint layout; got {_name(weights)}")
    _check_keywords(weights, layout, static)
    return _prepare(weights, load_aiter() if library is None else library, layout, options, static)


@overload
def prepare_aiter_fnuz(
    weights: Fp8TensorExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, static: StaticScales, options: AiterOptions = ...
) -> AiterFp8FnuzTensorWeights: ...
@overload
def prepare_aiter_fnuz(
    weights: Fp8ChannelExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterFp8FnuzTokenWeights: ...
@overload
def prepare_aiter_fnuz(
    weights: Fp8Block128ExpertWeights[GateUpOrder], library: AiterLibrary | None = None, *, options: AiterOptions = ...
) -> AiterFp8FnuzBlock128Weights: ...
def prepare_aiter_fnuz(
    weights: Fp8ExpertWeights,
    library: AiterLibrary | None = None,
    *,
    options: AiterOptions = DEFAULT_OPTIONS,
    static: StaticScales | None = None,
) -> AnyAiterFnuzWeights:
    """Do the same with fp8 weights for gfx942, whose fp8 is e4m3fnuz: another format, with payload classes of its own.

    Raises: as ``prepare_aiter``; UnsupportedError for weights that hold a NaN, too.
    """
    if not isinstance(weights, _FP8):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"prepare_aiter_fnuz takes fp8 expert weights in checkpoint layout; got {_name(weights)}")
    _check_keywords(weights, None, static)
    return _prepare_fnuz(weights, load_aiter() if library is None else library, options, static)


def prepare_aiter_as(
    prepared: type[PreparedWeights[object, Never]], weights: AiterExpertWeights, library: AiterLibrary | None = None
) -> AnyAiterWeights | AnyAiterFnuzWeights:
    """Return weights as one class of prepared weights, for plans, which name it.

    Raises: as ``prepare_aiter``; TypeError for weights of another format.
    """
    loaded = load_aiter() if library is None else library
    made: AnyAiterWeights | AnyAiterFnuzWeights
    if prepared in _FNUZ and isinstance(weights, _FP8):
        made = _prepare_fnuz(weights, loaded, DEFAULT_OPTIONS, None)
    else:
        made = _prepare(weights, loaded, _LAYOUTS.get(prepared), DEFAULT_OPTIONS, None)
    if not isinstance(made, prepared):
        raise TypeError(f"{_name(weights)} cannot become {prepared.__qualname__}; it becomes {_name(made)}")
    return made


def suits(prepared: type[PreparedWeights[object, Never]], gfx: str, *, clamped: bool) -> bool:
    """Say whether a class of prepared weights is for an architecture, and for silu or the clamped swiglu, for plans; versions are not looked at."""
    if prepared in _FNUZ:
        return gfx == GFX942
    if prepared in _GFX950_ONLY:
        return gfx == GFX950 and not (clamped and prepared is AiterMxFp4A4W4Weights)
    return gfx in (GFX942, GFX950) and (clamped or prepared is not AiterMxFp4A16W4Weights)


def _prepare(
    weights: AiterExpertWeights, library: AiterLibrary, layout: MxFp4Layout | None, options: AiterOptions, static: StaticScales | None
) -> AnyAiterWeights:
    match weights:
        case Bf16ExpertWeights():
            return prepare_bf16(weights, library, options)
        case Fp16ExpertWeights():
            return prepare_fp16(weights, library, options)
        case Fp8TensorExpertWeights():
            return prepare_fp8_tensor(weights, library, options, static)
        case Fp8ChannelExpertWeights():
            return prepare_fp8_token(weights, library, options)
        case Fp8Block128ExpertWeights():
            return prepare_fp8_block(weights, library, options)
        case Int8ChannelExpertWeights():
            return prepare_int8(weights, library, options)
        case MxFp8ExpertWeights():
            return prepare_mxfp8(weights, library, options)
        case MxFp4ExpertWeights():
            return _prepare_mxfp4(weights, library, layout, options)


def _prepare_fnuz(weights: Fp8ExpertWeights, library: AiterLibrary, options: AiterOptions, static: StaticScales | None) -> AnyAiterFnuzWeights:
    match weights:
        case Fp8TensorExpertWeights():
            return prepare_fp8_tensor_fnuz(weights, library, options, static)
        case Fp8ChannelExpertWeights():
            return prepare_fp8_token_fnuz(weights, library, options)
        case Fp8Block128ExpertWeights():
            return prepare_fp8_block_fnuz(weights, library, options)


def _prepare_mxfp4(
    weights: MxFp4ExpertWeights[GateUpOrder], library: AiterLibrary, layout: MxFp4Layout | None, options: AiterOptions
) -> AiterMxFp4A4W4Weights | AiterMxFp4A16W4Weights | AiterMxFp4A8W4Weights:
    match layout:
        case MxFp4Layout.A4W4:
            return prepare_mxfp4_a4w4(weights, library, options)
        case MxFp4Layout.A16W4:
            return prepare_mxfp4_a16w4(weights, library, options)
        case MxFp4Layout.A8W4:
            return prepare_mxfp4_a8w4(weights, library, options)
        case None:
            raise TypeError("mxfp4 weights have three layouts in AITER: say which, layout=MxFp4Layout.A4W4, A16W4 or A8W4")


def _check_keywords(weights: AiterExpertWeights, layout: MxFp4Layout | None, static: StaticScales | None) -> None:
    if layout is not None and not isinstance(weights, MxFp4ExpertWeights):
        raise TypeError(f"layout is for mxfp4 weights alone; got {_name(weights)}")
    if static is not None and not isinstance(weights, Fp8TensorExpertWeights):
        raise TypeError(f"static scales are for fp8-tensor weights alone: AITER computes those of {weights.format.name} in each call")


def _name(value: object) -> str:
    return type(value).__qualname__

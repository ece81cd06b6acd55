"""Which kernel a call gets: the activation precision, and the layouts of the weights that follow from it."""

from typing import Final, final

import attrs
import torch
from torch import Tensor

from .call import Problem
from .enums import ActivationType, GateMode, QuantType
from .library import Library
from .misuse import Reason
from .permutations import Layout, as_bytes
from .shuffles import is_marked

_FP4 = torch.float4_e2m1fn_x2
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_MANY_ROWS: Final = 2**24  # more than any bound
_DEFAULT_BOUND: Final = 256  # of both GPTOSS_SWIGLU_MXFP4_BF16_BOUND and AITER_BF16_FP8_MOE_BOUND


def activation_precision(problem: Problem) -> torch.dtype:
    """Return the dtype of the activation of stage 1. It depends on the padded number of rows."""
    call = problem.call
    if call.quant_dtype_a is not None:
        return call.quant_dtype_a
    return precision_of(problem.library, problem.quant, call.w1.dtype, call.activation, problem.gate_mode, problem.tokens)


def precision_of(
    library: Library, quant: QuantType, weight: torch.dtype, activation: ActivationType, gate_mode: GateMode, tokens: int
) -> torch.dtype:
    """Return the precision that the rules of a version give to a weight dtype."""
    dtypes = library.dtypes
    if quant != QuantType.per_1x32:
        return dtypes.fp8 if weight in _FP8 else weight
    is_swiglu = activation == ActivationType.Swiglu
    if library.version.is_wheel:
        return dtypes.bf16 if is_swiglu else dtypes.fp4x2
    if weight in _FP8:
        return dtypes.fp8
    if activation == ActivationType.Situv2:
        if library.flag("AITER_SITUV2_A4W4"):
            return dtypes.fp4x2
        return dtypes.fp8 if library.flag("AITER_SITUV2_A8W4") else dtypes.bf16
    if is_swiglu and gate_mode is GateMode.SEPARATED:
        is_small = tokens < library.number("GPTOSS_SWIGLU_MXFP4_BF16_BOUND", _DEFAULT_BOUND)
        return dtypes.bf16 if is_small else dtypes.fp4x2
    if is_swiglu or gate_mode is GateMode.INTERLEAVE:
        is_small = tokens < library.number("AITER_BF16_FP8_MOE_BOUND", _DEFAULT_BOUND)
        return dtypes.bf16 if library.gfx != "gfx950" or is_small else dtypes.fp8
    return dtypes.fp4x2


def resolve_precision(
    library: Library, quant: QuantType, weight: torch.dtype, activation: ActivationType, gate_mode: GateMode, tokens: int | None
) -> torch.dtype | None:
    """Return the precision, or None where no number of rows is given and it would matter."""
    found = {precision_of(library, quant, weight, activation, gate_mode, rows) for rows in ((1, _MANY_ROWS) if tokens is None else (tokens,))}
    return found.pop() if len(found) == 1 else None


@final
@attrs.frozen
class Layouts:
    """What the chosen kernels demand."""

    w1: Layout
    w1_scale: Layout
    w2: Layout
    w2_scale: Layout


def demanded_layouts(problem: Problem, precision: torch.dtype) -> Layouts:
    """Return the recipe of the contract for a precision.

    The recipe for bf16 activations has separate halves; with gate_mode interleave the halves are side by side in the lanes, as with fp8.
    """
    if problem.quant != QuantType.per_1x32:
        return Layouts(Layout.TILES, Layout.ROWS, Layout.TILES, Layout.ROWS)
    if precision is _FP4:
        return Layouts(Layout.TILES, Layout.SCALE_TILES, Layout.TILES, Layout.SCALE_TILES)
    is_side_by_side = problem.is_gated and (precision in _FP8 or problem.gate_mode is GateMode.INTERLEAVE)
    w1, w1_scale = (Layout.GATED_LANES, Layout.SCALE_GATED_LANES) if is_side_by_side else (Layout.LANES, Layout.SCALE_LANES)
    return Layouts(w1, w1_scale, Layout.LANES, Layout.SCALE_LANES if problem.fp4_weights else Layout.SCALE_TILES)


def finds_mark(problem: Problem) -> bool:
    """Say whether is_shuffled is set where this version looks: on either weight; the wheel looks at w1 alone."""
    call = problem.call
    return is_marked(call.w1) or (not problem.library.version.is_wheel and is_marked(call.w2))


def asks_mark(library: Library, layout: Layout) -> bool:
    """Say whether the choice of kernels asks for the mark: in the wheel only that of the kernels that read tiles."""
    return not library.version.is_wheel or layout is Layout.TILES


def noise(weight: Tensor) -> Tensor:
    """Return the stored elements in an order that no layout has.

    Without the mark other kernels are chosen, and the contract does not tell which layout each of them reads: nobody may count on any.
    """
    order = torch.randperm(weight.numel(), generator=torch.Generator().manual_seed(0))
    return as_bytes(weight).flatten()[order].view(weight.shape).view(weight.dtype)


def same_bytes(layout: Layout, tensor: Tensor) -> Layout:
    """Return the one name of layouts that put elements of one byte to the same places: lanes without gate_up are tiles."""
    twins = {Layout.LANES: Layout.TILES, Layout.SCALE_LANES: Layout.SCALE_TILES}
    return twins.get(layout, layout) if tensor.element_size() == 1 else layout


def check_shuffle(problem: Problem, operand: str, tensor: Tensor, demanded: Layout) -> None:
    """Judge a tensor whose shuffle is known, in strict mode. Numerics never look at it."""
    known = problem.library.remembered(tensor)
    if known is not None and same_bytes(known, tensor) is not same_bytes(demanded, tensor):
        problem.library.judge.silent(Reason.WRONG_SHUFFLE, operand, f"It is {known.value}; the kernel reads {demanded.value}.")

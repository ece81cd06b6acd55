"""The activation of stage 1: which branch prepares it, and which of them read the scale that the caller gave."""

from typing import final

import attrs
import torch
from torch import Tensor

from .call import Problem
from .enums import ActivationType, GateMode, QuantType
from .library import Version
from .memory import read
from .misuse import Reason
from .numerics import FP8_GROUP, MX_GROUP, dequantize, quantize_mx_fp4, quantize_mx_fp8
from .quantizers import Quantizers

_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_FP4 = torch.float4_e2m1fn_x2
_E8M0 = torch.float8_e8m0fnu


@final
@attrs.frozen
class Prepared:
    """The activation as stage 1 multiplies it, float32 (T, H), and the row of the contract's table that made it."""

    x: Tensor
    branch: int


def prepare(problem: Problem, precision: torch.dtype) -> Prepared:
    """Return the activation.

    Raises: RuntimeError where a launcher takes fp16 and bf16 alone, ValueError for a static scale where the mode has none, AssertionError for rows
    that are quantised already and have no scale.
    """
    hidden = _hidden(problem)
    if problem.library.tuned.self_quantizing:
        return Prepared(_self_quantized(problem, hidden, precision), 1)
    if problem.quant == QuantType.per_1x32:
        return _prepare_mx(problem, hidden, precision)
    if hidden.dtype is not precision:
        return Prepared(_quantized(problem, hidden, precision), 6)
    a1_scale = problem.call.a1_scale
    if problem.quant == QuantType.No:
        _discard(problem)
        return Prepared(hidden.float(), 7)
    assert a1_scale is not None, "a1_scale must be provided for quantized hidden_states"
    return Prepared(_with_scale(problem, hidden, a1_scale), 7)


def _hidden(problem: Problem) -> Tensor:
    """Return the rows as kernels read them: contiguous, and fp8 as that of the architecture."""
    hidden = problem.call.hidden_states
    dtype = problem.library.dtypes.fp8 if hidden.dtype in _FP8 else hidden.dtype
    return read(problem.library.judge, "hidden_states", hidden, dtype, tuple(hidden.shape))


def _discard(problem: Problem) -> None:
    if problem.call.a1_scale is not None:
        problem.library.judge.silent(Reason.SCALE_DISCARDED, "a1_scale")


def _prepare_mx(problem: Problem, hidden: Tensor, precision: torch.dtype) -> Prepared:
    call, library = problem.call, problem.library
    a1_scale = call.a1_scale
    is_lane_activation = call.activation in (ActivationType.Swiglu, ActivationType.Situv2) or problem.gate_mode is GateMode.INTERLEAVE
    splits = precision is _FP4 and library.tuned.split_k  # its weights are shuffled, or nothing holds
    if problem.fp4_weights and ((precision in _HALVES and is_lane_activation) or splits):
        return Prepared(_cast(problem, hidden), 2)
    if precision in _FP8:
        passes = library.version is Version.LATER and hidden.dtype in _FP8
        if passes and a1_scale is not None:
            return Prepared(_with_scale(problem, hidden, a1_scale), 3)
        _launch(hidden)
        _discard(problem)
        return Prepared(dequantize(*quantize_mx_fp8(hidden.float(), library.dtypes.fp8)), 3)
    if library.version.is_wheel and a1_scale is not None:
        raise ValueError("unsupported: static scale with per_1x32")
    if hidden.dtype is _FP4 and a1_scale is not None:
        return Prepared(_with_scale(problem, hidden, a1_scale), 5)
    _launch(hidden)
    _discard(problem)
    return Prepared(dequantize(*quantize_mx_fp4(hidden.float(), wheel=library.version.is_wheel)), 5)


def _launch(hidden: Tensor) -> None:
    if hidden.dtype not in _HALVES:
        raise RuntimeError(f"the launcher takes fp16 and bf16, not {hidden.dtype}")


def _cast(problem: Problem, hidden: Tensor) -> Tensor:
    if hidden.dtype is _FP4:
        raise RuntimeError("torch casts no fp4")
    _discard(problem)
    if hidden.dtype in _FP8:
        problem.library.judge.silent(Reason.CAST_WITHOUT_SCALE, "hidden_states")
    return hidden.to(problem.out_dtype).float()


def _quantized(problem: Problem, hidden: Tensor, precision: torch.dtype) -> Tensor:
    """Return what branch 6 does: the quantiser of the quant type, with the caller's scale and row count."""
    call, library = problem.call, problem.library
    if problem.quant == QuantType.No:
        raise library.judge.undefined(Reason.HIDDEN_DTYPE, "hidden_states", f"{hidden.dtype} with weights of {precision}")
    quantizer = Quantizers(library).table()[problem.quant]
    scale = call.a1_scale
    if scale is not None and problem.quant == QuantType.per_Tensor:
        scale = read(library.judge, "a1_scale", scale, torch.float32, (1,))
    payload, scales = quantizer(hidden, scale=scale, quant_dtype=precision, num_rows=call.num_local_tokens)
    if scales is None:
        raise TypeError("a quantiser without scales")
    return dequantize(payload, scales)


def _self_quantized(problem: Problem, hidden: Tensor, precision: torch.dtype) -> Tensor:
    """Return what a kernel makes of the rows that quantises itself: the scale of rows that are quantised already is lost."""
    _discard(problem)
    if hidden.dtype not in _HALVES:
        return dequantize(hidden, torch.ones(*hidden.shape[:-1], 1))
    if problem.quant == QuantType.No or (problem.quant == QuantType.per_1x32 and precision in _HALVES):
        return hidden.float()
    if problem.quant == QuantType.per_1x32:
        if precision in _FP8:
            return dequantize(*quantize_mx_fp8(hidden.float(), precision))
        return dequantize(*quantize_mx_fp4(hidden.float(), wheel=problem.library.version.is_wheel))
    payload, scales = Quantizers(problem.library).table()[problem.quant](hidden, quant_dtype=precision)
    return hidden.float() if scales is None else dequantize(payload, scales)


def _with_scale(problem: Problem, hidden: Tensor, scale: Tensor) -> Tensor:
    """Return rows that are quantised already, with the bytes of the caller's scale read as the kernel reads them."""
    judge, tokens = problem.library.judge, problem.tokens
    if problem.quant == QuantType.per_1x32:
        return dequantize(hidden, read(judge, "a1_scale", scale, _E8M0, (tokens, problem.hidden // MX_GROUP)))
    if problem.quant == QuantType.per_Tensor:
        return dequantize(hidden, read(judge, "a1_scale", scale, torch.float32, (1,)))
    if problem.quant == QuantType.per_Token:
        return dequantize(hidden, read(judge, "a1_scale", scale, torch.float32, (tokens, 1), [(tokens,)]))
    return dequantize(hidden, read(judge, "a1_scale", scale, torch.float32, (tokens, problem.hidden // FP8_GROUP)))

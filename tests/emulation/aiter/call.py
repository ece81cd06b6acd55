"""One call of ``fused_moe``, and what the host makes of it before any kernel runs, with the exceptions that it raises."""

from typing import final

import attrs
import torch
from torch import Tensor

from .dtypes import I4X2
from .enums import ActivationType, GateMode, QuantType
from .library import Library, Version
from .misuse import EmulationGap, Reason
from .numerics import FP8_GROUP, MX_GROUP

_HALVES = (torch.bfloat16, torch.float16)
_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_FP4 = torch.float4_e2m1fn_x2
_NAMED_WEIGHTS = {QuantType.per_Tensor: (*_FP8, torch.int8), QuantType.per_Token: (*_FP8, torch.int8), QuantType.per_1x128: _FP8}


@final
@attrs.frozen(kw_only=True)
class Call:
    """The arguments, under the names of the newest version. What a version does not know has its default."""

    hidden_states: Tensor
    w1: Tensor
    w2: Tensor
    topk_weight: Tensor
    topk_ids: Tensor
    expert_mask: Tensor | None
    activation: ActivationType
    quant_type: QuantType
    doweight_stage1: bool
    w1_scale: Tensor | None
    w2_scale: Tensor | None
    a1_scale: Tensor | None
    a2_scale: Tensor | None
    num_local_tokens: Tensor | None
    dtype: torch.dtype | None
    hidden_pad: int
    intermediate_pad: int
    bias1: Tensor | None
    bias2: Tensor | None
    swiglu_limit: float | None = None
    beta: float | None = None
    linear_beta: float | None = None
    gate_mode: str = "separated"
    is_shared: bool = False
    stage2_scatter: object | None = None
    output: Tensor | None = None
    quant_type_a: QuantType | None = None
    quant_dtype_a: torch.dtype | None = None
    quant_dtype_a2: torch.dtype | None = None
    no_combine: bool = False


@final
@attrs.frozen(kw_only=True)
class Problem:
    """A call that the host let through."""

    library: Library
    call: Call
    quant: QuantType  # after per_128x128 became per_1x128
    gate_mode: GateMode
    out_dtype: torch.dtype
    tokens: int
    experts: int
    hidden: int
    inter: int
    rows_of_w1: int

    @property
    def is_gated(self) -> bool:
        return self.rows_of_w1 == 2 * self.inter

    @property
    def fp4_weights(self) -> bool:
        return self.call.w1.dtype is _FP4


def check(library: Library, call: Call) -> Problem:
    """Return the call as a problem.

    Raises: AttributeError for numbers in place of enumerations, ValueError for an unknown gate mode, AssertionError for shapes and for the output
    dtype, TypeError for biases, NotImplementedError for quant types without kernels, RuntimeError where a launcher raises.
    """
    quant = _remapped(QuantType(call.quant_type.value))
    ActivationType(call.activation.value)
    gate_mode = GateMode(call.gate_mode)
    _check_unmodelled(call, gate_mode)
    experts, hidden, stored = (int(size) for size in call.w2.shape)
    inter = stored * (hidden // call.w1.shape[-1])
    rows = call.w1.shape[1]
    assert rows in (inter, 2 * inter), f"Invalid MoE weight: {rows} rows of w1 for an intermediate size of {inter}"
    out_dtype = call.dtype or call.hidden_states.dtype
    assert out_dtype in _HALVES, f"Fused_moe unsupported out dtype: {out_dtype}"
    for bias in (call.bias1, call.bias2):
        if bias is not None and bias.dtype is not torch.float32:
            raise TypeError(f"MoE bias must be fp32, got {bias.dtype}")
    _check_kernels(library, call, quant)
    if quant == QuantType.per_1x128 and any(size % FP8_GROUP for size in (rows, hidden, inter)):
        raise EmulationGap("blocks of 128 that are not whole")
    if quant == QuantType.per_1x32 and any(size % MX_GROUP for size in (hidden, inter)):
        raise EmulationGap("groups of 32 that are not whole")
    problem = Problem(
        library=library,
        call=call,
        quant=quant,
        gate_mode=gate_mode,
        out_dtype=out_dtype,
        tokens=call.topk_ids.shape[0],
        experts=experts,
        hidden=hidden,
        inter=inter,
        rows_of_w1=rows,
    )
    _check_output(problem)
    return problem


def check_operands(problem: Problem) -> None:
    """Judge what the host lets through, though no kernel is made for it."""
    call, judge = problem.call, problem.library.judge
    rows, columns = call.hidden_states.shape
    stored = 2 * columns if call.hidden_states.dtype is _FP4 else columns
    if stored != problem.hidden or rows != problem.tokens:
        raise judge.undefined(Reason.SHAPE, "hidden_states", f"{rows} x {stored}; ids have {problem.tokens} rows, w2 {problem.hidden}.")
    if call.topk_weight.shape != call.topk_ids.shape:
        raise judge.undefined(Reason.SHAPE, "topk_weight", f"{tuple(call.topk_weight.shape)} and ids {tuple(call.topk_ids.shape)}")
    if problem.tokens == 0:
        raise judge.undefined(Reason.NO_ROWS, "hidden_states")
    expected = _NAMED_WEIGHTS.get(problem.quant, _HALVES if problem.quant == QuantType.No else (*_FP8, _FP4))
    for operand, weight in (("w1", call.w1), ("w2", call.w2)):
        if weight.dtype not in expected or weight.dtype is not call.w1.dtype:
            raise judge.undefined(Reason.DTYPE, operand, f"{weight.dtype} with {problem.quant!r}")
    if call.hidden_states.dtype is torch.float32:
        raise judge.undefined(Reason.HIDDEN_DTYPE, "hidden_states", "float32")


def _remapped(quant: QuantType) -> QuantType:
    return QuantType.per_1x128 if quant == QuantType.per_128x128 else quant


def _check_unmodelled(call: Call, gate_mode: GateMode) -> None:
    if call.is_shared:
        refused = (call.stage2_scatter, call.quant_type_a, call.quant_dtype_a2, call.a1_scale, call.a2_scale)
        if any(argument is not None for argument in refused):
            raise NotImplementedError("not supported together with shared experts")
        raise EmulationGap("shared experts")
    if call.stage2_scatter is not None:
        raise EmulationGap("stage2_scatter, which gfx1250 alone has")
    if call.quant_type_a is not None or call.quant_dtype_a2 is not None:
        raise EmulationGap("quant_type_a and quant_dtype_a2")
    if gate_mode in (GateMode.MOCK_GATE_ONLY, GateMode.GATE_ONLY):
        raise EmulationGap(f"gate_mode {gate_mode.value}")
    if call.w1.dtype in (I4X2, torch.uint32):
        raise EmulationGap("int4 weights")


def _check_kernels(library: Library, call: Call, quant: QuantType) -> None:
    """Raise where no kernel exists and the real library says so."""
    if quant in (QuantType.per_256x128, QuantType.per_1024x128):
        raise NotImplementedError(f"unsupported quant type {quant!r}")
    is_situ = call.activation == ActivationType.Situv2
    if call.activation == ActivationType.No or (is_situ and (library.version.is_wheel or call.w1.dtype is not _FP4)):
        raise RuntimeError(f"stage 1 has no kernel for {call.activation!r}")
    if library.version.is_wheel and quant == QuantType.per_1x32 and call.w1.dtype in _FP8:
        raise RuntimeError("no kernel for MXFP8 weights")
    if call.no_combine and (quant != QuantType.No or call.doweight_stage1):
        raise EmulationGap("no_combine with quantised weights, or with weights applied in stage 1")
    if call.quant_dtype_a is not None and (call.w1.dtype is not _FP4 or call.quant_dtype_a is not library.dtypes.fp8):
        raise EmulationGap("quant_dtype_a other than fp8 over fp4 weights")


def _check_output(problem: Problem) -> None:
    output = problem.call.output
    if output is None:
        return
    if problem.library.version is not Version.LATER:
        raise EmulationGap("output in another version")
    if not output.is_contiguous():
        raise RuntimeError("output must be contiguous")
    if tuple(output.shape) != (problem.tokens, problem.hidden):
        raise RuntimeError(f"output must be {(problem.tokens, problem.hidden)}, got {tuple(output.shape)}")
    if output.dtype is not problem.out_dtype:
        raise RuntimeError(f"output must be {problem.out_dtype}, got {output.dtype}")
    if output.device != problem.call.hidden_states.device:
        raise RuntimeError(f"output is on {output.device}")
    if _overlap(output, problem.call.hidden_states):
        raise RuntimeError("output must not overlap hidden_states")


def _overlap(left: Tensor, right: Tensor) -> bool:
    ends = [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in (left, right)]
    return max(start for start, _ in ends) < min(end for _, end in ends)

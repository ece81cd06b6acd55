"""The two stages in float32, with what is rounded between them."""

from typing import Final

import torch
from torch import Tensor

from .call import Problem
from .enums import ActivationType, QuantType
from .memory import read
from .misuse import Reason
from .numerics import FP8_GROUP, dequantize, quantize_groups, quantize_mx_fp4, quantize_mx_fp8, quantize_tensor
from .sorting import Routes

_HALVES = (torch.bfloat16, torch.float16)
_FP4 = torch.float4_e2m1fn_x2
_OAI_LIMIT: Final = 7.0
_OAI_ALPHA: Final = 1.702
_SITU_DEFAULT: Final = 1.0  # of beta and linear_beta in the flydsl kernels; others have 4 and 25


def biases(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Return the biases that the kernel adds: those of per_1x32 alone have one."""
    call, judge = problem.call, problem.library.judge
    found: list[Tensor | None] = []
    for operand, bias, width in (("bias1", call.bias1, problem.rows_of_w1), ("bias2", call.bias2, problem.hidden)):
        if bias is not None and problem.quant != QuantType.per_1x32:
            judge.silent(Reason.BIAS_IGNORED, operand)
            bias = None
        found.append(None if bias is None else read(judge, operand, bias, torch.float32, (problem.experts, width)))
    return found[0], found[1]


def stage_1(problem: Problem, x: Tensor, w1: Tensor, bias: Tensor | None, routes: Routes) -> Tensor:
    """Return the intermediate (R, I) in the output dtype: times the weight where stage 1 applies it, then the bias, then the activation."""
    result = torch.empty(len(routes.row), problem.inter, dtype=problem.out_dtype)
    limit = _limit(problem)
    for expert in range(problem.experts):
        mine = routes.expert == expert
        y = x[routes.row[mine]] @ w1[expert].T
        if problem.call.doweight_stage1:
            y = y * routes.weight[mine, None]
        if bias is not None:
            y = y + bias[expert]
        result[mine] = _activate(problem, y, limit).to(problem.out_dtype)
    return result


def requantize(problem: Problem, inter: Tensor, precision: torch.dtype) -> Tensor:
    """Return the intermediate (R, I) as stage 2 multiplies it, float32.

    The real one has a row for each of T * K routes, and those that the sort dropped are never written: nothing reads them but the search for the one
    scale of ``per_Tensor``. Raises: ValueError for a static scale where the mode has none; AssertionError for a row count where the mode takes none.
    """
    call, library = problem.call, problem.library
    x, static = inter.float(), call.a2_scale
    if problem.quant == QuantType.per_Tensor:
        assert call.num_local_tokens is None, "num_rows is not supported by per-tensor quantisation"
        if static is not None:
            return dequantize(*quantize_tensor(x, precision, read(library.judge, "a2_scale", static, torch.float32, (1,))))
        dropped = call.topk_ids.numel() - len(x)
        if dropped:
            library.judge.silent(Reason.UNWRITTEN, "a2_scale", f"{dropped} of {call.topk_ids.numel()} routes go nowhere.")
            x = torch.cat((x, torch.full((dropped, x.shape[1]), torch.nan)))
        return dequantize(*quantize_tensor(x, precision, None))[: len(inter)]
    if static is not None:
        if problem.quant in (QuantType.per_Token, QuantType.per_1x128):
            raise ValueError("unsupported: static per token quant")
        library.judge.silent(Reason.SCALE_DISCARDED, "a2_scale")
    if problem.quant == QuantType.per_Token:
        return dequantize(*quantize_groups(x, precision, problem.inter))
    if problem.quant == QuantType.per_1x128:
        return dequantize(*quantize_groups(x, precision, FP8_GROUP))
    if problem.quant == QuantType.No or precision in _HALVES:
        return x
    if precision is _FP4:
        return dequantize(*quantize_mx_fp4(x, wheel=library.version.is_wheel))
    return dequantize(*quantize_mx_fp8(x, precision))


def stage_2(problem: Problem, inter: Tensor, w2: Tensor, bias: Tensor | None, routes: Routes) -> Tensor:
    """Return the rows of the routes (R, H), float32: with the bias, times the weight unless stage 1 applied it."""
    result = torch.empty(len(routes.row), problem.hidden)
    for expert in range(problem.experts):
        mine = routes.expert == expert
        y = inter[mine] @ w2[expert].T
        if bias is not None:
            y = y + bias[expert]
        if not problem.call.doweight_stage1 and not problem.call.no_combine:
            y = y * routes.weight[mine, None]
        result[mine] = y
    return result


def _limit(problem: Problem) -> float | None:
    """Return the clamp that reaches the kernel: those of per_1x32 alone get it."""
    limit = problem.call.swiglu_limit
    clamps = problem.call.activation in (ActivationType.Silu, ActivationType.Swiglu)
    if limit is not None and (not clamps or problem.quant != QuantType.per_1x32):
        problem.library.judge.silent(Reason.LIMIT_IGNORED, "swiglu_limit")
        return None
    return limit


def _activate(problem: Problem, y: Tensor, limit: float | None) -> Tensor:
    activation = problem.call.activation
    if not problem.is_gated:
        return _gate(activation, y)
    g, u = y.chunk(2, -1)
    if activation == ActivationType.Swiglu:
        limit = _OAI_LIMIT if limit is None else limit
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g * torch.sigmoid(_OAI_ALPHA * g) * (u + 1)
    if activation == ActivationType.Situv2:
        return _situ(problem, g, u)
    if activation == ActivationType.Silu and limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return _gate(activation, g) * u


def _gate(activation: ActivationType, x: Tensor) -> Tensor:
    if activation == ActivationType.Gelu:
        return torch.nn.functional.gelu(x)
    return x * torch.sigmoid(x)


def _situ(problem: Problem, g: Tensor, u: Tensor) -> Tensor:
    call = problem.call
    for operand, constant in (("beta", call.beta), ("linear_beta", call.linear_beta)):
        if constant is None:
            problem.library.judge.silent(Reason.CONSTANTS_UNSET, operand)
    b = _SITU_DEFAULT if call.beta is None else call.beta
    linear = _SITU_DEFAULT if call.linear_beta is None else call.linear_beta
    return b * torch.tanh(g / b) * torch.sigmoid(g) * linear * torch.tanh(u / linear)

"""The weights as the chosen kernels read them, in float32."""

import math

import torch
from torch import Tensor

from .call import Problem
from .enums import QuantType
from .kernels import Layouts, asks_mark, check_shuffle, finds_mark, noise
from .memory import read
from .misuse import Reason
from .numerics import FP8_GROUP, MX_GROUP, dequantize
from .permutations import Layout, unshuffle
from .shuffles import padded_scale_shape

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
_E8M0 = torch.float8_e8m0fnu


def read_weights(problem: Problem, layouts: Layouts) -> tuple[Tensor, Tensor]:
    """Return w1 (L, N1, H) and w2 (L, H, I), float32, with the layouts undone that the kernels demand, whether the weights have them or not."""
    call = problem.call
    marked = finds_mark(problem) or not asks_mark(problem.library, layouts.w1)
    if not marked:
        problem.library.judge.silent(Reason.UNSHUFFLED, "w1")
    w1 = _weight(problem, "w1", call.w1, layouts.w1, marked=marked)
    w2 = _weight(problem, "w2", call.w2, layouts.w2, marked=marked)
    if call.w1_scale is None and call.w2_scale is None and problem.quant == QuantType.No:
        return w1.float(), w2.float()
    return _scaled(problem, "w1_scale", w1, call.w1_scale, layouts.w1_scale), _scaled(problem, "w2_scale", w2, call.w2_scale, layouts.w2_scale)


def _weight(problem: Problem, operand: str, weight: Tensor, layout: Layout, *, marked: bool) -> Tensor:
    dtype = problem.library.dtypes.fp8 if weight.dtype in _FP8 else weight.dtype
    seen = read(problem.library.judge, operand, weight, dtype, tuple(weight.shape))
    if not marked:
        return noise(seen)
    check_shuffle(problem, operand, weight, layout)
    return unshuffle(seen, layout, problem.experts)


def _scaled(problem: Problem, operand: str, weight: Tensor, scale: Tensor | None, layout: Layout) -> Tensor:
    judge = problem.library.judge
    if problem.quant == QuantType.No:
        judge.silent(Reason.SCALE_DISCARDED, operand)
        return weight.float()
    if scale is None:
        raise judge.undefined(Reason.MISSING, operand)
    experts, rows, stored = weight.shape
    if problem.quant == QuantType.per_1x32:
        columns = stored * (2 if problem.fp4_weights else 1) // MX_GROUP
        return dequantize(weight, _mx_scale(problem, operand, scale, layout, rows, columns))
    if problem.quant == QuantType.per_Tensor:
        factors = read(judge, operand, scale, torch.float32, (experts, 1), [(experts,)])
        return weight.float() * factors[:, :, None]
    if problem.quant == QuantType.per_Token:
        factors = read(judge, operand, scale, torch.float32, (experts, rows, 1), [(experts, rows)])
        return weight.float() * factors
    factors = read(judge, operand, scale, torch.float32, (experts, rows // FP8_GROUP, stored // FP8_GROUP))
    return dequantize(weight, factors.repeat_interleave(FP8_GROUP, 1))


def _mx_scale(problem: Problem, operand: str, scale: Tensor, layout: Layout, rows: int, columns: int) -> Tensor:
    """Return e8m0 scales (L, rows, columns) from shuffled bytes, whose shape may be any: it is the memory that kernels read."""
    total = problem.experts * rows
    shape = padded_scale_shape(total, columns) if layout is Layout.SCALE_TILES else (total, math.ceil(columns / 8) * 8)
    same_memory = [tuple(scale.shape)] if scale.numel() == math.prod(shape) else []
    check_shuffle(problem, operand, scale, layout)
    seen = read(problem.library.judge, operand, scale, _E8M0, shape, same_memory)
    return unshuffle(seen, layout, problem.experts)[:total, :columns].reshape(problem.experts, rows, columns)

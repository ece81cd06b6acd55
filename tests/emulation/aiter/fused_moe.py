"""One call of ``fused_moe``, from the host's checks to the sum over the routes of a row."""

import torch
from torch import Tensor

from .call import Call, Problem, check, check_operands
from .enums import ActivationType
from .kernels import activation_precision, demanded_layouts, finds_mark
from .library import Decision, Library
from .misuse import Reason, Undefined
from .prepare import prepare
from .sorting import flat_routes, sort_routes
from .stages import biases, requantize, stage_1, stage_2
from .weights import read_weights

_HIDDEN_STEP = 64  # kernels skip whole multiples of these columns alone
_INTER_STEP = 128


def run(library: Library, call: Call) -> Tensor:
    """Return the rows (T, H); with ``no_combine`` those of every route (T, K, H). What the real library leaves undefined is NaN."""
    problem = check(library, call)
    try:
        result = _compute(problem)
    except Undefined:
        shape = (problem.tokens, call.topk_ids.shape[1], problem.hidden) if call.no_combine else (problem.tokens, problem.hidden)
        result = torch.full(shape, torch.nan, dtype=problem.out_dtype)
    return result if call.output is None else call.output.copy_(result)


def _compute(problem: Problem) -> Tensor:
    call, library = problem.call, problem.library
    check_operands(problem)
    precision = activation_precision(problem)
    layouts = demanded_layouts(problem, precision)
    _check_situ(problem, precision)
    sort = flat_routes if library.tuned.flat else sort_routes
    routes = sort(library, call.topk_ids, call.topk_weight, call.expert_mask, call.num_local_tokens, problem.experts)
    prepared = prepare(problem, precision)
    library.decisions.append(Decision(precision, prepared.branch, layouts.w1))
    w1, w2 = _without_pads(problem, *read_weights(problem, layouts))
    bias1, bias2 = biases(problem)
    inter = stage_1(problem, prepared.x[:, : w1.shape[-1]], w1, bias1, routes)
    rows = stage_2(problem, requantize(problem, inter, precision)[:, : w2.shape[-1]], w2, bias2, routes)
    if call.no_combine:
        each = torch.full((problem.tokens, call.topk_ids.shape[1], problem.hidden), torch.nan, dtype=problem.out_dtype)
        each[routes.row, routes.slot] = rows.to(problem.out_dtype)
        return each
    total = torch.zeros(problem.tokens, problem.hidden).index_add_(0, routes.row, rows).to(problem.out_dtype)
    total[routes.rows :] = torch.nan
    return total


def _check_situ(problem: Problem, precision: torch.dtype) -> None:
    call = problem.call
    refused = call.expert_mask is not None or call.bias1 is not None or call.bias2 is not None or call.doweight_stage1 or not finds_mark(problem)
    if call.activation == ActivationType.Situv2 and precision is torch.bfloat16 and refused:
        raise NotImplementedError("Situv2 with bf16 activations takes no mask, no bias, no doweight_stage1 and no weights that are not shuffled")


def _without_pads(problem: Problem, w1: Tensor, w2: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights without the columns that kernels skip. They are zero, says the caller."""
    call, judge = problem.call, problem.library.judge
    hidden, inter = problem.hidden, problem.inter
    if w1[:, :, hidden - call.hidden_pad :].any():
        judge.silent(Reason.PAD_NOT_ZERO, "hidden_pad", "w1 has columns there.")
    halves = w1.view(problem.experts, -1, inter, hidden)[:, :, inter - call.intermediate_pad :]
    if w2[:, :, inter - call.intermediate_pad :].any() or halves.any():
        judge.silent(Reason.PAD_NOT_ZERO, "intermediate_pad", "w1 has rows there, or w2 columns.")
    kept_hidden = hidden - call.hidden_pad // _HIDDEN_STEP * _HIDDEN_STEP
    kept_inter = inter - call.intermediate_pad // _INTER_STEP * _INTER_STEP
    return w1[:, :, :kept_hidden], w2[:, :, :kept_inter]

"""Grouped products in torch operations, float32: the values of rows and weights, multiplied."""

import torch
from torch import Tensor

from ..activation.spec import Split
from ..minifloat.reference import decode_e2m1, decode_e8m0, unpack_e2m1
from .spec import MIDDLE, NOTHING, Code, Epilogue, Formula, Matrix, Rows


def matrix_values(matrix: Matrix) -> Tensor:
    """Return the weights as float32 (experts, N, K)."""
    values = _codes(matrix)
    return values if matrix.scale is None else values * _spread(_scales(matrix.scale), values)


def _codes(matrix: Matrix) -> Tensor:
    match matrix.code:
        case Code.DENSE | Code.FP8 | Code.INT8:
            return matrix.data.to(torch.float32)
        case Code.FP4:
            return decode_e2m1(unpack_e2m1(matrix.data))
        case Code.INT4:
            values = torch.stack((matrix.data & 0xF, matrix.data >> 4), -1).flatten(-2).to(torch.float32)
            return values - (MIDDLE if matrix.zero is None else _spread(matrix.zero.to(torch.float32), values))


def row_values(rows: Rows) -> Tensor:
    """Return the rows as float32 (rows, K)."""
    values = rows.data.to(torch.float32)
    return values if rows.scale is None else values * _spread(_scales(rows.scale), values)


def product(
    rows: Rows,
    matrix: Matrix,
    topk_ids: Tensor,
    live: Tensor | None,
    top_k: int,
    out_dtype: torch.dtype,
    split: Split | None = None,
    epilogue: Epilogue = NOTHING,
) -> Tensor:
    """Return (routes, columns): for each route, its row times the weights of its expert, plus the bias, activated. Dropped routes hold zeros here.

    ``topk_ids``: int32 (tokens, k). Route r has row r / ``top_k``: k for rows of tokens, 1 for rows of routes. ``live``: int32 (1,), or None: the
    tokens that count. ``split``: where gate and up lie in the N columns, of which there are N / 2 pairs then; None where columns are not paired.
    """
    tokens, k = topk_ids.shape
    kept = (topk_ids >= 0) & (topk_ids < matrix.data.shape[0])
    if live is not None:
        kept = kept & (torch.arange(tokens, device=topk_ids.device).unsqueeze(1) < live)
    routes = torch.arange(tokens * k, device=topk_ids.device)
    expert = torch.where(kept, topk_ids, 0).flatten()
    values = row_values(rows)[routes // top_k]
    result = torch.zeros(tokens * k, matrix.data.shape[1], device=values.device)
    weights = matrix_values(matrix)
    for index in range(weights.shape[0]):
        mine = values @ weights[index].T
        if matrix.bias is not None:
            mine = mine + matrix.bias[index].to(torch.float32)
        result = torch.where((expert == index).unsqueeze(1), mine, result)
    return torch.where(kept.flatten().unsqueeze(1), activate(result, split, epilogue), 0.0).to(out_dtype)


def activate(joined: Tensor, split: Split | None, epilogue: Epilogue) -> Tensor:
    """Return what the epilogue makes of float32 columns."""
    formula, alpha, limit, shift = epilogue
    if split is None:
        return joined if formula is Formula.NOTHING else torch.relu(joined).square()
    column = torch.arange(joined.shape[1] // 2, device=joined.device) * split.step
    gate, up = joined[:, split.gate + column], joined[:, split.up + column]
    match formula:
        case Formula.STEP:
            return torch.nn.functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
        case Formula.GELU:
            return torch.nn.functional.gelu(gate) * up
        case Formula.GELU_TANH:
            return torch.nn.functional.gelu(gate, approximate="tanh") * up
        case _:
            gate = gate.clamp(max=limit)
            return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + shift)


def _scales(scale: Tensor) -> Tensor:
    return decode_e8m0(scale.contiguous()) if scale.dtype == torch.float8_e8m0fnu else scale.to(torch.float32)


def _spread(groups: Tensor, like: Tensor) -> Tensor:
    """Return an entry for each value, of entries for whole blocks of the last two dims."""
    for dim in (-2, -1):
        groups = groups.repeat_interleave(like.shape[dim] // max(groups.shape[dim], 1), dim)
    return groups

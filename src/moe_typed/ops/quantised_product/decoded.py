"""Weights as bfloat16, all of them at once: for so many rows that decoding them once takes less than decoding them for each block of rows."""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._launch import Launcher
from .._library import custom_op
from .decode import codes_of, scale_of
from .held import as_held, constants_of, held
from .plan import fitting_depth
from .spec import Code, Matrix, Rows

_ROWS: Final = 64
_DEPTH: Final = 128
_WARPS: Final = 4


def decoded(matrix: Matrix, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return (experts, N, K) of ``dtype``, contiguous: the values of the weights, rounded. It takes 2 * experts * N * K bytes.

    Raises: ValueError for dense weights, and as ``plan.fitting_depth``.
    """
    if matrix.code is Code.DENSE or matrix.scale is None:
        raise ValueError(f"weights are {matrix.data.dtype} {'with' if matrix.scale is not None else 'without'} scales; those with scales are decoded")
    depth = fitting_depth(Rows(matrix.data.new_empty((0, matrix.depth), dtype=dtype)), matrix, _DEPTH)
    out = torch.empty((*matrix.data.shape[:2], matrix.depth), dtype=dtype, device=matrix.data.device)
    data, _, zero, _, code, is_e8m0, in_registers = held(matrix, dtype)
    _launch(data, as_held(matrix.scale), zero, code, is_e8m0, in_registers, depth, out)
    return out


@custom_op("decoded_weights", writes=("out",))
def _launch(weights: Tensor, scale: Tensor, zero: Tensor | None, code: int, is_e8m0: bool, in_registers: bool, block_k: int, out: Tensor) -> None:
    experts, columns, depth = out.shape
    constants = {
        "N": columns,
        "K": depth,
        **constants_of(weights, scale, code, is_e8m0, in_registers, depth),
        "BLOCK_N": _ROWS,
        "BLOCK_K": block_k,
    }
    programs = experts * triton.cdiv(columns, _ROWS) * triton.cdiv(depth, block_k)
    if programs:
        _DECODE(programs, (weights, scale, zero, out), (), constants, num_warps=_WARPS)


@triton.jit
def _decode(
    weights_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    zero_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    CODE: tl.constexpr,
    PER_BYTE: tl.constexpr,
    EXPERT_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    WEIGHT_STEP: tl.constexpr,
    E8M0: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_EXPERT: tl.constexpr,
    SCALE_STRIDE: tl.constexpr,
    SCALE_STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    PIECES: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    expert = (program // (PIECES * TILES)).to(tl.int64)
    row = (program // PIECES % TILES * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    start = program % PIECES * BLOCK_K
    in_n = row < N
    weights = weights_ptr + expert * EXPERT_STRIDE + row[:, None] * WEIGHT_STRIDE
    at = expert * SCALE_EXPERT + row // SCALE_ROWS * SCALE_STRIDE
    value = codes_of(
        weights, scale_ptr + at, None if zero_ptr is None else zero_ptr + at, in_n, start,
        K, CODE, PER_BYTE, WEIGHT_STEP, IN_REGISTERS, GROUP, SCALE_STEP, N % BLOCK_N != 0, out_ptr.dtype.element_ty == tl.bfloat16, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if not IN_REGISTERS:
        value = value.to(tl.float32) * scale_of(scale_ptr + at + start // GROUP * SCALE_STEP, in_n, E8M0)[:, None]
    depth = start + tl.arange(0, BLOCK_K)
    out = out_ptr + (expert * N + row)[:, None] * K + depth[None, :]
    tl.store(out, value.to(out_ptr.dtype.element_ty), mask=in_n[:, None] & (depth < K)[None, :])


_DECODE: Final = Launcher(_decode)

"""What the kernel is told: how a matrix is held, how rows are, what becomes of the columns, and in which tiles."""

from enum import IntEnum
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..quantize.spec import MX_GROUP


class Code(IntEnum):
    """How weights are held; the numbers are those that kernels know."""

    DENSE = 0  # bfloat16, float16, float32
    FP8 = 1  # float8_e4m3fn
    INT8 = 2
    FP4 = 3  # float4_e2m1fn_x2: two a byte along the depth, the first in the low half
    INT4 = 4  # uint8: likewise, codes 0 to 15, less a zero


_CODES: Final = {
    torch.bfloat16: Code.DENSE,
    torch.float16: Code.DENSE,
    torch.float32: Code.DENSE,
    torch.float8_e4m3fn: Code.FP8,
    torch.int8: Code.INT8,
    torch.float4_e2m1fn_x2: Code.FP4,
    torch.uint8: Code.INT4,
}
_MOST: Final = 2**31 - 1
E8M0: Final = torch.float8_e8m0fnu
MIDDLE: Final = 8  # the zero of int4 codes that come without


class Matrix(NamedTuple):
    """The weights of all experts for one product: value = (data - zero) * scale.

    ``data``: (experts, N, K), or (experts, N, K / 2) where a byte holds two codes; any strides, but for those.
    ``scale``: (experts, N, G) of float8_e8m0fnu or a floating dtype, an entry for K / G of the depth; (experts, N / r, G) where one is for r rows.
    Any strides, zero among them. None for dense weights. ``zero``: uint8 below 128, of the shape and strides of ``scale``; int4 alone
    has it.
    ``bias``: (experts, N), contiguous.
    """

    data: Tensor
    scale: Tensor | None = None
    zero: Tensor | None = None
    bias: Tensor | None = None

    @property
    def code(self) -> Code:
        """Return how the weights are held. Raises: ValueError for a dtype that none has."""
        if self.data.dtype not in _CODES:
            raise ValueError(f"weights are {self.data.dtype}; they must be one of {', '.join(map(str, _CODES))}")
        return _CODES[self.data.dtype]

    @property
    def depth(self) -> int:
        """Return K."""
        return self.data.shape[2] * (2 if self.code in (Code.FP4, Code.INT4) else 1)

    @property
    def group(self) -> int:
        """Return the depth that shares a scale: all of it where there is none."""
        return self.depth if self.scale is None else self.depth // self.scale.shape[2]


class Rows(NamedTuple):
    """The rows of a product: value = data * scale.

    ``data``: (rows, K), bfloat16, float16, float32, float8_e4m3fn or int8, any strides. ``scale``: (rows, G), any strides: float32, or float8_e8m0fnu
    for 32 of the depth each. None for rows that are not quantised.
    """

    data: Tensor
    scale: Tensor | None = None

    @property
    def group(self) -> int:
        """Return the depth that shares a scale."""
        return self.data.shape[1] if self.scale is None else self.data.shape[1] // self.scale.shape[1]


class Formula(IntEnum):
    """What becomes of the columns, g and u where there is a pair, x where not; the numbers are those that kernels know."""

    NOTHING = 0  # x
    GATED = 1  # activation.spec.Gate
    STEP = 2  # min(silu(g), limit) * clamp(u, -limit, limit)
    GELU = 3  # gelu(g) * u, exact
    GELU_TANH = 4  # gelu(g) * u, approximated by tanh
    RELU2 = 5  # relu(x) squared

    @property
    def is_paired(self) -> bool:
        """Say whether columns come in pairs of gate and up."""
        return self not in (Formula.NOTHING, Formula.RELU2)


class Epilogue(NamedTuple):
    """A formula with its parameters; those that it does not name do not matter."""

    formula: Formula
    alpha: float = 1.0
    limit: float = float("inf")
    shift: float = 0.0


NOTHING: Final = Epilogue(Formula.NOTHING)


def check(rows: Rows, matrix: Matrix) -> None:
    """Raise ValueError for rows and weights that are not multiplied with each other."""
    code, depth, dtype = matrix.code, matrix.depth, rows.data.dtype
    if matrix.data.stride(0) > _MOST:
        raise ValueError(f"the weights of one expert span {matrix.data.stride(0)} entries; within one, kernels count to {_MOST}")
    if rows.data.shape[1] != depth:
        raise ValueError(f"rows are {dtype} of width {rows.data.shape[1]}, but the weights take rows of width {depth}")
    if rows.scale is None:
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise ValueError(f"rows are {dtype} without scales; these are bfloat16, float16 or float32")
    elif rows.scale.dtype == torch.float8_e8m0fnu:
        if dtype != torch.float8_e4m3fn or rows.group != MX_GROUP:
            raise ValueError(f"rows with e8m0 scales are float8_e4m3fn in groups of {MX_GROUP}; these are {dtype} in groups of {rows.group}")
        if code is Code.DENSE:
            raise ValueError(f"rows with e8m0 scales are multiplied by weights in at most eight bits; these are {matrix.data.dtype}")
    elif (dtype, code) not in ((torch.float8_e4m3fn, Code.FP8), (torch.int8, Code.INT8)):
        raise ValueError(f"{dtype} rows with float32 scales are multiplied by weights of the same dtype; these are {matrix.data.dtype}")


def scales_codes(rows: torch.dtype, matrix: Matrix) -> bool:
    """Say whether the weights' scales multiply codes, and not sums, before rows of that dtype: powers of two, wherever the product can hold each."""
    return matrix.scale is not None and matrix.scale.dtype == torch.float8_e8m0fnu and rows != torch.float16

"""Weights of groups as a product reads them, in float32, and their scales."""

from typing import final

import attrs
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import DtypeArg, NpuDtype

from .dtypes import resolve
from .misuse import Judge, Reason, require
from .mx import FORMATS, MxFormat, decode, scale_values
from .numerics import carried_scale, is_quant_param, split_last, unpack_int4

_PAIR = 64  # columns of two MX blocks


def is_transposed(weight: Tensor) -> bool:
    """Return whether the strides of the last two axes are those of a transposed view, which is all that an operator looks at."""
    return weight.dim() > 1 and weight.stride(-2) == 1 and weight.stride(-1) == weight.size(-2)


def int4_weight(weight: Tensor) -> Tensor:
    """Return int32 words as integers: packed along N [.., K, N / 8], or along K where the strides are transposed [.., K / 8, N]."""
    if is_transposed(weight):
        return unpack_int4(weight.transpose(-1, -2)).transpose(-1, -2)
    return unpack_int4(weight)


def fp4_weight(weight: Tensor, kind: MxFormat) -> Tensor:
    """Return fp4 bytes as values, packed along the axis that is contiguous."""
    if is_transposed(weight):
        return decode(weight.transpose(-1, -2), kind).transpose(-1, -2)
    return decode(weight, kind)


def mx_format(tensor: Tensor, said: DtypeArg | None) -> MxFormat:
    """Return the format of elements: what is said of fp4, the tensor's own dtype else."""
    kind = resolve(said) if said is not None else tensor.dtype
    require(kind in FORMATS, f"MX elements are fp8, or fp4 by their number, not {kind}")
    return FORMATS[kind]


def mx_scale_dtype(name: str, said: DtypeArg | None) -> None:
    """Refuse what is not torch_npu's number of e8m0: torch's own dtype is refused too."""
    require(not isinstance(said, torch.dtype) and said == NpuDtype.FLOAT8_E8M0FNU, f"{name} is {NpuDtype.FLOAT8_E8M0FNU!r}, not {said!r}")


def mx_rows(elements: Tensor, kind: MxFormat, scale: Tensor) -> Tensor:
    """Return rows [M, K] with their scale [M, K / 64, 2]."""
    values = decode(elements, kind)
    rows, columns = values.shape
    require(tuple(scale.shape) == (rows, -(-columns // _PAIR), 2), f"scales of rows are [{rows}, {-(-columns // _PAIR)}, 2], not {list(scale.shape)}")
    return values * scale_values(scale).flatten(1).repeat_interleave(32, 1)[:, :columns]


def mx_matrices(weight: Tensor, kind: MxFormat, scale: Tensor) -> Tensor:
    """Return matrices [E, K, N] with their scale [E, K / 64, N, 2]."""
    values = fp4_weight(weight, kind) if kind.levels is not None else weight.float()
    groups, inner, outer = values.shape
    shape = (groups, -(-inner // _PAIR), outer, 2)
    require(tuple(scale.shape) == shape, f"scales of weights are {list(shape)}, not {list(scale.shape)}")
    blocks = scale_values(scale).transpose(2, 3).flatten(1, 2)
    return values * blocks.repeat_interleave(32, 1)[:, :inner]


# ---- scales ----------------------------------------------------------------------------------------------------------------------------


@final
@attrs.frozen(eq=False)
class Scaled:
    """Integer matrices [E, K, N] and scales [E, G, N], float32."""

    matrices: Tensor
    scales: Tensor

    def product(self, x: Tensor, group: int) -> Tensor:
        """Return the product of rows with one matrix, scaled for each group of K: exact integers first."""
        matrix, scales = self.matrices[group].double(), self.scales[group].double()
        length = len(matrix) // len(scales)
        parts = matrix.reshape(len(scales), length, matrix.shape[1])
        return (torch.einsum("mgk,gkn->mgn", split_last(x.double(), length), parts) * scales).sum(1)

    def correction(self) -> Tensor:
        """Return 8 * sum_k W * scale [E, N]: what the bias of int8 by int4 must be."""
        scales = self.scales.repeat_interleave(self.matrices.shape[1] // self.scales.shape[1], 1)
        return 8 * (self.matrices * scales).sum(1)


def carried(judge: Judge, scale: Tensor) -> Tensor:
    """Return float32 scales that int64 carries; a quantisation parameter loses its lower bits and keeps its marks."""
    require(scale.dtype in (torch.int64, torch.uint64), f"the scale of int4 weights is int64 with fp32 bits, not {scale.dtype}")
    if is_quant_param(scale):
        judge.silent(Reason.SCALE_CARRIER, "this scale is of npu_trans_quant_param")
    return carried_scale(scale)


def per_group(judge: Judge, scale: Tensor, groups: int, outer: int, *, flat: bool) -> Tensor:
    """Return scales [E, N] or [E, G, N] as [E, G, N]. ``flat``: whether a single group has no axis of its own."""
    require(scale.shape[0] == groups and scale.shape[-1] == outer, f"scales are [{groups}, .., {outer}], not {list(scale.shape)}")
    if (scale.dim() == 2) != flat and (scale.dim() == 2 or scale.shape[1] == 1):
        judge.silent(Reason.SCALE_SHAPE, f"{list(scale.shape)}, where one group is {[groups, outer] if flat else [groups, 1, outer]}")
    return scale[:, None] if scale.dim() == 2 else scale

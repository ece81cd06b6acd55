"""Packing of weights and scales, and the dense product of packed weights."""

from typing import Protocol

from torch import Tensor

from .codes import AclFormat, DtypeArg


class PackingOps(Protocol):
    """What is done once, at load; and the dense sibling of the grouped matmul of float rows and int4 weights."""

    def npu_convert_weight_to_int4pack(self, weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
        """Pack int32 values -8..7 [.., N] to int32 [.., N / 8]: element 8 c + i in bits 4 i .. 4 i + 3 of word c."""
        ...

    def npu_format_cast(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        acl_format: AclFormat,
        *,
        customize_dtype: DtypeArg | None = None,
        input_dtype: DtypeArg | None = None,
    ) -> Tensor:
        """Return the tensor in another physical format: same shape and dtype. A transposed view becomes contiguous."""
        ...

    def npu_trans_quant_param(self, scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
        """Return int64 of the upper 19 bits of each fp32 scale, bit 46, and an offset in bits 37 to 45. Not the int64 that holds fp32 bits."""
        ...

    def npu_weight_quant_batchmatmul(
        self,
        x: Tensor,
        weight: Tensor,
        antiquant_scale: Tensor,
        antiquant_offset: Tensor | None = None,
        quant_scale: Tensor | None = None,
        quant_offset: Tensor | None = None,
        bias: Tensor | None = None,
        antiquant_group_size: int = 0,
        inner_precise: int = 0,
        weight_dtype: DtypeArg | None = None,
    ) -> Tensor:
        """Return ``x ((W + antiquant_offset) * antiquant_scale) + bias`` for int8 [K, N] or int4 int32 [K, N / 8]."""
        ...

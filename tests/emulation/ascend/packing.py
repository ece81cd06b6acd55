"""Packing, and the dense product of packed weights."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import AclFormat, DtypeArg

from .base import Emulation
from .dtypes import HALVES
from .groups import Span
from .misuse import Device, require
from .numerics import pack_int4, quant_param
from .products import Antiquantized
from .weights import int4_weight


class PackingEmulation(Emulation):
    """What is done at load."""

    def npu_convert_weight_to_int4pack(self, weight: Tensor, inner_k_tiles: int = 0) -> Tensor:
        """Pack int32 values."""
        axes = (2, 3) if self.judge.device is Device.A5 else (2,)
        require(weight.dtype == torch.int32 and weight.is_contiguous(), f"weight is int32 and contiguous, not {weight.dtype}")
        require(weight.dim() in axes and weight.shape[-1] % 8 == 0, f"weight has {axes} axes, the last a multiple of 8, not {list(weight.shape)}")
        require(bool(((weight >= -8) & (weight <= 7)).all()), "int4 is -8 to 7")
        return pack_int4(weight)

    def npu_format_cast(
        self,
        input: Tensor,  # noqa: A002 - the schema's name
        acl_format: AclFormat,
        *,
        customize_dtype: DtypeArg | None = None,
        input_dtype: DtypeArg | None = None,
    ) -> Tensor:
        """Return the tensor; a format is a matter of the device. A view is materialised."""
        AclFormat(acl_format)
        return input.contiguous()

    def npu_trans_quant_param(self, scale: Tensor, offset: Tensor | None = None, round_mode: int | None = 0) -> Tensor:
        """Pack scales and offsets."""
        require(scale.dtype == torch.float32, f"scale is fp32, not {scale.dtype}")
        return quant_param(scale, offset)

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
        """Multiply float rows by integer weights."""
        require(x.dtype in HALVES, f"x is fp16 or bf16, not {x.dtype}")
        require(quant_scale is None and quant_offset is None, "quantised results are not emulated")
        matrix = int4_weight(weight) if weight.dtype == torch.int32 else weight.float()
        length = antiquant_group_size
        require(
            length == 0 or (length % 32 == 0 and 32 <= length < matrix.shape[0]), f"antiquant_group_size is a multiple of 32 below K, not {length}"
        )
        scale = antiquant_scale.float().view(-1, matrix.shape[1])
        offset = torch.zeros_like(scale) if antiquant_offset is None else antiquant_offset.float().view(-1, matrix.shape[1])
        product = Antiquantized.of(x, matrix[None], scale[None], offset[None], None if bias is None else bias.view(1, -1))
        return product.of_group(Span(0, 0, len(x)))

"""The grouped product, by what it multiplies."""

import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import DtypeArg, GroupAxis, GroupListType, MatmulActivation, SplitItem
from tests.emulation.hazards import poison_, poisoned

from .base import Emulation
from .dtypes import FLOATS, FP4, HALVES, torch_dtype
from .groups import spans
from .misuse import Device, Reason, require
from .numerics import quant_param_parts, unpack_int4
from .products import W4A8, Antiquantized, Carrier, Channel, Microscaled, Operands, Plain, Product, Token
from .weights import Scaled, carried, int4_weight, is_transposed, mx_format, mx_matrices, mx_rows, mx_scale_dtype, per_group

_MAX_GROUPS = 1024
_MAX_SEPARATE = 128
_MAX_AXIS = 65536


def _one(name: str, tensors: list[Tensor] | None) -> Tensor | None:
    """Return the only tensor of a list; an empty list is as good as none."""
    if not tensors:
        return None
    require(len(tensors) == 1, f"{name} has one tensor, not {len(tensors)}")
    return tensors[0]


class GroupedMatmulEmulation(Emulation):
    """npu_grouped_matmul for one x and groups along its rows."""

    def npu_grouped_matmul(
        self,
        x: list[Tensor],
        weight: list[Tensor],
        *,
        bias: list[Tensor] | None = None,
        scale: list[Tensor] | None = None,
        offset: list[Tensor] | None = None,
        antiquant_scale: list[Tensor] | None = None,
        antiquant_offset: list[Tensor] | None = None,
        per_token_scale: list[Tensor] | None = None,
        group_list: Tensor | None = None,
        activation_input: list[Tensor] | None = None,
        activation_quant_scale: list[Tensor] | None = None,
        activation_quant_offset: list[Tensor] | None = None,
        split_item: SplitItem | None = SplitItem.SEPARATE,
        group_type: GroupAxis | None = None,
        group_list_type: GroupListType | None = GroupListType.CUMSUM,
        act_type: MatmulActivation | None = MatmulActivation.NONE,
        tuning_config: list[int] | None = None,
        output_dtype: DtypeArg | None = None,
        x_dtype: DtypeArg | None = None,
        weight_dtype: DtypeArg | None = None,
        scale_dtype: DtypeArg | None = None,
        per_token_scale_dtype: DtypeArg | None = None,
    ) -> list[Tensor]:
        """Return one [M, N] in a list; rows of no group are poison."""
        require(group_type is not None, "group_type must be given")
        if group_type != GroupAxis.M:
            raise NotImplementedError(f"groups along {group_type!r} are not emulated")
        require(
            split_item in (SplitItem.SINGLE, SplitItem.SINGLE_OF_SINGLE_INPUT),
            f"one x with groups along M has one result: split_item 2 or 3, not {split_item}",
        )
        require(act_type in (None, MatmulActivation.NONE) or per_token_scale is not None, "act_type is for rows that are scaled per token")
        if act_type:
            raise NotImplementedError(f"{act_type!r} is not emulated")
        assert group_list is not None, "group_list is optional for other group types alone"
        rows = x[0]
        require(len(x) == 1 and rows.dim() == 2, "x is one matrix")
        require(len(weight) <= _MAX_SEPARATE, f"at most {_MAX_SEPARATE} weights, not {len(weight)}")
        matrices = torch.stack(weight) if weight[0].dim() == 2 else weight[0]
        if weight[0].dim() == 2 and is_transposed(weight[0]):
            matrices = torch.stack([matrix.T for matrix in weight]).transpose(1, 2)
        require(matrices.shape[0] <= _MAX_GROUPS and max(matrices.shape[1:]) < _MAX_AXIS, f"sizes of weights: {list(matrices.shape)}")
        operands = Operands(
            x=rows,
            weight=matrices,
            bias=_one("bias", bias),
            scale=_one("scale", scale),
            per_token_scale=_one("per_token_scale", per_token_scale),
            antiquant_scale=_one("antiquant_scale", antiquant_scale),
            antiquant_offset=_one("antiquant_offset", antiquant_offset),
            x_dtype=x_dtype,
            weight_dtype=weight_dtype,
            scale_dtype=scale_dtype,
            per_token_scale_dtype=per_token_scale_dtype,
        )
        kind = GroupListType(group_list_type or 0)
        product = self._product(operands, None if output_dtype is None else torch_dtype(output_dtype, rows.dtype))
        require(kind != GroupListType.PAIRS or (rows.dtype == matrices.dtype == torch.int8), "pairs are for int8 by int8 alone")
        self.judge.limit(
            kind != GroupListType.PAIRS or self.judge.device in (Device.A2, Device.A3), f"pairs are of A2 and A3, not {self.judge.device.value}"
        )
        if isinstance(product, W4A8) and kind != GroupListType.COUNT:
            self.judge.silent(Reason.COUNTS_ALWAYS, f"{kind!r} was said")
            kind = GroupListType.COUNT
        result = poisoned((len(rows), product.columns), product.dtype)
        for span in spans(self.judge, self.lists, group_list, kind, matrices.shape[0], len(rows)):
            if span.stop > span.start:
                result[span.start : span.stop] = product.of_group(span)
        if isinstance(product, W4A8):
            poison_(rows)  # the kernel splits x where it lies
        return [result]

    def _product(self, operands: Operands, out: torch.dtype | None) -> Product:
        """Choose by the dtypes of x and weight, as the operator does."""
        x, weight = operands.x.dtype, operands.weight.dtype
        if x in FLOATS and weight == x:
            return self._plain(operands, out)
        if x == torch.int8 and weight == torch.int8:
            return self._int8(operands, out)
        if x == torch.int8 and weight == torch.int32:
            return self._w4a8(operands, out)
        if x == torch.int32 and weight == torch.int32:
            return self._w4a4(operands, out)
        if x in HALVES and weight in (torch.int8, torch.int32):
            return self._antiquantized(operands)
        if operands.per_token_scale_dtype is not None:
            return self._microscaled(operands, out)
        require(False, f"no product of {x} and {weight}")
        raise AssertionError

    def _plain(self, operands: Operands, out: torch.dtype | None) -> Product:
        x, bias = operands.x.dtype, operands.bias
        wanted = torch.float32 if x == torch.bfloat16 else x
        require(bias is None or bias.dtype == wanted, f"the bias of {x} rows is {wanted}, not {bias.dtype if bias is not None else None}")
        return Plain(operands.x, operands.weight.float(), bias, out or x)

    def _int8(self, operands: Operands, out: torch.dtype | None) -> Product:
        scale, tokens, bias = operands.scale, operands.per_token_scale, operands.bias
        groups, _, outer = operands.weight.shape
        if scale is None:
            require(out == torch.int32 and tokens is None and bias is None, f"int8 rows without scales give int32, not {out}")
            return Channel(operands.x, operands.weight, None, torch.ones(groups, outer), None, torch.int32)
        require(tuple(scale.shape) == (groups, outer), f"scales of int8 weights are {[groups, outer]}, not {list(scale.shape)}")
        if tokens is None:
            values, offset = quant_param_parts(scale) if scale.dtype == torch.int64 else (scale.float(), None)
            return Channel(operands.x, operands.weight, bias, values, offset, out or torch.int8)
        wanted = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float16}
        require(scale.dtype in wanted and out == wanted[scale.dtype], f"a bf16 scale gives bf16 and an fp32 scale fp16, not {scale.dtype} and {out}")
        return Token(operands.x, operands.weight, bias, scale.float(), operands.token_scales(), wanted[scale.dtype])

    def _w4a8(self, operands: Operands, out: torch.dtype | None) -> Product:
        matrices = int4_weight(operands.weight)
        groups, inner, outer = matrices.shape
        require(out in HALVES, f"int8 by int4 gives fp16 or bf16, not {out}")
        require(outer % 8 == 0, f"N is a multiple of 8, not {outer}")
        require(operands.scale is not None and operands.per_token_scale is not None, "int8 by int4 needs a scale of weights and of rows")
        assert operands.scale is not None
        scales = per_group(self.judge, carried(self.judge, operands.scale), groups, outer, flat=False)
        self.judge.limit(scales.shape[1] == 1 or inner == 256 * scales.shape[1], f"groups along K have 256, not {inner / scales.shape[1]}")
        bias = operands.bias
        if bias is None:
            self.judge.silent(Reason.BIAS_MISSING, "no bias was given")
            bias = torch.zeros(groups, outer)
        require(
            bias.dtype == torch.float32 and tuple(bias.shape) == (groups, outer),
            f"the bias is fp32 {[groups, outer]}, not {bias.dtype} {list(bias.shape)}",
        )
        weight = Scaled(matrices, scales)
        if not torch.allclose(bias, weight.correction(), rtol=1e-2, atol=1e-3 * float(scales.abs().max()) * inner):
            self.judge.silent(Reason.BIAS_MISSING, "the bias is another")
        return W4A8(operands.x, weight, bias, operands.token_scales(), out or torch.bfloat16)

    def _w4a4(self, operands: Operands, out: torch.dtype | None) -> Product:
        matrices = int4_weight(operands.weight)
        groups, _, outer = matrices.shape
        require(out in HALVES, f"int4 by int4 gives fp16 or bf16, not {out}")
        require(operands.bias is None, "int4 by int4 takes no bias")
        require(operands.scale is not None, "int4 by int4 needs a scale of weights")
        assert operands.scale is not None
        scales = per_group(self.judge, carried(self.judge, operands.scale), groups, outer, flat=True)
        tokens = None if operands.per_token_scale is None else operands.token_scales()
        return Carrier(unpack_int4(operands.x), Scaled(matrices, scales), tokens, out or torch.bfloat16)

    def _antiquantized(self, operands: Operands) -> Product:
        packed = operands.weight.dtype == torch.int32
        matrices = int4_weight(operands.weight) if packed else operands.weight.float()
        groups, _, outer = matrices.shape
        scale, offset = operands.antiquant_scale, operands.antiquant_offset
        require(scale is not None and offset is not None, "float rows by integer weights need antiquant_scale and antiquant_offset, zeros too")
        assert scale is not None
        assert offset is not None
        require(scale.dtype == offset.dtype == operands.x.dtype, f"scale and offset have x's dtype, not {scale.dtype} and {offset.dtype}")
        require(packed or scale.dim() == 2, "int8 weights have a scale for each channel alone")
        require(
            scale.shape == offset.shape and (scale.shape[0], scale.shape[-1]) == (groups, outer),
            f"scales {list(scale.shape)}, offsets {list(offset.shape)}",
        )
        parts = [(part[:, None] if part.dim() == 2 else part).float() for part in (scale, offset)]
        return Antiquantized.of(operands.x, matrices, parts[0], parts[1], operands.bias)

    def _microscaled(self, operands: Operands, out: torch.dtype | None) -> Product:
        self.judge.limit_mx()
        mx_scale_dtype("per_token_scale_dtype", operands.per_token_scale_dtype)
        by_antiquant = operands.x.dtype == torch.float8_e4m3fn and operands.weight_dtype in FP4
        scale = operands.antiquant_scale if by_antiquant else operands.scale
        if not by_antiquant:
            mx_scale_dtype("scale_dtype", operands.scale_dtype)
        require(scale is not None and operands.per_token_scale is not None, "MX needs scales of weights and of rows")
        require(not by_antiquant or operands.scale is None, "fp4 weights of fp8 rows have their scale in antiquant_scale")
        assert scale is not None
        assert operands.per_token_scale is not None
        rows = mx_rows(operands.x, mx_format(operands.x, operands.x_dtype), operands.per_token_scale)
        matrices = mx_matrices(operands.weight, mx_format(operands.weight, operands.weight_dtype), scale)
        require(out in HALVES, f"MX gives fp16 or bf16, not {out}")
        return Microscaled(rows, matrices, out or torch.bfloat16)

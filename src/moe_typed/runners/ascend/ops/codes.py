"""What the operators' schemas call an int, by name.

Each number is the operator's own. The same number means different things in different operators, hence one class for each numbering, and no
default: where siblings disagree, whoever calls says which one is meant. Sources: the schemas and documents of torch_npu 2.14 and of op-plugin,
unless a class names another.
"""

import enum
from typing import Final, Literal, TypeAlias

import torch

DtypeArg: TypeAlias = torch.dtype | int
"""A dtype where the schema says int: torch turns a dtype into its ScalarType number; an ``NpuDtype`` is a number that torch does not know."""


class NpuDtype(enum.IntEnum):
    """Number the dtypes that only torch_npu knows (``torch_npu.<name>``)."""

    INT4 = 285
    HIFLOAT8 = 290
    FLOAT8_E5M2 = 291
    FLOAT8_E4M3FN = 292
    FLOAT8_E8M0FNU = 293  # the grouped matmuls refuse torch.float8_e8m0fnu for their scales and take this number alone
    FLOAT4_E2M1FN_X2 = 296
    FLOAT4_E1M2FN_X2 = 297


class TorchDtypeCode(enum.IntEnum):
    """Number the dtypes as torch's ScalarType does, which is what a dtype becomes where the schema says int."""

    UINT8 = 0
    INT8 = 1
    INT32 = 3
    INT64 = 4
    FLOAT16 = 5
    FLOAT32 = 6
    BFLOAT16 = 15
    QUINT4X2 = 16  # the quantise operators: int4, eight to an int32
    FLOAT8_E5M2 = 23
    FLOAT8_E4M3FN = 24


class AclFormat(enum.IntEnum):
    """Name a physical format of a tensor. Shape and dtype stay what they are."""

    ND = 2  # as torch lays it out
    FRACTAL_NZ = 29  # tiles of 16 rows


# ---- group lists -----------------------------------------------------------------------------------------------------------------------


class GroupListType(enum.IntEnum):
    """Say what a group list holds, as the grouped matmuls, routing v2, and the distributed dispatch number it. Siblings differ in their defaults."""

    CUMSUM = 0  # [E]: rows of groups 0..e, the last is the total
    COUNT = 1  # [E]: rows of group e
    PAIRS = 2  # [E, 2]: group index and rows; ends at a pair without rows


class ZeroLedGroupListType(enum.IntEnum):
    """Say what a group list holds, as sgl_kernel_npu's swiglu_quant and situ number it."""

    CUMSUM_FROM_ZERO = 0  # [E + 1]: 0, then the rows of groups 0..e. An [E] list is read past its end
    COUNT = 1


class GroupQuantListType(enum.IntEnum):
    """Say what a group list holds, as the extension swiglu_group_quant numbers it: its 0 is every sibling's 1."""

    COUNT = 0


# ---- routing ---------------------------------------------------------------------------------------------------------------------------


class RowIndexType(enum.IntEnum):
    """Say what routing v2's expanded_row_idx maps. Both have one int32 for each route."""

    GATHER = 0  # [t * K + j] is the row of the route; -1 for a route out of the active range
    SCATTER = 1  # [row] is the route t * K + j; undefined after the active rows


class RoutingPadMode(enum.IntEnum):
    """Say whether routing v2 pads each expert to its capacity."""

    DROPLESS = 0
    DROP_PAD = 1


class RoutingQuantMode(enum.IntEnum):
    """Say how the routing operators quantise the rows that they gather. Only v2 knows those from MXFP8_E5M2 on."""

    NONE = -1
    STATIC = 0  # int8, one scale and one offset
    DYNAMIC = 1  # int8, one fp32 scale a row
    MXFP8_E5M2 = 2  # e8m0 scale per 32 columns
    MXFP8_E4M3 = 3
    BLOCK_POW2_E5M2 = 4  # a power of two in fp32 per 128 columns
    BLOCK_POW2_E4M3 = 5
    HIFLOAT8 = 6
    HIFLOAT8_TENSOR = 7
    HIFLOAT8_TOKEN = 8
    MXFP4_E2M1 = 9
    BLOCK_E5M2 = 11  # fp32 per 1 x 128
    BLOCK_E4M3 = 12
    INT4_DYNAMIC = 13
    BLOCK_POW2_CLAMPED_E5M2 = 14  # as 4, with amax >= 1e-4
    BLOCK_POW2_CLAMPED_E4M3 = 15
    MXFP8_CLAMPED_E5M2 = 16  # as 2, with amax >= 1e-4
    MXFP8_CLAMPED_E4M3 = 17


class FinalizeMode(enum.IntEnum):
    """Say in which order npu_moe_finalize_routing reads the row index (its drop_pad_mode), and whether rows are padded to a capacity."""

    K_MAJOR = 0  # j * T + t: what routing v1 emits
    K_MAJOR_PADDED = 1  # rows [E, C, H]; -1 for a dropped route
    ROW_MAJOR = 2  # t * K + j: what routing v2 emits
    ROW_MAJOR_PADDED = 3


class GatingNorm(enum.IntEnum):
    """Say how npu_moe_gating_top_k makes scores of logits."""

    SOFTMAX = 0
    SIGMOID = 1


class GroupSelect(enum.IntEnum):
    """Say how npu_moe_gating_top_k scores a group of experts."""

    MAX = 0
    TOP2_SUM = 1


class Renorm(enum.IntEnum):
    """Say whether npu_moe_gating_top_k normalises the chosen scores again. Kernels of 2025 refuse ALWAYS."""

    AS_NORM = 0  # sigmoid scores are normalised, softmax scores are not
    ALWAYS = 1


# ---- matmuls and activations -----------------------------------------------------------------------------------------------------------


class SplitItem(enum.IntEnum):
    """Say how many outputs a grouped matmul has: 0 and 1 are one for each weight, 2 and 3 a single one."""

    SEPARATE = 0
    SEPARATE_OF_SINGLE_INPUT = 1
    SINGLE = 2
    SINGLE_OF_SINGLE_INPUT = 3


class GroupAxis(enum.IntEnum):
    """Name the axis along which a grouped matmul is split (its group_type), which must be said."""

    NONE = -1
    M = 0
    K = 2  # for floating matrices alone


class MatmulActivation(enum.IntEnum):
    """Name what npu_grouped_matmul applies at its end (act_type), to rows quantised per token alone."""

    NONE = 0
    RELU = 1
    GELU_TANH = 2
    FAST_GELU = 4
    SILU = 5


class FusedDequant(enum.IntEnum):
    """Say how npu_grouped_matmul_swiglu_quant_v2 scales its weights."""

    PER_CHANNEL = 0
    PER_GROUP = 1
    MX = 2


class FusedQuant(enum.IntEnum):
    """Say how npu_grouped_matmul_swiglu_quant_v2 quantises its result."""

    PER_TOKEN = 0
    MX = 2


class SwigluQuantMode(enum.IntEnum):
    """Say how the swiglu operators quantise. STATIC is their default, and gives no scale."""

    STATIC = 0
    DYNAMIC = 1


class SwigluMode(enum.IntEnum):
    """Name the formula of npu_dequant_swiglu_quant."""

    HALVES = 0  # silu(one half) * the other half
    INTERLEAVED_CLAMPED = 1  # gate in even columns, clamped, scaled by alpha, bias added to up
    HALVES_CLAMPED = 2


class MxScaleAlg(enum.IntEnum):
    """Name the rule for a block's exponent. Routing's MX modes follow CEIL, npu_dynamic_mx_quant's default is FLOOR."""

    FLOOR = 0  # floor(log2 amax) - emax: the OCP rule; saturates
    CEIL = 1  # ceil(log2(amax / max_normal)); fp8 alone


RoundMode: TypeAlias = Literal["rint", "floor", "round"]
DynamicQuantMode: TypeAlias = Literal["pertoken", "pertensor", "perchannel"]

# ---- ranks -----------------------------------------------------------------------------------------------------------------------------


class DispatchQuantMode(enum.IntEnum):
    """Say how npu_moe_distribute_dispatch_v2 quantises the rows that it sends."""

    NONE = 0
    DYNAMIC = 2  # int8, one fp32 scale a row


class CombineQuantMode(enum.IntEnum):
    """Say how npu_moe_distribute_combine_v2 quantises the rows that it sends back."""

    NONE = 0
    INT8 = 2


class ExpertShardType(enum.IntEnum):
    """Say where the ranks of shared experts are."""

    SHARED_FIRST = 0


BufferQuantMode: TypeAlias = Literal["bf16", "int8", "mx_fp8_e4m3", "mx_fp8_e5m2", "mx_fp4_e2m1"]
"""The quant_mode of the NPU deep_ep's normal dispatch, where the installed one has it."""

ASSIST_INFO_PER_ROW: Final = 128
"""int32 elements of npu_moe_distribute_dispatch_v2's assist_info_for_combine for each row of its result (torch_npu 2.14, meta registration)."""

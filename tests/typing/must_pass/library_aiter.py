"""AITER as an adapter calls it: enums by name, a quantiser by its kind, and one call for several versions."""

from typing import TYPE_CHECKING, Literal, assert_type

from aiter import ActivationType, QuantType, dtypes, get_hip_quant, get_torch_quant
from aiter.fused_moe import fused_moe, moe_sorting
from aiter.ops.shuffle import shuffle_scale, shuffle_weight, shuffle_weight_a16w4
from aiter.utility.fp4_utils import e8m0_shuffle, f32_to_mx_e8m0_scale
from aiter.utility.mx_types import MxDtype, MxScaleRoundMode
from torch import Tensor

if TYPE_CHECKING:
    from aiter._versions import FusedMoeHead, FusedMoeOutput, FusedMoeWheel017, GetHipQuantWheel017
    from aiter.ops.quant import HipQuant


def one_call(hidden: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor, mask: Tensor | None, output: Tensor) -> Tensor:
    return fused_moe(
        hidden,
        w1,
        w2,
        weights,
        ids,
        expert_mask=mask,
        activation=ActivationType.Swiglu,
        quant_type=QuantType.per_1x32,
        gate_mode="interleave",
        dtype=dtypes.bf16,
        output=output,
    )


def the_newest_serves_all_versions() -> "tuple[FusedMoeOutput, FusedMoeHead, FusedMoeWheel017]":
    return fused_moe, fused_moe, fused_moe


def members_know_their_values() -> None:
    assert_type(QuantType.per_1x32.value, Literal[3])
    assert_type(ActivationType.No.value, Literal[-1])
    assert_type(QuantType(3).value, int)
    assert_type(QuantType.per_1x128.name, str)


def mxfp8(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    return get_hip_quant(QuantType.per_1x32)(x, quant_dtype=dtypes.fp8, num_rows=count, scale_type=dtypes.fp8_e8m0)


def transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    return get_hip_quant(QuantType.per_1x128)(x, quant_dtype=dtypes.fp8, transpose_scale=True)


def static(x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return get_hip_quant(QuantType.per_Tensor)(x, scale, dtypes.fp8)


def nothing(x: Tensor) -> tuple[Tensor, None]:
    return get_hip_quant(QuantType.No)(x)


def any_kind(kind: QuantType, x: Tensor) -> tuple[Tensor, Tensor | None]:
    quantize: HipQuant = get_hip_quant(kind)
    return quantize(x, quant_dtype=dtypes.fp8)


def on_the_host(x: Tensor) -> tuple[Tensor, Tensor]:
    return get_torch_quant(QuantType.per_1x32)(x, shuffle=True, round_mode=MxScaleRoundMode.Even)


def of_the_wheel(get: "GetHipQuantWheel017", x: Tensor) -> tuple[Tensor, Tensor]:
    return get(QuantType.per_1x32)(x, shuffle=True)


def shuffled(weight: Tensor) -> bool:
    result: Tensor = shuffle_weight(weight, (16, 16))
    del result
    return shuffle_weight(weight).is_shuffled and shuffle_weight_a16w4(weight, 16, True).is_shuffled


def scales(scale: Tensor, amax: Tensor) -> Tensor:
    assert_type(e8m0_shuffle(None), None)
    assert_type(shuffle_scale(scale), Tensor)
    return e8m0_shuffle(f32_to_mx_e8m0_scale(amax, mode=MxScaleRoundMode.RoundUp, dtype=MxDtype.FP8_E4M3))


def sorted_routes(ids: Tensor, weights: Tensor) -> Tensor:
    sorted_ids, _, _, _, _ = moe_sorting(ids, weights, 8, 64, dtypes.bf16, expert_mask=None)
    assert_type(moe_sorting(ids, weights, 8, 64, dtypes.bf16, output_aux=True), tuple[Tensor, ...])
    return sorted_ids

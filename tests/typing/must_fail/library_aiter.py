"""AITER called with what it would misread, or with what one of its versions lacks."""

from typing import TYPE_CHECKING

from aiter import ActivationType, QuantType, dtypes, get_hip_quant
from aiter.fused_moe import fused_moe
from aiter.ops.shuffle import shuffle_weight
from torch import Tensor

if TYPE_CHECKING:
    from aiter._versions import FusedMoeHead, FusedMoeOutput, FusedMoeWheel017, GetHipQuantWheel017


def int_for_an_activation(x: Tensor) -> None:
    fused_moe(x, x, x, x, x, activation=0)
    # E: Argument "activation" to "fused_moe" has incompatible type "int"; expected "ActivationType[int]"
    # P: "Literal[0]" cannot be assigned to parameter "activation" of type "ActivationType[int]"


def value_for_a_quant_type(x: Tensor) -> None:
    fused_moe(x, x, x, x, x, quant_type=QuantType.per_Token.value)
    # E: Argument "quant_type" to "fused_moe" has incompatible type "Literal[2]"; expected "QuantType[int]"
    # P: "Literal[2]" cannot be assigned to parameter "quant_type" of type "QuantType[int]"


def one_enum_for_another(x: Tensor) -> None:
    fused_moe(x, x, x, x, x, activation=QuantType.No)
    # E: Argument "activation" to "fused_moe" has incompatible type "QuantType[Literal[0]]"; expected "ActivationType[int]"
    # P: "QuantType[Literal[0]]" is not assignable to "ActivationType[int]"


def number_for_a_quantiser() -> None:
    get_hip_quant(3)
    # E: No overload variant of "get_hip_quant" matches argument type "int"
    # P: No overloads for "get_hip_quant" match the provided arguments
    # P: "Literal[3]" cannot be assigned to parameter "qType"


def unknown_gate_mode(x: Tensor) -> None:
    fused_moe(x, x, x, x, x, gate_mode="interleaved")
    # E: Argument "gate_mode" to "fused_moe" has incompatible type "Literal['interleaved']"
    # P: "Literal['interleaved']" cannot be assigned to parameter "gate_mode"


def not_a_member() -> None:
    assert ActivationType.Relu
    # E: "type[ActivationType[_V_co]]" has no attribute "Relu"
    # P: Cannot access attribute "Relu" for class "type[ActivationType[_V_co@ActivationType]]"
    # P: Type of "Relu" is unknown


def scale_type_of_another_quantiser(x: Tensor) -> None:
    get_hip_quant(QuantType.per_Token)(x, scale_type=dtypes.fp8_e8m0)
    # E: Unexpected keyword argument "scale_type" for "__call__" of "PerTokenQuantHip"
    # P: No parameter named "scale_type"


def static_scale_of_a_dynamic_quantiser(x: Tensor) -> None:
    get_hip_quant(QuantType.per_1x32)(x, x)
    # E: Argument 2 to "__call__" of "Per1x32QuantHip" has incompatible type "Tensor"; expected "None"
    # P: "Tensor" cannot be assigned to parameter "scale" of type "None"


def old_quantiser_told_its_scales(get: "GetHipQuantWheel017", x: Tensor) -> None:
    get(QuantType.per_1x32)(x, scale_type=dtypes.fp8_e8m0)
    # E: Unexpected keyword argument "scale_type" for "__call__" of "Per1x32QuantHipWheel017"
    # P: No parameter named "scale_type"


def gate_mode_of_the_wheel(moe: "FusedMoeWheel017", x: Tensor) -> None:
    moe(x, x, x, x, x, gate_mode="interleave")
    # E: Unexpected keyword argument "gate_mode" for "__call__" of "FusedMoeWheel017"
    # P: No parameter named "gate_mode"


def older_for_newer(moe: "FusedMoeHead") -> "FusedMoeOutput":
    return moe
    # E: Incompatible return value type (got "FusedMoeHead", expected "FusedMoeOutput")
    # P: Type "FusedMoeHead" is not assignable to return type "FusedMoeOutput"


def wheel_for_head(moe: "FusedMoeWheel017") -> "FusedMoeHead":
    return moe
    # E: Incompatible return value type (got "FusedMoeWheel017", expected "FusedMoeHead")
    # P: Type "FusedMoeWheel017" is not assignable to return type "FusedMoeHead"


def shuffled_no_more(weight: Tensor) -> bool:
    return shuffle_weight(weight).clone().is_shuffled
    # E: "Tensor" has no attribute "is_shuffled"
    # E: Returning Any from function declared to return "bool"
    # P: Cannot access attribute "is_shuffled" for class "Tensor"
    # P: Type of "is_shuffled" is unknown
    # P: Return type is unknown

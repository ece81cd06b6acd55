"""MoRI called with what it refuses, or unpacked as what it does not return."""

import torch
from mori.cco import Communicator
from mori.ops import EpDispatchCombineConfig, EpDispatchCombineOp, EpDispatchRoutingHandle
from mori.ops import dispatch_combine_v2 as v2
from torch import Tensor


def int_for_a_kernel() -> None:
    EpDispatchCombineConfig(torch.bfloat16, 0, 8, 7168, 0, 0, 2, 128, 32, 8, kernel_type=2)
    # E: Argument "kernel_type" to "EpDispatchCombineConfig" has incompatible type "int"; expected "EpDispatchCombineKernelType[int]"
    # P: "Literal[2]" cannot be assigned to parameter "kernel_type" of type "EpDispatchCombineKernelType[int]"


def unknown_transport() -> None:
    EpDispatchCombineConfig(torch.bfloat16, 0, 8, 7168, 0, 0, 2, 128, 32, 8, quant_type="fp8")
    # E: Argument "quant_type" to "EpDispatchCombineConfig" has incompatible type "Literal['fp8']"
    # P: "Literal['fp8']" cannot be assigned to parameter "quant_type"


def routing_that_was_not_asked_for(op: EpDispatchCombineOp, x: Tensor) -> None:
    _, _, _, _, _, _ = op.dispatch(x, x, None, x)
    # E: Need more than 5 values to unpack (6 expected)
    # P: Tuple size mismatch; expected 6 but received 5
    # P: Type of "_" is unknown


def routing_that_is_dropped(op: EpDispatchCombineOp, x: Tensor) -> None:
    _, _, _, _, _ = op.dispatch(x, x, None, x, return_routing=True)
    # E: Too many values to unpack (5 expected, 6 provided)
    # P: Tuple size mismatch; expected 5 but received 6


def replayed_and_asked_for(op: EpDispatchCombineOp, x: Tensor, routing: EpDispatchRoutingHandle) -> None:
    op.dispatch(x, x, None, x, routing=routing, return_routing=True)
    # E: No overload variant of "dispatch" of "EpDispatchCombineOp" matches argument types
    # P: No overloads for "dispatch" match the provided arguments
    # P: "Literal[True]" cannot be assigned to parameter "return_routing" of type "Literal[False]"


def scales_that_are_none(op: EpDispatchCombineOp, x: Tensor) -> Tensor:
    _, _, scales, _, _ = op.dispatch(x, x, x, x)
    return scales
    # E: Incompatible return value type (got "Tensor | None", expected "Tensor")
    # P: Type "Tensor | None" is not assignable to return type "Tensor"


def routing_of_the_first_for_the_second(op: v2.EpDispatchCombineOp, x: Tensor, routing: EpDispatchRoutingHandle) -> None:
    op.combine(x, routing=routing)
    # E: Argument "routing" to "combine" of "EpDispatchCombineOp" has incompatible type
    # P: "mori.ops.dispatch_combine.EpDispatchRoutingHandle" is not assignable to


def combine_without_routing(op: v2.EpDispatchCombineOp, x: Tensor) -> None:
    op.combine(x, x, x)
    # E: Missing named argument "routing" for "combine" of "EpDispatchCombineOp"
    # P: Argument missing for parameter "routing"


def transport_of_the_first(comm: Communicator) -> None:
    v2.EpDispatchCombineConfig(comm.rank, 8, 7168, 128, 32, 8, quant_type="fp4_blockwise")
    # E: Argument "quant_type" to "EpDispatchCombineConfig" has incompatible type "Literal['fp4_blockwise']"
    # P: "Literal['fp4_blockwise']" cannot be assigned to parameter "quant_type"

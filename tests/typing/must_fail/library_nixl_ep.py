"""NIXL EP called as if it were DeepEP."""

import nixl_ep
from torch import Tensor


def handle_of_five(buffer: nixl_ep.Buffer, x: Tensor) -> None:
    buffer.low_latency_combine(x, x, x, (x, x, 128, 7168, 256))
    # E: Argument 4 to "low_latency_combine" of "Buffer" has incompatible type "tuple[Tensor, Tensor, int, int, int]"
    # P: Tuple size mismatch; expected 4 but received 5


def handle_in_five_names(buffer: nixl_ep.Buffer, x: Tensor) -> None:
    _, _, handle, _, _ = buffer.dispatch(x, x, 128)
    _, _, _, _, _ = handle
    # E: Need more than 4 values to unpack (5 expected)
    # P: Tuple size mismatch; expected 5 but received 4
    # P: Type of "_" is unknown


def scales_of_bf16(buffer: nixl_ep.Buffer, x: Tensor) -> None:
    payload: tuple[Tensor, Tensor] = buffer.dispatch(x, x, 128, use_fp8=False)[0]
    # E: Incompatible types in assignment (expression has type "Tensor", variable has type "tuple[Tensor, Tensor]")
    # P: Type "Tensor" is not assignable to declared type "tuple[Tensor, Tensor]"
    del payload


def worst_tokens(buffer: nixl_ep.Buffer, x: Tensor) -> None:
    buffer.ht_dispatch(x, num_worst_tokens=128)
    # E: Unexpected keyword argument "num_worst_tokens" for overloaded function "ht_dispatch" of "Buffer"
    # E: No overload variant of "ht_dispatch" of "Buffer" matches argument types "Tensor", "int"
    # P: No overloads for "ht_dispatch" match the provided arguments
    # P: Argument types: (Tensor, Literal[128])

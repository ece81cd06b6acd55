"""Mooncake EP called with what it refuses, or as if it were DeepEP."""

from deep_ep import EPHandle
from mooncake.mooncake_elastic_buffer import ElasticBuffer
from mooncake.mooncake_ep_buffer import Buffer
from torch import Tensor
from torch.distributed import ProcessGroup


def payload_that_the_platform_chooses(buffer: Buffer, x: Tensor) -> Tensor:
    return buffer.dispatch(x, x, None, 128, 256, -1)[0]
    # E: Incompatible return value type (got "tuple[Tensor, Tensor] | Tensor", expected "Tensor")
    # P: Type "_Scaled | Tensor" is not assignable to return type "Tensor"


def without_a_timeout(buffer: Buffer, x: Tensor) -> None:
    buffer.dispatch(x, x, x, 128, 256)
    # E: No overload variant of "dispatch" of "Buffer" matches argument types "Tensor", "Tensor", "Tensor", "int", "int"
    # P: No overloads for "dispatch" match the provided arguments
    # P: Argument types: (Tensor, Tensor, Tensor, Literal[128], Literal[256])


def combine_in_the_order_of_deep_ep(buffer: Buffer, x: Tensor, handle: tuple[Tensor, Tensor, int, int, int]) -> None:
    buffer.combine(x, x, x, handle, -1, x)
    # E: Argument 4 to "combine" of "Buffer" has incompatible type "tuple[Tensor, Tensor, int, int, int]"; expected "Tensor | None"
    # E: Argument 6 to "combine" of "Buffer" has incompatible type "Tensor"; expected "tuple[Tensor, Tensor, int, int, int]"
    # P: "tuple[Tensor, Tensor, int, int, int]" cannot be assigned to parameter "active_ranks" of type "Tensor | None"
    # P: "Tensor" cannot be assigned to parameter "handle" of type "_Handle"


def zero_copy(buffer: Buffer, x: Tensor) -> None:
    buffer.combine(x, x, x, None, -1, (x, x, 128, 7168, 256), zero_copy=True)
    # E: Argument "zero_copy" to "combine" of "Buffer" has incompatible type "Literal[True]"; expected "Literal[False]"
    # P: "Literal[True]" cannot be assigned to parameter "zero_copy" of type "Literal[False]"


def one_reduction(group: ProcessGroup) -> None:
    ElasticBuffer(group, allow_multiple_reduction=False)
    # E: Argument "allow_multiple_reduction" to "ElasticBuffer" has incompatible type "Literal[False]"; expected "Literal[True]"
    # P: "Literal[False]" cannot be assigned to parameter "allow_multiple_reduction" of type "Literal[True]"


def handle_of_deep_ep(buffer: ElasticBuffer, x: Tensor, handle: EPHandle) -> None:
    buffer.combine(x, handle)
    # E: Argument 2 to "combine" of "ElasticBuffer" has incompatible type "deep_ep.buffers.elastic.EPHandle"
    # P: "deep_ep.buffers.elastic.EPHandle" is not assignable to "mooncake.mooncake_elastic_buffer.EPHandle"

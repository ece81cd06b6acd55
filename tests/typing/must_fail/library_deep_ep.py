"""DeepEP called with what it refuses, or unpacked as what it does not return."""

import deep_ep
from torch import Tensor


def dict_for_a_handle(buffer: deep_ep.Buffer, x: Tensor, handle: dict[str, Tensor]) -> None:
    buffer.combine(x, handle)
    # E: Argument 2 to "combine" of "Buffer" has incompatible type "dict[str, Tensor]"; expected "tuple[Tensor, ...]"
    # P: "dict[str, Tensor]" cannot be assigned to parameter "handle" of type "_Handle"


def handle_of_the_other_mode(buffer: deep_ep.Buffer, x: Tensor, handle: tuple[Tensor, ...]) -> None:
    buffer.low_latency_combine(x, x, x, handle)
    # E: Argument 4 to "low_latency_combine" of "Buffer" has incompatible type "tuple[Tensor, ...]"; expected "tuple[Tensor, Tensor, int, int, int]"
    # P: "tuple[Tensor, ...]" cannot be assigned to parameter "handle" of type "_LowLatencyHandle"


def scales_of_bf16(buffer: deep_ep.Buffer, x: Tensor) -> Tensor:
    payload, _, _, _, _ = buffer.low_latency_dispatch(x, x, 128, 256, use_fp8=False)
    rows: tuple[Tensor, Tensor] = payload
    # E: Incompatible types in assignment (expression has type "Tensor", variable has type "tuple[Tensor, Tensor]")
    # P: Type "Tensor" is not assignable to declared type "tuple[Tensor, Tensor]"
    return rows[1]


def fp8_as_one_tensor(buffer: deep_ep.Buffer, x: Tensor) -> Tensor:
    return buffer.low_latency_dispatch(x, x, 128, 256)[0]
    # E: Incompatible return value type (got "tuple[Tensor, Tensor]", expected "Tensor")
    # P: Type "_Scaled" is not assignable to return type "Tensor"


def payload_by_a_flag(buffer: deep_ep.Buffer, x: Tensor, use_fp8: bool) -> Tensor:
    return buffer.low_latency_dispatch(x, x, 128, 256, use_fp8=use_fp8)[0]
    # E: Incompatible return value type (got "tuple[Tensor, Tensor] | Tensor", expected "Tensor")
    # P: Type "_Scaled | Tensor" is not assignable to return type "Tensor"


def hook_that_was_not_asked_for(buffer: deep_ep.Buffer, x: Tensor) -> None:
    *_, hook = buffer.low_latency_combine(x, x, x, (x, x, 128, 7168, 256))
    hook()
    # E: "None" not callable
    # P: Object of type "None" cannot be called


def ids_with_a_cached_handle(buffer: deep_ep.Buffer, x: Tensor, handle: tuple[Tensor, ...]) -> None:
    buffer.dispatch(x, handle, topk_idx=x)
    # E: No overload variant of "dispatch" of "Buffer" matches argument types "Tensor", "tuple[Tensor, ...]", "Tensor"
    # P: No overloads for "dispatch" match the provided arguments
    # P: "Tensor" cannot be assigned to parameter "topk_idx" of type "None"


def neither_group_nor_comm() -> None:
    deep_ep.Buffer(None)
    # E: No overload variant of "Buffer" matches argument type "None"
    # P: "None" cannot be assigned to parameter "group" of type "ProcessGroup"


def overlap_for_an_elastic_event(buffer: deep_ep.ElasticBuffer, x: Tensor, handle: deep_ep.EPHandle, before: deep_ep.EventOverlap) -> None:
    buffer.combine(x, handle, previous_event=before)
    # E: Argument "previous_event" to "combine" of "ElasticBuffer" has incompatible type "EventOverlap"; expected "EventHandle | None"
    # P: "EventOverlap" cannot be assigned to parameter "previous_event" of type "EventHandle | None"


def tuple_for_an_elastic_handle(buffer: deep_ep.ElasticBuffer, x: Tensor, handle: tuple[Tensor, ...]) -> None:
    buffer.combine(x, handle)
    # E: Argument 2 to "combine" of "ElasticBuffer" has incompatible type "tuple[Tensor, ...]"; expected "EPHandle"
    # P: "tuple[Tensor, ...]" cannot be assigned to parameter "handle" of type "EPHandle"

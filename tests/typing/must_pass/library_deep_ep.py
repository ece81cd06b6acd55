"""DeepEP as an adapter calls it: normal, low latency and elastic."""

from collections.abc import Callable
from typing import assert_type

import deep_ep
import torch
from torch import Tensor
from torch.distributed import ProcessGroup


def normal(buffer: deep_ep.Buffer, x: Tensor, scales: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    ids = ids.to(deep_ep.topk_idx_t)
    per_rank, per_node, per_expert, is_in_rank, ready = buffer.get_dispatch_layout(ids, 256)
    (rows, row_scales), row_ids, _, counts, handle, event = buffer.dispatch(
        (x, scales), None, per_rank, per_node, is_in_rank, per_expert, ids, weights, previous_event=ready
    )
    assert_type(row_scales, Tensor)
    assert_type(row_ids, Tensor | None)
    assert_type(counts, list[int])
    event.current_stream_wait(release_handle=True)
    replayed, *_ = buffer.dispatch(x, handle)
    assert_type(replayed, Tensor)
    out, _, _ = buffer.combine(rows, handle)
    return out


def low_latency(buffer: deep_ep.Buffer, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    (rows, scales), counts, handle, _, hook = buffer.low_latency_dispatch(x, ids, 128, 256, return_recv_hook=True)
    assert_type(scales, Tensor)
    assert_type(counts, Tensor)
    assert_type(hook, Callable[[], None] | None)
    assert_type(buffer.low_latency_dispatch(x, ids, 128, 256, use_fp8=False)[0], Tensor)
    out, _, _ = buffer.low_latency_combine(rows, ids, weights, handle)
    return out


def by_a_flag(buffer: deep_ep.Buffer, x: Tensor, ids: Tensor, use_fp8: bool) -> Tensor:
    payload, *_ = buffer.low_latency_dispatch(x, ids, 128, 256, use_fp8=use_fp8)
    return payload[0] if isinstance(payload, tuple) else payload


def elastic(group: ProcessGroup, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    buffer = deep_ep.ElasticBuffer(group, num_max_tokens_per_rank=128, hidden=7168, num_topk=8)
    before: deep_ep.EventHandle = buffer.capture()
    rows, _, slot_weights, handle, _ = buffer.dispatch(
        x, ids, weights, num_experts=256, do_expand=True, previous_event=before, allocate_on_comm_stream=True
    )
    assert_type(handle, deep_ep.EPHandle)
    assert_type(handle.psum_num_recv_tokens_per_expert, Tensor)
    out, _, _ = buffer.combine(rows, handle, slot_weights)
    return out


def build(group: ProcessGroup) -> tuple[deep_ep.Buffer, torch.dtype]:
    return deep_ep.Buffer(group, 0, 1 << 30, low_latency_mode=True), deep_ep.topk_idx_t

"""Mooncake EP as an adapter calls it."""

from typing import assert_type

from mooncake.mooncake_elastic_buffer import ElasticBuffer
from mooncake.mooncake_ep_buffer import Buffer
from torch import Tensor
from torch.distributed import ProcessGroup


def low_latency(group: ProcessGroup, x: Tensor, ids: Tensor, weights: Tensor, active: Tensor) -> Tensor:
    buffer = Buffer(group, Buffer.get_ep_buffer_size_hint(128, 7168, 8, 256))
    (rows, scales), _, handle, event, _ = buffer.dispatch(x, ids, active, 128, 256, -1, use_fp8=True)
    assert_type(scales, Tensor)
    event.current_stream_wait()
    assert_type(buffer.dispatch(x, ids, None, 128, 256, -1, False)[0], Tensor)
    assert_type(buffer.dispatch(x, ids, None, 128, 256, -1)[0], tuple[Tensor, Tensor] | Tensor)
    out, _, _ = buffer.combine(rows, ids, weights, active, -1, handle)
    return out


def elastic(group: ProcessGroup, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=128, hidden=7168, num_topk=8)
    rows, _, _, handle, _ = buffer.dispatch(x, ids, weights, 256)
    out, no_weights, _ = buffer.combine(rows, handle)
    assert_type(no_weights, None)
    return out

"""NIXL EP as an adapter calls it."""

from typing import assert_type

import nixl_ep
from torch import Tensor
from torch.distributed import ProcessGroup


def low_latency(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    buffer = nixl_ep.Buffer(rank=0)
    buffer.update_memory_buffers(8, 32, nixl_ep.Buffer.get_low_latency_buffer_size_hint(128, 7168, 8, 256))
    buffer.connect_ranks(list(range(8)))
    ids = ids.to(nixl_ep.topk_idx_t)
    (rows, _), counts, handle, _, _ = buffer.low_latency_dispatch(x, ids, 128)
    assert_type(counts, Tensor)
    assert_type(handle, tuple[Tensor, Tensor, int, int])
    assert_type(buffer.dispatch(x, ids, 128, use_fp8=False)[0], Tensor)
    out, _, _ = buffer.combine(rows, ids, weights, handle)
    return out


def high_throughput(group: ProcessGroup, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    buffer = nixl_ep.Buffer(low_latency_mode=False, group=group)
    per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids, 256)
    rows, _, _, counts, handle, _ = buffer.ht_dispatch(x, None, per_rank, per_node, is_in_rank, per_expert, ids, weights)
    assert_type(counts, list[int])
    out, _, _ = buffer.ht_combine(rows, handle)
    return out

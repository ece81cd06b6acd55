"""MoRI as an adapter calls it, in both versions."""

from typing import assert_type

import torch
from mori import shmem
from mori.cco import Communicator
from mori.ops import EpDispatchCombineConfig, EpDispatchCombineKernelType, EpDispatchCombineOp, EpDispatchRoutingHandle
from mori.ops import dispatch_combine_v2 as v2
from torch import Tensor


def build(rank: int) -> EpDispatchCombineOp:
    shmem.shmem_torch_process_group_init("ep")
    kernel = EpDispatchCombineKernelType.IntraNode
    return EpDispatchCombineOp(
        EpDispatchCombineConfig(torch.bfloat16, rank, 8, 7168, 56, 4, 4, 128, 32, 8, kernel_type=kernel, quant_type="fp8_blockwise")
    )


def there_and_back(op: EpDispatchCombineOp, x: Tensor, weights: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
    rows, row_weights, scales, row_ids, count = op.dispatch(x, weights, None, ids)
    assert_type(scales, Tensor | None)
    del row_weights, row_ids, count
    return op.combine(rows, None, ids)


def again(op: EpDispatchCombineOp, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    rows, _, _, _, _, routing = op.dispatch(x, weights, None, ids, return_routing=True)
    assert_type(routing, EpDispatchRoutingHandle)
    op.dispatch(x, weights, None, ids, routing=routing)
    out, _ = op.combine(rows, None, ids, routing=routing)
    return out


def split(op: EpDispatchCombineOp, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    received = op.dispatch_send(x, weights, None, ids)
    op.dispatch_recv(call_local_expert_count=True)
    return received[0]


def second_version(comm: Communicator, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    config = v2.EpDispatchCombineConfig.tuned(
        rank=comm.rank, world_size=comm.nranks, hidden_dim=7168, max_num_inp_token_per_rank=128, num_experts_per_rank=32, num_experts_per_token=8
    )
    with v2.EpDispatchCombineOp(config, comm) as op:
        rows, _, _, _, _, routing = op.dispatch(x, weights, None, ids, return_routing=True)
        out, _ = op.combine(rows, routing=routing)
        return out

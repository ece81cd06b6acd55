"""What a dispatch of MoRI v1 reads of its arguments, and where it sends tokens."""

from typing import Final

import torch
from torch import Tensor

from tests.emulation.hazards import EmulatedTrap, Mode, Reason, misuse
from tests.emulation.mori_common import DISPATCH_DTYPES, NOWHERE, Sent, first_of_each, owners, read_argument, require_dtype
from tests.emulation.mori_config import EpDispatchCombineConfig, EpDispatchRoutingHandle
from tests.emulation.mori_config import EpDispatchCombineKernelType as Kernel

_TRUNCATING: Final = (Kernel.InterNode, Kernel.AsyncLL)  # kernels that divide ids before they look at them
_LL_SCAN: Final = 8  # routes that IntraNodeLL looks at


def send(config: EpDispatchCombineConfig, mode: Mode, rows: Tensor, weights: Tensor | None, scales: Tensor | None, ids: Tensor) -> Sent:
    """Return what a dispatch sends of its arguments, in the memory that they have."""
    tokens, topk = rows.size(0), config.num_experts_per_token
    require_dtype(rows.dtype, DISPATCH_DTYPES)
    columns = rows.size(1) * (2 if rows.dtype == torch.float4_e2m1fn_x2 else 1)
    if columns > config.hidden_dim or rows.dtype.itemsize > config.max_token_type_size:
        raise EmulatedTrap(f"the buffers are made for {config.hidden_dim} columns of {config.max_token_type_size} bytes: the process aborts")
    if tokens > config.max_num_inp_token_per_rank:
        misuse(mode, Reason.CAPACITY, f"{tokens} tokens are more than {config.max_num_inp_token_per_rank}, which nothing checks")
        tokens = config.max_num_inp_token_per_rank
    read = read_argument(mode, "input", rows, (tokens, rows.size(1)), rows.dtype)
    read_ids = read_argument(mode, "indices", ids, (tokens, topk), torch.int32)
    read_weights = None if weights is None else read_argument(mode, "weights", weights, (tokens, topk), torch.float32)
    if weights is None and config.kernel_type == Kernel.AsyncLL:
        raise EmulatedTrap("AsyncLL copies weights that are not there")
    read_scales = None
    if scales is not None and config.scale_dim:
        if scales.dtype.itemsize != config.scale_type_size:
            misuse(mode, Reason.DTYPE, f"scales have {config.scale_type_size} bytes by the config, and are {scales.dtype}")
        width = config.scale_dim * config.scale_type_size // scales.dtype.itemsize
        read_scales = read_argument(mode, "scales", scales, (tokens, width), scales.dtype)
    return Sent(read, read_weights, read_scales, read_ids, targets_of(config, mode, read_ids))


def targets_of(config: EpDispatchCombineConfig, mode: Mode, ids: Tensor) -> Tensor:
    """Return the ranks that tokens go to, each once (tokens, topk), by the way in which the kernel treats ids that are none."""
    kernel = config.kernel_type
    truncates = kernel in _TRUNCATING
    owner = owners(ids, config.num_experts_per_rank, config.world_size, truncates=truncates)
    if truncates and bool(((ids < 0) & (owner != NOWHERE)).any()):
        misuse(mode, Reason.EXPERT_ID, f"{kernel.name} sends a negative id to rank 0")
    if bool((ids >= config.world_size * config.num_experts_per_rank).any()):
        misuse(mode, Reason.EXPERT_ID, "an id is not below the number of experts: debug builds assert, others drop the route")
    if kernel == Kernel.IntraNodeLL and ids.size(1) > _LL_SCAN:
        misuse(mode, Reason.TOP_K, f"IntraNodeLL looks at {_LL_SCAN} routes of a token")
        owner[:, _LL_SCAN:] = NOWHERE
    return first_of_each(owner)


def check_handle(routing: EpDispatchRoutingHandle, tokens: int) -> None:
    """Raise ValueError for a handle that cannot be replayed with this number of tokens."""
    if routing.cur_rank_num_token <= 0:
        raise ValueError("the routing handle is of no tokens, which cannot be replayed")
    if routing.cur_rank_num_token != tokens:
        raise ValueError(f"the routing handle is of {routing.cur_rank_num_token} tokens, not {tokens}")


def count_local(config: EpDispatchCombineConfig, ids: Tensor) -> Tensor:
    """Return how many routes of the received ids each expert of this rank has, int32."""
    first, local = config.rank * config.num_experts_per_rank, config.num_experts_per_rank
    mine = ids[(ids >= first) & (ids < first + local)].long() - first
    return torch.bincount(mine, minlength=local).to(torch.int32)

"""The exchange of DeepEP's normal kernels: one row for each (token, rank), in the order of source ranks and tokens.

Not seen, as in the real library: a combine input that was not weighted, and the handle of another dispatch with as many rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import torch
from torch import Tensor

from tests.emulation.deep_ep_common import check_ids
from tests.emulation.hazards import Mode, Reason, copy_bits_, host_check, misuse, poisoned
from tests.emulation.world import Group

Handle: TypeAlias = tuple[Tensor, ...]
MAX_LOCAL_EXPERTS: Final = 1024
HANDLE_FIELDS: Final = ("rank_prefix_matrix", "channel_prefix_matrix", "recv_channel_prefix_matrix", "recv_src_idx", "is_token_in_rank", "send_head")


def layout(ids: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens per rank int32 (ranks,), routes per expert int32 (experts,), and whether a token goes to a rank, bool (tokens, ranks)."""
    is_valid = (ids >= 0) & (ids < experts)
    owner = torch.where(is_valid, ids.long() // (experts // ranks), -1)
    is_token_in_rank = (owner.unsqueeze(-1) == torch.arange(ranks)).any(1)
    per_expert = torch.bincount(ids[is_valid].long(), minlength=experts).to(torch.int32)
    return is_token_in_rank.sum(0).to(torch.int32), per_expert, is_token_in_rank


def check_layout(
    mode: Mode,
    sizes: tuple[int, int],
    per_rank: Tensor,
    in_rank: Tensor,
    per_expert: Tensor,
    ids: Tensor | None,
    weights: Tensor | None,
) -> None:
    """Check the layout and the routes of ``sizes`` (tokens, ranks). Raises: RuntimeError; EmulatedMisuse when they contradict each other."""
    tokens, ranks = sizes
    host_check(per_rank.dtype == torch.int32 and per_rank.shape == (ranks,), "num_tokens_per_rank is int32 [ranks]")
    host_check(per_expert.dtype == torch.int32 and per_expert.dim() == 1, "num_tokens_per_expert is int32 [experts]")
    host_check(in_rank.dtype == torch.bool and in_rank.shape == (tokens, ranks), "is_token_in_rank is bool [tokens, ranks]")
    experts = per_expert.size(0)
    host_check(experts % ranks == 0 and experts // ranks <= MAX_LOCAL_EXPERTS, f"at most {MAX_LOCAL_EXPERTS} experts of a rank, spread evenly")
    host_check((ids is None) == (weights is None), "topk_idx and topk_weights: both or neither")
    if not torch.equal(in_rank.sum(0), per_rank.long()):
        misuse(mode, Reason.LAYOUT_DISAGREES, "num_tokens_per_rank and is_token_in_rank")
        raise RuntimeError("timed out waiting for rows")
    if ids is not None and weights is not None:
        check_ids(ids)
        host_check(weights.dtype == torch.float32 and weights.is_contiguous(), "topk_weights is float32, contiguous")
        host_check(ids.size(0) == tokens and weights.shape == ids.shape, "topk_idx and topk_weights have a row for each token")
        if not torch.equal(layout(ids, experts, ranks)[2], in_rank):
            misuse(mode, Reason.LAYOUT_DISAGREES, "topk_idx and is_token_in_rank")


@final
@dataclass(frozen=True, eq=False)
class Sent:
    """What one rank brings to a dispatch; routes and counts are missing when the layout is a cached one."""

    x: Tensor
    scale: Tensor | None
    is_token_in_rank: Tensor
    ids: Tensor | None
    weights: Tensor | None
    per_expert: Tensor | None

    def rows(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the rows of a tensor that go to a rank, bit for bit."""
        chosen = self.is_token_in_rank[:, rank]
        return tensor.view(torch.uint8)[chosen].view(tensor.dtype) if tensor.dtype.itemsize == 1 else tensor[chosen]


@final
@dataclass(frozen=True, eq=False)
class Received:
    """What one rank gets: rows, their scales, local ids with -1, weights with 0 there, routes per local expert, and the handle."""

    x: Tensor
    scale: Tensor | None
    ids: Tensor | None
    weights: Tensor | None
    per_expert: list[int]
    handle: Handle

    def tensors(self) -> list[Tensor]:
        """Return all that arrives on the device."""
        return [tensor for tensor in (self.x, self.scale, self.ids, self.weights, self.handle[3]) if tensor is not None]


def _gather(parts: Sequence[Tensor], rows: int) -> Tensor:
    result = poisoned((rows, parts[0].size(1)), parts[0].dtype)
    begin = 0
    for part in parts:
        part = part[: rows - begin]
        copy_bits_(result[begin : begin + part.size(0)], part)
        begin += part.size(0)
    return result


def dispatch(group: Group, mode: Mode, sent: Sent, experts: int, alignment: int, worst: int) -> Received:
    """Exchange rows. ``worst`` > 0: the results have that many rows, with ids -1 and poison at the end, and no counts come to the host."""
    rank, ranks, local = group.rank(), group.size(), experts // group.size()
    met = group.exchange("dispatch", sent)
    in_rank = torch.stack([peer.is_token_in_rank.sum(0) for peer in met])  # (source, target)
    prefix = in_rank.cumsum(0).to(torch.int32)
    count = int(prefix[-1, rank])
    if worst and count > worst:
        misuse(mode, Reason.CAPACITY, f"{count} rows arrive and num_worst_tokens is {worst}")
    rows = worst or count
    x = _gather([peer.rows(peer.x, rank) for peer in met], rows)
    scale = None if sent.scale is None else _gather([peer.rows(peer.scale, rank) for peer in met if peer.scale is not None], rows)
    ids = weights = None
    if sent.ids is not None and sent.weights is not None:
        ids = _gather([peer.rows(peer.ids, rank) for peer in met if peer.ids is not None], rows)
        weights = _gather([peer.rows(peer.weights, rank) for peer in met if peer.weights is not None], rows)
        is_local = (ids >= rank * local) & (ids < (rank + 1) * local)
        is_local[count:] = False
        ids = torch.where(is_local, ids - rank * local, -1).to(ids.dtype)
        weights[:count] = torch.where(is_local[:count], weights[:count], 0.0)
    sources = [peer.is_token_in_rank[:, rank].nonzero().to(torch.int32) for peer in met]
    send_head = torch.where(sent.is_token_in_rank, sent.is_token_in_rank.cumsum(0) - 1, -1).to(torch.int32)
    opaque = poisoned((ranks, 10), torch.int32)  # a channel for each two SMs
    handle = (prefix, opaque, opaque.clone(), _gather(sources, rows)[:, 0].contiguous(), sent.is_token_in_rank, send_head)
    totals = [0] * local
    if sent.per_expert is not None and not worst:
        total = torch.stack([peer.per_expert for peer in met if peer.per_expert is not None]).sum(0)[rank * local : (rank + 1) * local]
        totals = [-(-int(value) // alignment) * alignment for value in total.unbind()]
    return Received(x, scale, ids, weights, [] if worst else totals, handle)


@final
@dataclass(frozen=True, eq=False)
class _Back:
    x: Tensor
    weights: Tensor | None


def combine(group: Group, x: Tensor, handle: Handle, weights: Tensor | None, bias: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the plain sum over ranks, in float32 and rounded once, of the rows that a token was sent as; and of their weights.

    A row that the handle of this rank finds nowhere (it belongs to another dispatch) is NaN.

    Raises: ValueError when the handle is no 6-tuple; RuntimeError when the number of rows is not that of the dispatch.
    """
    prefix, _, _, recv_src_idx, is_token_in_rank, send_head = handle
    host_check(x.size(0) == recv_src_idx.size(0), f"x has {x.size(0)} rows and {recv_src_idx.size(0)} were received")
    rank, tokens = group.rank(), is_token_in_rank.size(0)
    met = group.exchange("combine", _Back(x.clone(), None if weights is None else weights.clone()))
    total = torch.zeros((tokens, x.size(1)), dtype=torch.float32)
    for extra in bias:
        host_check(extra.dtype == x.dtype and extra.shape == total.shape and extra.is_contiguous(), "bias has the dtype of x and (tokens, hidden)")
        total += extra.float()
    total_weights = None if weights is None else torch.zeros((tokens, weights.size(1)), dtype=torch.float32)
    for target, back in enumerate(met):
        begin = int(prefix[rank - 1, target]) if rank else 0
        chosen = is_token_in_rank[:, target].nonzero()[:, 0]
        row = begin + send_head[chosen, target].long()
        is_there = row < back.x.size(0)
        found = poisoned((len(chosen), x.size(1)), torch.float32)
        found[is_there] = back.x[row[is_there]].float()
        total[chosen] += found
        if total_weights is not None and back.weights is not None:
            found = poisoned((len(chosen), total_weights.size(1)), torch.float32)
            found[is_there] = back.weights[row[is_there]]
            total_weights[chosen] += found
    return total.to(x.dtype), total_weights

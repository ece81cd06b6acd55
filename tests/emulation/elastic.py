"""The exchange of ElasticBuffer (DeepEP V2 and Mooncake's imitation): one row for each (token, rank), or for each (token, expert) when expanded.

Not seen, as in the real libraries: rows that were not weighted, and the handle of another dispatch with as many rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from tests.emulation.hazards import EmulatedTrap, Mode, Reason, copy_bits_, misuse, poisoned
from tests.emulation.world import Group


def align(value: int, alignment: int) -> int:
    """Return the smallest multiple that is not below."""
    return -(-value // alignment) * alignment


def size_hint(ranks: int, max_tokens: int, hidden: int, topk: int) -> int:
    """Return bytes for the rows of all ranks, with their routes; not the real library's to the byte."""
    return 2 * ranks * max_tokens * (2 * hidden + 16 * topk)


@final
@dataclass(frozen=True, eq=False)
class EPHandle:
    """The layout of a dispatch. Counts are int32 on the device.

    ``recv_src_metadata`` (rows, topk + 2): ``source rank * num_max_tokens_per_rank + token``, an opaque word, and the expanded row of each route
    or -1. ``psum_num_recv_tokens_per_expert``: the inclusive sum of aligned counts; expanded, the end of each group's real rows, and a group
    begins at the aligned end of the one before. ``num_unaligned_recv_tokens_per_expert`` is written when expanded alone.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor
    psum_num_recv_tokens_per_expert: Tensor
    num_unaligned_recv_tokens_per_expert: Tensor
    recv_src_metadata: Tensor
    dst_buffer_slot_idx: Tensor
    token_metadata_at_forward: Tensor | None
    channel_linked_list: Tensor | None


@final
@dataclass(frozen=True, eq=False)
class Sent:
    """What one rank brings to a dispatch."""

    x: Tensor
    scale: Tensor | None
    ids: Tensor
    weights: Tensor | None


@final
@dataclass(frozen=True)
class Options:
    """How results are laid out. ``zero_padding`` and ``column_major`` as in DeepEP; without ``exact`` the results have their largest size."""

    experts: int
    max_tokens: int
    alignment: int
    sms: int
    expand: bool = False
    exact: bool = True
    deterministic: bool = False
    zero_padding: bool = False
    column_major: bool = False
    aligned_list: bool = True


@final
@dataclass(frozen=True, eq=False)
class Received:
    """What one rank gets; ids and weights as the routes of rows, or the weights of expanded rows."""

    x: Tensor
    scale: Tensor | None
    ids: Tensor | None
    weights: Tensor | None
    counts: Tensor
    handle: EPHandle

    def tensors(self) -> list[Tensor]:
        """Return the data that arrives."""
        return [tensor for tensor in (self.x, self.scale, self.ids, self.weights) if tensor is not None]


def _memory(rows: int, columns: int, dtype: torch.dtype, *, column_major: bool) -> Tensor:
    if column_major:
        return poisoned((columns, align(rows, 4)), dtype).t()[:rows]
    return poisoned((rows, columns), dtype)


def _check(mode: Mode, ids: Tensor, experts: int) -> None:
    in_order = ids.sort(1).values
    is_again = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0) & (in_order[:, 1:] < experts)
    if bool(is_again.any()):
        raise EmulatedTrap("a row names an expert twice")
    if bool((ids >= experts).any()):
        misuse(mode, Reason.EXPERT_ID, f"an id is not below {experts}")


def _origins(group: Group, met: Sequence[Sent], options: Options) -> list[tuple[int, int]]:
    local = options.experts // group.size()
    low, found = group.rank() * local, list[tuple[int, int]]()
    for source, sent in enumerate(met):
        tokens = ((sent.ids >= low) & (sent.ids < low + local)).any(1).nonzero()[:, 0]
        order = range(len(tokens)) if options.deterministic else group.permutation(len(tokens))
        found.extend((source, int(tokens[index])) for index in order)
    return found


def _layout(group: Group, met: Sequence[Sent], origins: Sequence[tuple[int, int]], options: Options) -> tuple[EPHandle, Tensor]:
    """Return the handle of a new layout, and the routes of each local expert, int32."""
    rank, ranks, topk = group.rank(), group.size(), met[0].ids.size(1)
    local, n = options.experts // ranks, len(origins)
    rows = n if options.exact else ranks * options.max_tokens
    metadata = poisoned((rows, topk + 2), torch.int32)
    metadata[:n, 2:] = -1
    routes: list[list[tuple[int, int]]] = [[] for _ in range(local)]
    for row, (source, token) in enumerate(origins):
        metadata[row, 0] = source * options.max_tokens + token
        for slot in range(topk):
            expert = int(met[source].ids[token, slot]) - rank * local
            if 0 <= expert < local:
                routes[expert].append((row, slot))
    counts, begin, ends = [len(route) for route in routes], 0, list[int]()
    for route in routes:
        order = range(len(route)) if options.deterministic else group.permutation(len(route))
        if options.expand:
            for position, index in enumerate(order):
                row, slot = route[index]
                metadata[row, 2 + slot] = begin + position
        ends.append(begin + len(route) if options.expand else align(begin + len(route), options.alignment))
        begin = align(begin + len(route), options.alignment)
    capacity = align(ranks * options.max_tokens * min(topk, local) + (options.alignment - 1) * local, options.alignment)
    per_rank = torch.tensor([sum(source == peer for source, _ in origins) for peer in range(ranks)])
    real = torch.tensor(counts, dtype=torch.int32)
    listed = [align(count, options.alignment) for count in counts] if options.aligned_list else counts
    handle = EPHandle(
        do_expand=options.expand,
        num_experts=options.experts,
        expert_alignment=options.alignment,
        num_max_tokens_per_rank=options.max_tokens,
        num_sms=options.sms,
        topk_idx=met[rank].ids,
        psum_num_recv_tokens_per_scaleup_rank=per_rank.cumsum(0).to(torch.int32),
        psum_num_recv_tokens_per_expert=torch.tensor(ends, dtype=torch.int32),
        num_recv_tokens_per_expert_list=listed if options.exact else [],
        num_unaligned_recv_tokens_per_expert=real.clone() if options.expand else poisoned((local,), torch.int32),
        recv_src_metadata=metadata,
        dst_buffer_slot_idx=poisoned(met[rank].ids.shape, torch.int32),
        token_metadata_at_forward=None,
        channel_linked_list=None,
        num_recv_tokens=rows,
        num_expanded_tokens=(begin if options.exact else capacity) if options.expand else 0,
    )
    return handle, real


def _fill(target: Tensor, source: Tensor, handle: EPHandle, row: int) -> None:
    """Write a source row to where received row ``row`` stands."""
    places = [int(slot) for slot in handle.recv_src_metadata[row, 2:].unbind() if int(slot) >= 0] if handle.do_expand else [row]
    for place in places:
        copy_bits_(target[place], source)


def _zero_padding(tensors: Sequence[Tensor], handle: EPHandle) -> None:
    for end in (int(value) for value in handle.psum_num_recv_tokens_per_expert.unbind()):
        for tensor in tensors:
            rows = tensor[end : align(end, handle.expert_alignment)]
            (rows.view(torch.uint8) if rows.dtype.itemsize == 1 else rows).zero_()


def dispatch(group: Group, mode: Mode, sent: Sent, options: Options, cached: EPHandle | None = None) -> Received:
    """Exchange rows by the ids, or by a cached layout. Raises: EmulatedTrap when a row names an expert twice."""
    _check(mode, sent.ids, options.experts)
    met = group.exchange("elastic dispatch", sent)
    rank, local = group.rank(), options.experts // group.size()
    if cached is None:
        origins = _origins(group, met, options)
        handle, counts = _layout(group, met, origins, options)
    else:
        handle, counts = cached, torch.zeros(local, dtype=torch.int32)
        live = handle.recv_src_metadata[: int(handle.psum_num_recv_tokens_per_scaleup_rank[-1]), 0]
        origins = [divmod(int(place), handle.num_max_tokens_per_rank) for place in live.unbind()]
    rows, topk = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens, sent.ids.size(1)
    x = _memory(rows, sent.x.size(1), sent.x.dtype, column_major=False)
    scale = None if sent.scale is None else _memory(rows, sent.scale.size(1), sent.scale.dtype, column_major=options.column_major)
    ids = None if handle.do_expand else poisoned((rows, topk), sent.ids.dtype)
    weights = None if sent.weights is None else poisoned((rows,) if handle.do_expand else (rows, topk), torch.float32)
    if options.zero_padding:
        _zero_padding([tensor for tensor in (x, scale, weights) if tensor is not None], handle)
    for row, (source, token) in enumerate(origins):
        peer = met[source]
        _fill(x, peer.x[token], handle, row)
        if scale is not None and peer.scale is not None:
            _fill(scale, peer.scale[token], handle, row)
        if ids is not None:
            mine = peer.ids[token] - rank * local
            ids[row] = torch.where((mine >= 0) & (mine < local), mine, -1)
        if weights is not None and peer.weights is not None:
            if handle.do_expand:
                place = handle.recv_src_metadata[row, 2:].long()
                weights[place[place >= 0]] = peer.weights[token][place >= 0]
            else:
                weights[row] = peer.weights[token]  # those of other ranks too
    return Received(x, scale, ids, weights, counts, handle)


def combine(group: Group, x: Tensor, handle: EPHandle, weights: Tensor | None, bias: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Return the plain sum of a token's rows over ranks, bf16, and of their weights (tokens, topk), float32.

    Expanded rows are summed within each rank first; each level sums in float32 and rounds to bf16.
    """
    rank, tokens, topk = group.rank(), handle.topk_idx.size(0), handle.topk_idx.size(1)
    back: list[tuple[int, int, Tensor, Tensor | None]] = []
    for row in range(int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])):
        source, token = divmod(int(handle.recv_src_metadata[row, 0]), handle.num_max_tokens_per_rank)
        place = handle.recv_src_metadata[row, 2:].long()
        reduced = x[place[place >= 0]].float().sum(0).to(torch.bfloat16) if handle.do_expand else x[row].clone()
        share = None if weights is None else torch.zeros(topk) if handle.do_expand else weights[row].clone()
        if weights is not None and share is not None and handle.do_expand:
            share[place >= 0] = weights[place[place >= 0]]
        back.append((source, token, reduced, share))
    total = torch.zeros((tokens, x.size(1)), dtype=torch.float32)
    total_weights = None if weights is None else torch.zeros((tokens, topk), dtype=torch.float32)
    for extra in bias:
        total += extra.float()
    for peer in group.exchange("elastic combine", back):
        for source, token, reduced, share in peer:
            if source == rank and token < tokens:
                total[token] += reduced.float()
                if total_weights is not None and share is not None:
                    total_weights[token] += share
    return total.to(torch.bfloat16), total_weights

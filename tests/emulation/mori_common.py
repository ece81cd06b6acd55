"""What MoRI v1 and v2 have in common: launch dtypes, the routing of rows, and the quantized transport of combine.

The transport copies bytes: it knows neither what a scale means nor whether a row was weighted. Neither is seen here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from moe_typed.ops.minifloat.reference import decode_e2m1, encode_e2m1
from tests.emulation.hazards import Mode, Reason, copy_bits_, misuse, poison_, read_memory
from tests.emulation.world import Group

WAVE: Final = 64  # lanes; a row has fewer routes
MAX_TOPK: Final = 9
FP8_BLOCKS: Final = 56  # scales of a row in fp8_blockwise: MORI_FP8_COMBINE_SCALE_DIM
FP4_BLOCK: Final = 32  # columns; the contract does not say
NOWHERE: Final = -1
DISPATCH_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2)
COMBINE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def require_dtype(dtype: torch.dtype, known: Sequence[torch.dtype]) -> None:
    """Raise KeyError for a dtype without a kernel, fp16 for one."""
    if dtype not in known:
        raise KeyError(dtype)


def read_argument(mode: Mode, name: str, tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return what a kernel reads of an argument: contiguous memory of its own dtype."""
    if tensor.dtype != dtype:
        misuse(mode, Reason.DTYPE, f"{name} is read as {dtype}, and is {tensor.dtype}")
    if not tensor.is_contiguous() or tuple(tensor.shape) != shape:
        misuse(mode, Reason.LAYOUT, f"{name} is read as contiguous {shape}, and is {tuple(tensor.shape)} with strides {tensor.stride()}")
    return read_memory(tensor, shape, dtype)


def owners(ids: Tensor, local: int, ranks: int, *, truncates: bool) -> Tensor:
    """Return the rank of each id (tokens, topk), or NOWHERE.

    ``truncates``: the division rounds toward zero and only its result is looked at, so that ids above ``-local`` go to rank 0.
    """
    rank = torch.div(ids.long(), local, rounding_mode="trunc" if truncates else "floor")
    return torch.where((rank >= 0) & (rank < ranks), rank, NOWHERE)


def first_of_each(owner: Tensor) -> Tensor:
    """Return ranks (tokens, topk) of which a token names each once: a rank that an earlier route named becomes NOWHERE."""
    again = torch.zeros(owner.shape, dtype=torch.bool)
    for slot in range(1, owner.size(1)):
        again[:, slot] = (owner[:, :slot] == owner[:, slot : slot + 1]).any(1)
    return torch.where(again, NOWHERE, owner)


@final
@dataclass(frozen=True, eq=False)
class Sent:
    """What one rank brings to a dispatch: its memory as the kernel reads it, and to which ranks each token goes (tokens, routes)."""

    rows: Tensor
    weights: Tensor | None
    scales: Tensor | None
    ids: Tensor
    targets: Tensor


@final
@dataclass(frozen=True, eq=False)
class Back:
    """What one rank brings to a combine: rows and weights in receive order."""

    rows: Tensor
    weights: Tensor | None


@final
@dataclass(frozen=True, eq=False)
class Arrivals:
    """Where rows came from, in the order of arrival: (source rank, token)."""

    origins: list[tuple[int, int]]
    dropped: int


def arrivals(group: Group, met: Sequence[Sent], capacity: int) -> Arrivals:
    """Return which rows arrive at this rank, in an order that is left open; past the capacity rows are lost."""
    found = [
        (source, token)
        for source, sent in enumerate(met)
        for token in range(sent.targets.size(0))
        if bool((sent.targets[token] == group.rank()).any())
    ]
    order = [found[index] for index in group.permutation(len(found))]
    return Arrivals(order[:capacity], max(0, len(order) - capacity))


def deliver(met: Sequence[Sent], origins: Sequence[tuple[int, int]], rows: Tensor, weights: Tensor, scales: Tensor | None, ids: Tensor) -> None:
    """Write rows into poisoned arenas. Weights are not written where the sender gave none."""
    for arena in (rows, weights, ids, *(() if scales is None else (scales,))):
        poison_(arena)
    for row, (source, token) in enumerate(origins):
        sent = met[source]
        copy_bits_(rows[row], sent.rows[token])
        ids[row] = sent.ids[token]
        if sent.weights is not None:
            weights[row] = sent.weights[token]
        if scales is not None and sent.scales is not None:
            copy_bits_(scales[row], sent.scales[token])


def _blocks(rows: Tensor, size: int) -> Tensor:
    padding = -rows.size(1) % size
    return torch.nn.functional.pad(rows.float(), (0, padding)).view(rows.size(0), -1, size)


def transported(rows: Tensor, quant_type: str, fp8: torch.dtype) -> Tensor:
    """Return rows of bf16 as they come out of combine's transport.

    ``fp8_direct_cast``: a cast without a scale. ``fp8_blockwise``: 56 blocks, each with the scale max / fp8's max, in rows that would overflow.
    ``fp4_blockwise``: blocks with the scale max / 6.
    """
    limit = float(torch.finfo(fp8).max)
    if quant_type == "fp8_direct_cast":
        return rows.float().clamp(-limit, limit).to(fp8).to(rows.dtype)
    if quant_type == "none" or rows.size(0) == 0:
        return rows
    blocks = _blocks(rows, -(-rows.size(1) // FP8_BLOCKS) if quant_type == "fp8_blockwise" else FP4_BLOCK)
    amax = blocks.abs().amax(-1, keepdim=True)
    if quant_type == "fp8_blockwise":
        needs = blocks.abs().amax((1, 2), keepdim=True) > limit
        scale = torch.where(needs & (amax > 0), amax / limit, torch.ones_like(amax))
        values = (blocks / scale).clamp(-limit, limit).to(fp8).float() * scale
    else:
        scale = torch.where(amax > 0, amax / 6, torch.ones_like(amax))
        values = decode_e2m1(encode_e2m1(blocks / scale)) * scale
    return values.reshape(rows.size(0), -1)[:, : rows.size(1)].to(rows.dtype)


def gather_sum(place: Tensor, rows: Sequence[Tensor], capacity: int) -> Tensor:
    """Return, for each token, the float32 sum of the rows at ``rank * capacity + row`` (tokens, topk), where -1 is none.

    A row that its rank did not give is NaN.
    """
    total = torch.zeros((place.size(0), rows[0].size(1)), dtype=torch.float32)
    for token in range(place.size(0)):
        for value in (int(value) for value in place[token].unbind()):
            if value >= 0:
                rank, row = divmod(value, capacity)
                is_there = rank < len(rows) and row < rows[rank].size(0)
                total[token] += rows[rank][row].float() if is_there else torch.nan
    return total

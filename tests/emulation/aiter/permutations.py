"""The shuffles as permutations: reshape, permute axes, reshape back, as the contract tells them; and their inverses."""

from collections.abc import Callable
from enum import Enum

import torch
from torch import Tensor

LANES = 64  # of a wavefront
A16W4_LANES = 16  # NLane, the first number of the layout of a16w4
A16W4_PACK = 16  # KPack, the second


class Layout(Enum):
    """How the bytes of a weight, or of its e8m0 scales, stand in memory. Neither shape nor dtype tells."""

    ROWS = "rows as they are"
    TILES = "shuffle_weight with (16, 16)"
    LANES = "shuffle_weight_a16w4 with gate_up=False"
    GATED_LANES = "shuffle_weight_a16w4 with gate_up=True"
    SCALE_TILES = "e8m0_shuffle"
    SCALE_LANES = "shuffle_scale_a16w4 with gate_up=False"
    SCALE_GATED_LANES = "shuffle_scale_a16w4 with gate_up=True"


def tiles(x: Tensor, rows_of_tile: int, columns_of_tile: int, vector: int) -> Tensor:
    """Return (..., N, K) in tiles. ``columns_of_tile``: BK, ``vector``: V, both in stored elements. AssertionError where they do not divide."""
    n, k = x.shape[-2:]
    assert n % rows_of_tile == 0, f"{n} rows are no multiple of {rows_of_tile}"
    assert k % columns_of_tile == 0, f"{k} columns are no multiple of {columns_of_tile}"
    split = x.reshape(-1, n // rows_of_tile, rows_of_tile, k // columns_of_tile, columns_of_tile // vector, vector)
    return split.permute(0, 1, 3, 4, 2, 5).contiguous().reshape(x.shape)


def lanes(x: Tensor, n_lane: int, k_pack: int, *, gate_up: bool) -> Tensor:
    """Return (E, N, K) in the order of lanes. RuntimeError where the sizes do not divide, from ``view`` as in the real one."""
    experts, n, k = x.shape
    k_lane = LANES // n_lane
    halves = 2 if gate_up else 1
    n_0, k_0 = n // halves // n_lane, k // (k_lane * k_pack)
    split = x.contiguous().view(experts, halves, n_0, n_lane, k_0, k_lane, k_pack)
    return split.permute(0, 2, 1, 4, 5, 3, 6).contiguous().view(x.shape)  # with one half this is (0, 1, 3, 4, 2, 5) of the six other axes


def scale_tiles(s: Tensor) -> Tensor:
    """Return scales (m, n), both padded already to multiples of 256 and 8, in the order of e8m0_shuffle."""
    m, n = s.shape
    return s.view(m // 32, 2, 16, n // 8, 2, 4).permute(0, 3, 5, 2, 4, 1).contiguous().view(m, n)


def scale_lanes(s: Tensor, experts: int, *, gate_up: bool) -> Tensor:
    """Return scales (L * n, k), with k padded already to a multiple of 8, in the order of shuffle_scale_a16w4."""
    rows, k = s.shape
    tall = rows // experts // 32
    if gate_up:
        split = s.view(experts, 2, tall, 16, k // 8, 2, 4).permute(0, 2, 4, 6, 3, 5, 1)
    else:
        split = s.view(experts, tall, 2, 16, k // 8, 2, 4).permute(0, 1, 4, 6, 3, 5, 2)
    return split.contiguous().view(rows, k)


def undo(shuffle: Callable[[Tensor], Tensor], shuffled: Tensor) -> Tensor:
    """Return what the shuffle made this of. The shuffle is applied to the positions, and its elements are put back to them."""
    positions = shuffle(torch.arange(shuffled.numel()).view(shuffled.shape)).flatten()
    stored = shuffled.contiguous().view(BYTES[shuffled.element_size()]).flatten()
    return torch.empty_like(stored).scatter_(0, positions, stored).view(shuffled.dtype).view(shuffled.shape)


BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # dtypes that torch moves on every device; float8 and float4 it does not


def as_bytes(x: Tensor) -> Tensor:
    """Return the same memory in a dtype of its size that torch can move."""
    return x.detach().view(BYTES[x.element_size()])


def unshuffle(x: Tensor, layout: Layout, experts: int) -> Tensor:
    """Return the rows that a kernel sees which takes ``x`` to be in ``layout``.

    ``x``: weights (L, N, K) in stored elements, or scales (L * n, k) with the padding of their layout.
    """
    vector = 16 // x.element_size()
    match layout:
        case Layout.ROWS:
            return x
        case Layout.TILES:
            return undo(lambda p: tiles(p, 16, 32, vector), x)
        case Layout.LANES | Layout.GATED_LANES:
            return undo(lambda p: lanes(p, A16W4_LANES, A16W4_PACK, gate_up=layout is Layout.GATED_LANES), x)
        case Layout.SCALE_TILES:
            return undo(scale_tiles, x)
        case Layout.SCALE_LANES | Layout.SCALE_GATED_LANES:
            return undo(lambda p: scale_lanes(p, experts, gate_up=layout is Layout.SCALE_GATED_LANES), x)

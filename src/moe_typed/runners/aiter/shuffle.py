"""The orders in which AITER's kernels read weights and e8m0 scales (``aiter/ops/shuffle.py``, ``aiter/utility/fp4_utils.py``), in plain torch.

Each is a permutation of elements: reshape, permute the axes, reshape back. Shape and dtype stay, so that neither tells what was done; the classes of
prepared weights do. Elements of one byte are bytes: of fp4 each holds two values, and a size in elements is half that in values.
"""

from typing import Final

import torch
from torch import Tensor

_TILE_ROWS: Final = 16  # the layout (16, 16): BN
TILE_COLUMNS: Final = 32  # BK, twice the second 16
_VECTOR_BYTES: Final = 16  # what one lane loads at once
_LANES: Final = 64  # of a wavefront of CDNA
_LANE_ROWS: Final = 16  # NLane of shuffle_weight_a16w4, as its callers give it
_LANE_PACK: Final = 16  # KPack
_MOVABLE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # torch does not copy every small float on every device

LANE_COLUMNS: Final = _LANES // _LANE_ROWS * _LANE_PACK
_SCALE_LANE_ROWS: Final = 32  # rows of one tile of shuffle_scale_a16w4
_SCALE_ROWS, _SCALE_COLUMNS = 256, 8  # what e8m0_shuffle pads to
_ONE: Final = 0x7F  # e8m0: 2^(127 - 127)


def _movable(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_MOVABLE[tensor.element_size()])


def shuffle_weight(weight: Tensor) -> Tensor:
    """Return a weight (experts, N, K elements) in tiles of 16 rows and 32 elements, 16 bytes of a row after each other.

    ``shuffle_weight(x, (16, 16))``: with V = 16 / itemsize, (E, N/16, 16, K/32, 32/V, V) permuted to (0, 1, 3, 4, 2, 5). 16 divides N, 32 divides K.
    """
    experts, rows, columns = weight.shape
    vector = _VECTOR_BYTES // weight.element_size()
    split = _movable(weight).view(experts, rows // _TILE_ROWS, _TILE_ROWS, columns // TILE_COLUMNS, TILE_COLUMNS // vector, vector)
    return split.permute(0, 1, 3, 4, 2, 5).contiguous().view(weight.shape).view(weight.dtype)


def shuffle_weight_a16w4(weight: Tensor, *, gate_up: bool) -> Tensor:
    """Return a weight (experts, N, K bytes) in the order of lanes; with ``gate_up`` a tile of gate rows and its tile of up rows are neighbours.

    ``shuffle_weight_a16w4(x, 16, gate_up)``: (E, N/16, 16, K/64, 4, 16) permuted to (0, 1, 3, 4, 2, 5); with ``gate_up``
    (E, 2, N/32, 16, K/64, 4, 16) to (0, 2, 1, 4, 5, 3, 6). 16, or 32, divides N, and 64 divides K.
    """
    experts, rows, columns = weight.shape
    halves, lanes = 2 if gate_up else 1, _LANES // _LANE_ROWS
    split = _movable(weight).view(experts, halves, rows // (halves * _LANE_ROWS), _LANE_ROWS, columns // LANE_COLUMNS, lanes, _LANE_PACK)
    return split.permute(0, 2, 1, 4, 5, 3, 6).contiguous().view(weight.shape).view(weight.dtype)


def e8m0_shuffle(scale: Tensor) -> Tensor:
    """Return e8m0 scales (experts, n, k) as (rows, columns), those of all experts under each other, in tiles of 32 rows and 8 columns.

    ``e8m0_shuffle``: padded to multiples of 256 rows and 8 columns (here with ones), (m/32, 2, 16, n/8, 2, 4) permuted to (0, 3, 5, 2, 4, 1).
    """
    flat = _padded(_movable(scale).flatten(0, 1), _SCALE_ROWS, _SCALE_COLUMNS)
    rows, columns = flat.shape
    split = flat.view(rows // 32, 2, 16, columns // 8, 2, 4)
    return split.permute(0, 3, 5, 2, 4, 1).contiguous().view(rows, columns).view(scale.dtype)


def shuffle_scale_a16w4(scale: Tensor, *, gate_up: bool) -> Tensor:
    """Return e8m0 scales (experts, n, k) as (experts * n, columns) in the order of the weights of ``shuffle_weight_a16w4``.

    ``shuffle_scale_a16w4(s, experts, gate_up)``: columns padded to a multiple of 8 with ones, (E, n/32, 2, 16, k/8, 2, 4) permuted to
    (0, 1, 4, 6, 3, 5, 2); with ``gate_up`` (E, 2, n/32, 16, k/8, 2, 4) to (0, 2, 4, 6, 3, 5, 1). 32 divides n.
    """
    experts, per_expert = scale.shape[:2]
    flat = _padded(_movable(scale).flatten(0, 1), 1, _SCALE_COLUMNS)
    rows, columns = flat.shape
    tall = per_expert // _SCALE_LANE_ROWS
    if gate_up:
        split = flat.view(experts, 2, tall, 16, columns // 8, 2, 4).permute(0, 2, 4, 6, 3, 5, 1)
    else:
        split = flat.view(experts, tall, 2, 16, columns // 8, 2, 4).permute(0, 1, 4, 6, 3, 5, 2)
    return split.contiguous().view(rows, columns).view(scale.dtype)


def _padded(flat: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(flat, (0, -flat.shape[1] % columns, 0, -flat.shape[0] % rows), value=_ONE)


def mark_shuffled(*weights: Tensor) -> None:
    """Set ``is_shuffled`` on weights that the library is given.

    The library finds its kernels by this attribute of the tensor object itself (``aiter/fused_moe.py``; its own shuffles set it): there is no other
    way to say it. A view, a copy or a move to another device loses it: it is set on the very objects that a runner holds, when the runner is made.
    """
    for weight in weights:
        vars(weight)["is_shuffled"] = True

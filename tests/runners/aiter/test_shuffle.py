"""The shuffles: permutations that put each element where a formula says, and bit for bit those of the emulated library."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed.runners.aiter.shuffle import e8m0_shuffle, mark_shuffled, shuffle_scale_a16w4, shuffle_weight, shuffle_weight_a16w4
from tests.emulation.aiter.aiter import EmulatedAiter

E8 = torch.float8_e8m0fnu
ONE = 0x7F

Place = Callable[[int, int, int, int], int]


def bytes_of(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def tile(row: int, column: int, columns: int, vector: int) -> int:
    """Return where (row, column) of an expert stands: tiles of 16 x 32 along a row of tiles; within one, vectors of each row after each other."""
    return (row // 16 * (columns // 32) + column // 32) * 512 + column % 32 // vector * 16 * vector + row % 16 * vector + column % vector


def lane(row: int, column: int, columns: int, tall: int) -> int:
    """Return the same of lanes: tiles of 16 x 64 in rows of tiles, ``tall`` of which lie before the one of this row."""
    return (tall * (columns // 64) + column // 64) * 1024 + column % 64 // 16 * 256 + row % 16 * 16 + column % 16


def scale_tile(row: int, column: int, columns: int) -> int:
    """Return the same of e8m0_shuffle: 32 x 8 a tile."""
    return row // 32 * 32 * columns + column // 8 * 256 + column % 4 * 64 + row % 16 * 4 + column % 8 // 4 * 2 + row % 32 // 16


def placed(plane: Tensor, place: Place) -> Tensor:
    """Return (rows, columns) with each element where the formula puts it."""
    rows, columns = plane.shape
    order = torch.tensor([place(row, column, rows, columns) for row in range(rows) for column in range(columns)])
    assert torch.equal(order.sort().values, torch.arange(plane.numel()))  # a permutation
    out = torch.empty(plane.numel(), dtype=plane.dtype)
    out[order] = plane.flatten()
    return out.view(plane.shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float4_e2m1fn_x2])
def test_weights_in_tiles(dtype: torch.dtype) -> None:
    words = torch.int16 if dtype.itemsize == 2 else torch.uint8
    weight = bytes_of(2, 48, 64 * dtype.itemsize).view(dtype)
    found = shuffle_weight(weight)
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, weight.shape, True)
    for expert in range(2):
        expected = placed(weight[expert].view(words), lambda row, column, _, columns: tile(row, column, columns, 16 // dtype.itemsize))
        assert torch.equal(found[expert].view(words), expected)
    assert torch.equal(found.view(words), EmulatedAiter().shuffle_weight(weight).view(words))


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float4_e2m1fn_x2])
def test_weights_in_lanes(dtype: torch.dtype, gate_up: bool) -> None:
    def place(row: int, column: int, rows: int, columns: int) -> int:
        half, within = divmod(row, rows // 2) if gate_up else (0, row)
        return lane(within, column, columns, 2 * (within // 16) + half if gate_up else within // 16)

    weight = bytes_of(2, 64, 128).view(dtype)
    found = shuffle_weight_a16w4(weight, gate_up=gate_up)
    assert (found.dtype, found.shape) == (dtype, weight.shape)
    for expert in range(2):
        assert torch.equal(found[expert].view(torch.uint8), placed(weight[expert].view(torch.uint8), place))
    assert torch.equal(found.view(torch.uint8), EmulatedAiter().shuffle_weight_a16w4(weight, 16, gate_up).view(torch.uint8))


@pytest.mark.parametrize(("experts", "rows", "columns"), [(1, 256, 8), (2, 128, 16), (3, 96, 4), (2, 16, 11)])
def test_scales_in_tiles_straddle_experts_and_are_padded_with_ones(experts: int, rows: int, columns: int) -> None:
    scale = bytes_of(experts, rows, columns)
    flat = scale.view(experts * rows, columns)
    padded = torch.full((-(-experts * rows // 256) * 256, -(-columns // 8) * 8), ONE, dtype=torch.uint8)
    padded[: experts * rows, :columns] = flat
    found = e8m0_shuffle(scale.view(E8))
    assert found.dtype == E8
    assert torch.equal(found.view(torch.uint8), placed(padded, lambda row, column, _, wide: scale_tile(row, column, wide)))
    upstream = EmulatedAiter().e8m0_shuffle(flat.view(E8))
    assert upstream is not None
    written = e8m0_shuffle(torch.ones(experts, rows, columns).to(E8).view(torch.uint8).fill_(1).view(E8)).view(torch.uint8) == 1
    assert torch.equal(found.view(torch.uint8)[written], upstream.view(torch.uint8)[written])  # what upstream leaves uninitialised is left out


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("columns", [8, 11, 16])
def test_scales_in_lanes(columns: int, gate_up: bool) -> None:
    def place(row: int, column: int, rows: int, wide: int) -> int:
        if not gate_up:
            return scale_tile(row, column, wide)
        half, within = divmod(row, rows // 2)
        return (
            (within // 16 * (wide // 8) + column // 8) * 256 + column % 4 * 64 + within % 16 * 4 + column % 8 // 4 * 2 + half
        )  # the tile's two halves of 16 rows are gate's and up's

    experts, rows = 2, 64
    scale = bytes_of(experts, rows, columns)
    padded = torch.full((experts, rows, -(-columns // 8) * 8), ONE, dtype=torch.uint8)
    padded[:, :, :columns] = scale
    found = shuffle_scale_a16w4(scale.view(E8), gate_up=gate_up)
    assert (found.dtype, found.shape) == (E8, (experts * rows, padded.shape[2]))
    for expert, part in enumerate(found.view(torch.uint8).view(padded.shape)):
        assert torch.equal(part, placed(padded[expert], place))
    flat = scale.view(experts * rows, columns).view(E8)
    assert torch.equal(found.view(torch.uint8), EmulatedAiter().shuffle_scale_a16w4(flat, experts, gate_up).view(torch.uint8))


def test_of_bytes_tiles_and_lanes_are_one_permutation_while_gate_and_up_are_apart() -> None:
    """On this the runner relies where AITER chooses between fp4 and bf16 rows by their number (``admission``)."""
    weight, scale = bytes_of(2, 64, 128), bytes_of(2, 128, 8).view(E8)
    assert torch.equal(shuffle_weight(weight), shuffle_weight_a16w4(weight, gate_up=False))
    assert not torch.equal(shuffle_weight(weight), shuffle_weight_a16w4(weight, gate_up=True))
    assert torch.equal(e8m0_shuffle(scale).view(torch.uint8), shuffle_scale_a16w4(scale, gate_up=False).view(torch.uint8))


def test_the_mark_is_on_the_tensor_and_on_no_view_of_it() -> None:
    weight = torch.zeros(2, 16, 32)
    mark_shuffled(weight)
    assert vars(weight) == {"is_shuffled": True}
    assert not vars(weight.view(2, 16, 32))

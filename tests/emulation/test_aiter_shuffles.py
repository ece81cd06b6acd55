"""The emulated shuffles: permutations against index formulas, the mark and how it is lost, padding, and errors."""

import copy
import itertools

import pytest
import torch
from torch import Tensor

from tests.emulation.aiter.index_formulas import lane_position, scale_lane_position, scale_tile_position, tile_position
from tests.emulation.aiter.permutations import Layout, as_bytes, unshuffle
from tests.emulation.aiter.shuffles import is_marked
from tests.emulation.aiter_cases import L, make_aiter

E8M0 = torch.float8_e8m0fnu


def numbered(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return random bits; equal elements are rare enough for a permutation to show."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8).view(dtype)


def flat(x: Tensor) -> list[int]:
    return [int(value) for value in as_bytes(x).flatten().unbind()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float4_e2m1fn_x2])
def test_tiles_are_where_the_formula_says(dtype: torch.dtype) -> None:
    rows, columns = 32, 96
    x = numbered(L, rows, columns, dtype=dtype)
    shuffled = make_aiter().shuffle_weight(x)
    assert (shuffled.shape, shuffled.dtype) == (x.shape, dtype)
    for before, after in zip(x.unbind(), shuffled.unbind(), strict=True):
        source, target = flat(before), flat(after)
        for n, k in itertools.product(range(rows), range(columns)):
            assert target[tile_position(n, k, columns, vector=16 // dtype.itemsize)] == source[n * columns + k]
    assert torch.equal(as_bytes(unshuffle(shuffled, Layout.TILES, L)), as_bytes(x))


@pytest.mark.parametrize("gate_up", [False, True])
def test_lanes_are_where_the_formula_says(gate_up: bool) -> None:
    rows, columns = 64, 128
    x = numbered(L, rows, columns, dtype=torch.float4_e2m1fn_x2)
    shuffled = make_aiter().shuffle_weight_a16w4(x, 16, gate_up)
    for before, after in zip(as_bytes(x).unbind(), as_bytes(shuffled).unbind(), strict=True):
        source, target = flat(before), flat(after)
        for n, k in itertools.product(range(rows), range(columns)):
            assert target[lane_position(n, k, rows, columns, gate_up=gate_up)] == source[n * columns + k]
    layout = Layout.GATED_LANES if gate_up else Layout.LANES
    assert torch.equal(as_bytes(unshuffle(shuffled, layout, L)), as_bytes(x))
    assert torch.equal(as_bytes(make_aiter().shuffle_weight(x, (16, 16), is_guinterleave=True, gate_up=gate_up)), as_bytes(shuffled))


def test_scales_are_where_the_contract_says() -> None:
    rows, columns = 300, 12
    scale = numbered(rows, columns, dtype=E8M0)
    shuffled = make_aiter().e8m0_shuffle(scale)
    assert shuffled is not None
    assert shuffled.shape == (512, 16)
    source, target = flat(scale), flat(shuffled)
    for x, y in itertools.product(range(rows), range(columns)):
        assert target[scale_tile_position(x, y, 16)] == source[x * columns + y]
    assert target.count(0xFF) >= 512 * 16 - rows * columns  # the padding is poison
    assert torch.equal(as_bytes(unshuffle(shuffled, Layout.SCALE_TILES, 1))[:rows, :columns], as_bytes(scale))


@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("columns", [4, 16])
def test_scales_of_lanes_are_where_the_formula_says(gate_up: bool, columns: int) -> None:
    rows, padded = 64, max(columns, 8)
    scale = numbered(L * rows, columns, dtype=E8M0)
    shuffled = make_aiter().shuffle_scale_a16w4(scale, L, gate_up)
    assert shuffled.shape == (L * rows, padded)
    for before, after in zip(as_bytes(scale).chunk(L), as_bytes(shuffled).chunk(L), strict=True):
        source, target = flat(before), flat(after)
        for n, k in itertools.product(range(rows), range(columns)):
            assert target[scale_lane_position(n, k, rows, padded, gate_up=gate_up)] == source[n * columns + k]
        for n, k in itertools.product(range(rows), range(columns, padded)):
            assert target[scale_lane_position(n, k, rows, padded, gate_up=gate_up)] == 0x7F


def test_lanes_without_gate_up_are_tiles_for_elements_of_one_byte() -> None:
    """So one preparation serves fp4 and bf16 activations over fp4 weights, where the rows of the scales need no padding."""
    library = make_aiter()
    weight, scale = numbered(L, 64, 128, dtype=torch.float4_e2m1fn_x2), numbered(L * 64, 8, dtype=E8M0)
    assert torch.equal(as_bytes(library.shuffle_weight(weight)), as_bytes(library.shuffle_weight_a16w4(weight, 16, False)))
    tiles = library.e8m0_shuffle(scale)
    assert tiles is not None
    assert torch.equal(as_bytes(tiles), as_bytes(library.shuffle_scale_a16w4(scale, L, False)))


def test_the_mark_is_set_and_lost_as_upstream() -> None:
    library, wheel = make_aiter(), make_aiter(version="0.1.7")
    weight = numbered(L, 64, 128, dtype=torch.bfloat16)
    shuffled = library.shuffle_weight(weight)
    assert not is_marked(weight)
    assert is_marked(shuffled)
    assert is_marked(wheel.shuffle_weight(weight))
    assert is_marked(library.shuffle_weight_a16w4(weight, 16, False))
    assert not is_marked(wheel.shuffle_weight_a16w4(weight, 16, False))
    for lost in (
        shuffled.view(shuffled.shape),
        shuffled.clone(),
        shuffled.to(torch.float16),
        torch.nn.Parameter(shuffled, requires_grad=False),
        shuffled[:2],
    ):
        assert not is_marked(lost)
    assert is_marked(copy.copy(shuffled))


def test_sizes_that_do_not_divide_raise() -> None:
    library = make_aiter()
    for shape in ((L, 24, 64), (L, 32, 48)):
        with pytest.raises(AssertionError, match="multiple"):
            library.shuffle_weight(numbered(*shape, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError):
        library.shuffle_weight_a16w4(numbered(L, 24, 64, dtype=torch.uint8), 16, False)
    with pytest.raises(AssertionError, match="three"):
        library.shuffle_weight_a16w4(numbered(32, 64, dtype=torch.uint8), 16, False)
    with pytest.raises(AssertionError, match="two"):
        library.e8m0_shuffle(numbered(L, 32, 8, dtype=E8M0))
    with pytest.raises(ValueError, match="experts_cnt"):
        library.shuffle_scale_a16w4(numbered(64, 8, dtype=E8M0), None, False)


def test_padding_of_columns_is_recorded_and_refused() -> None:
    library = make_aiter()
    x = numbered(L, 32, 96, dtype=torch.float8_e4m3fn)
    padded = library.shuffle_weight(x, pad_k_to=128)
    assert padded.shape == (L, 32, 128)
    assert (vars(padded)["aiter_original_k"], vars(padded)["aiter_padded_k"]) == (96, 128)
    back = as_bytes(unshuffle(padded, Layout.TILES, L))
    assert torch.equal(back[..., :96], as_bytes(x))
    assert not back[..., 96:].any()
    with pytest.raises(ValueError, match="negative"):
        library.shuffle_weight(x, pad_k_to=-1)
    for options in ({"use_int4": True}, {"is_guinterleave": True}):
        with pytest.raises(NotImplementedError, match="pad_k_to"):
            library.shuffle_weight(x, (16, 16), options.get("use_int4", False), options.get("is_guinterleave", False), pad_k_to=128)


def test_none_and_float32_scales_come_back_as_they_are() -> None:
    library, scale = make_aiter(), torch.ones(3, 3)
    assert library.e8m0_shuffle(None) is None
    assert library.e8m0_shuffle(scale) is scale
    assert library.shuffle_scale(scale) is scale

from collections.abc import Callable
from types import ModuleType
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_typed.ops.scale_layout import reference
from moe_typed.ops.scale_layout import triton as fast
from tests.ops.quantize_cases import raw
from tests.ops.support import devices, in_one_graph, int_rows, ints

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "triton"])
shapes = pytest.mark.parametrize(("rows", "groups"), [(1, 1), (2, 2), (3, 8), (1, 56), (130, 5), (33, 224), (257, 4)])


def e8m0(rows: int, groups: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(rows * groups)
    return torch.randint(0, 256, (rows, groups), generator=generator, dtype=torch.uint8).to(device).view(torch.float8_e8m0fnu)


def float32(rows: int, groups: int, device: str = "cpu") -> Tensor:
    return torch.arange(1.0, rows * groups + 1).view(rows, groups).to(device)


def assert_same(found: Tensor, wanted: Tensor) -> None:
    assert (found.dtype, found.shape, found.stride()) == (wanted.dtype, wanted.shape, wanted.stride())
    assert torch.equal(raw(found), raw(wanted))


@devices
@IMPLEMENTATIONS
@shapes
def test_columns_lie_in_memory_one_after_another_and_aligned(device: str, implementation: ModuleType, rows: int, groups: int) -> None:
    scale = float32(rows, groups, device)
    columns = implementation.to_column_major(scale)
    assert torch.equal(columns, scale)
    assert columns.stride() == (1, -(-rows // 4) * 4)
    assert_same(implementation.to_row_major(columns), scale)
    arena = torch.zeros(groups, 512, device=device)
    arena[:, :rows] = scale.t()
    assert_same(implementation.to_row_major(arena.t()[:rows]), scale)  # columns of a larger buffer


@devices
@IMPLEMENTATIONS
@shapes
def test_words_hold_four_groups_the_first_lowest(device: str, implementation: ModuleType, rows: int, groups: int) -> None:
    scale = e8m0(rows, groups, device)
    words = implementation.pack_ue8m0(scale)
    assert words.dtype == torch.int32
    assert words.shape == (rows, -(-groups // 4))
    assert words.stride() == (1, -(-rows // 4) * 4)
    codes = scale.view(torch.uint8)
    for row in (0, rows - 1):
        for group in range(words.shape[1] * 4):
            found = (int(words[row, group // 4]) >> (8 * (group % 4))) & 0xFF
            assert found == (int(codes[row, group]) if group < groups else 0)
    assert_same(implementation.unpack_ue8m0(words, groups), scale)


@devices
@IMPLEMENTATIONS
def test_float32_powers_of_two_are_packed_by_their_exponents(device: str, implementation: ModuleType) -> None:
    scale = torch.exp2(torch.arange(-126.0, 126.0, 21)).view(3, 4).to(device)
    words = implementation.pack_ue8m0(scale)
    assert int_rows(implementation.unpack_ue8m0(words, 4).view(torch.uint8)) == [[1, 22, 43, 64], [85, 106, 127, 148], [169, 190, 211, 232]]


@devices
@IMPLEMENTATIONS
@shapes
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn])
def test_tiles_are_those_of_the_documented_formula(device: str, implementation: ModuleType, rows: int, groups: int, dtype: torch.dtype) -> None:
    scale = e8m0(rows, groups, device).view(dtype)
    swizzled = implementation.swizzle(scale)
    wanted = torch.zeros(-(-rows // 128) * 128 * (-(-groups // 4) * 4), dtype=torch.uint8)
    row, group = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
    tile = row // 128 * -(-groups // 4) + group // 4
    wanted[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + group % 4] = scale.cpu().view(torch.uint8)
    assert swizzled.dtype == dtype
    assert torch.equal(raw(swizzled).cpu(), wanted)
    assert_same(implementation.unswizzle(swizzled, rows, groups), scale)


def test_tiles_are_those_of_torchao() -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    to_blocked = cast("Callable[[Tensor, bool], Tensor]", utils.to_blocked)
    for rows, groups in ((1, 1), (130, 5), (256, 224)):
        scale = e8m0(rows, groups).view(torch.uint8)
        assert torch.equal(reference.swizzle(scale), to_blocked(scale, False).flatten())


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 300), st.integers(1, 40))
def test_every_order_can_be_undone(rows: int, groups: int) -> None:
    scale, bytes_ = float32(rows, groups), e8m0(rows, groups)
    assert_same(reference.to_row_major(reference.to_column_major(scale)), scale)
    assert_same(reference.unpack_ue8m0(reference.pack_ue8m0(bytes_), groups), bytes_)
    assert_same(reference.unswizzle(reference.swizzle(bytes_), rows, groups), bytes_)


@devices
def test_rows_that_are_not_live_are_not_read(device: str) -> None:
    live = torch.tensor([2], dtype=torch.int32, device=device)
    scale, codes = float32(5, 8, device), e8m0(5, 8, device)
    dirty, dirty_codes = scale.clone(), codes.clone()
    dirty[2:] = float("nan")
    dirty_codes.view(torch.uint8)[2:] = 255
    assert torch.equal(fast.to_column_major(dirty, live)[:2], scale[:2])
    assert torch.equal(fast.to_row_major(reference.to_column_major(dirty), live)[:2], scale[:2])
    assert torch.equal(fast.pack_ue8m0(dirty_codes, live)[:2], reference.pack_ue8m0(codes)[:2])
    assert torch.equal(raw(fast.unpack_ue8m0(reference.pack_ue8m0(dirty_codes), 8, live)[:2]), raw(codes[:2]))
    assert torch.equal(raw(fast.swizzle(dirty_codes, live)), raw(reference.swizzle(codes, live)))
    assert torch.equal(raw(fast.unswizzle(reference.swizzle(dirty_codes), 5, 8, live)[:2]), raw(codes[:2]))
    assert int(raw(reference.swizzle(codes, live)).count_nonzero()) == int(raw(codes[:2]).count_nonzero())


@devices
@IMPLEMENTATIONS
def test_no_rows(device: str, implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_reorder", None)
    assert implementation.to_column_major(float32(0, 8, device)).shape == (0, 8)
    assert implementation.to_row_major(implementation.to_column_major(float32(0, 8, device))).shape == (0, 8)
    assert implementation.pack_ue8m0(e8m0(0, 8, device)).shape == (0, 2)
    assert implementation.unpack_ue8m0(implementation.pack_ue8m0(e8m0(0, 8, device)), 8).shape == (0, 8)
    assert implementation.swizzle(e8m0(0, 8, device)).shape == (0,)
    assert implementation.unswizzle(implementation.swizzle(e8m0(0, 8, device)), 0, 8).shape == (0, 8)


@IMPLEMENTATIONS
def test_scales_in_another_order_are_refused(implementation: ModuleType) -> None:
    words = reference.pack_ue8m0(e8m0(3, 8))
    with pytest.raises(ValueError, match=r"3 rows of 8 groups, PACKED, must have the shape \[3, 2\].*got \[3, 2\] with strides \[2, 1\]"):
        implementation.unpack_ue8m0(words.contiguous(), 8)
    with pytest.raises(ValueError, match=r"got \[3, 2\]"):
        implementation.unpack_ue8m0(words, 12)
    with pytest.raises(ValueError, match="COLUMN_MAJOR"):
        implementation.to_row_major(float32(3, 8))
    with pytest.raises(ValueError, match=r"SWIZZLED, must have the shape \[1024\]"):
        implementation.unswizzle(reference.swizzle(e8m0(3, 4)), 3, 8)


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("name", ["to_column_major", "pack_ue8m0", "swizzle"])
def test_they_trace_into_one_graph(device: str, implementation: ModuleType, name: str) -> None:
    torch.compiler.reset()
    scale = float32(5, 6, device) if name == "to_column_major" else e8m0(5, 6, device)
    function = cast("Callable[[Tensor], Tensor]", getattr(implementation, name))
    assert_same(in_one_graph(function)(scale), cast("Callable[[Tensor], Tensor]", getattr(reference, name))(scale))


def test_the_case_of_two_tokens_by_column() -> None:
    columns = reference.to_column_major(torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    assert columns.untyped_storage().nbytes() == 2 * 4 * 4
    assert [float(value) for value in reference.to_row_major(columns).flatten().unbind()] == [1.0, 2.0, 4.0, 8.0]
    assert ints(torch.tensor(columns.stride())) == [1, 4]

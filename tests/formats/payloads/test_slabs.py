"""Rows of a slab: scales column-major within each expert, and no other order. Three experts of two rows each, unless a test says otherwise."""

import pytest
import torch

from moe_typed import debug
from moe_typed.formats import Fp8Block128PackedSlabRows, Fp8Block128Rows, Fp8Block128SlabRows, ScaledRows
from moe_typed.formats.payloads.slab import SlabScaledRows
from tests.formats.support import FN, in_slab, make, meaning, noise, ones, refused, slab


@pytest.mark.parametrize(("cls", "groups"), [(Fp8Block128SlabRows, 4), (Fp8Block128PackedSlabRows, 2)])
@pytest.mark.parametrize(
    ("order", "reason"),
    [
        pytest.param((0, 1, 2), "stride of axis 1 is {groups}, expected 1", id="row-major"),
        pytest.param((1, 0, 2), "stride of axis 0 is {groups}, expected capacity*(hidden//{width}) = ", id="capacity outside"),
        pytest.param((2, 0, 1), "stride of axis 0 is 2, expected capacity*(hidden//{width}) = ", id="column-major over the whole slab"),
        pytest.param((0, 2, 1), "", id="column-major within each expert"),
    ],
)
def test_one_order_of_axes_alone_is_taken(cls: type[ScaledRows], groups: int, order: tuple[int, int, int], reason: str) -> None:
    """``order``: the axes from the outermost in memory to the innermost."""
    assert cls.format.scale is not None
    width = 128 * cls.format.scale.per_element
    data, shape = ones(FN, 6, groups * width), (3, 2, groups)
    inverse = [order.index(axis) for axis in range(3)]
    scale = ones(cls.format.scale.dtype, *(shape[axis] for axis in order)).permute(inverse)
    if not reason:
        with debug("strict"):
            make(cls, data, scale)
        return
    error = refused(cls, data, scale)
    assert error.field == "scale"
    assert error.reason.startswith(reason.format(groups=groups, width=width))


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 2, 5), "axis 2 is 5, expected hidden//128 = 4"),
        ((3, 3, 4), "axis 0 is 6, expected local_experts*capacity = 9"),
        ((2, 2, 4), "axis 0 is 6, expected local_experts*capacity = 4"),
    ],
)
def test_shapes_must_agree(shape: tuple[int, int, int], reason: str) -> None:
    experts, capacity, groups = shape
    error = refused(Fp8Block128SlabRows, ones(FN, 6, 512), in_slab(ones(torch.float32, experts * capacity, groups), experts, capacity))
    assert error.reason == reason


def test_flat_scales_are_those_of_flat_rows() -> None:
    error = refused(Fp8Block128SlabRows, ones(FN, 6, 512), ones(torch.float32, 6, 4))
    assert error.reason == "has 2 dims, expected 3 (local_experts capacity hidden//128)"
    assert error.hint == "these values do satisfy Fp8Block128Rows"


def test_scales_of_a_slab_are_none_of_flat_rows() -> None:
    error = refused(Fp8Block128Rows, ones(FN, 6, 512), in_slab(ones(torch.float32, 6, 4), 3, 2))
    assert (error.field, error.reason) == ("scale", "has 3 dims, expected 2 (rows hidden//128)")
    assert error.hint == "these values do satisfy Fp8Block128SlabRows"


def test_packed_and_float32_scales_are_told_apart() -> None:
    packed, plain = in_slab(ones(torch.int32, 6, 1), 3, 2), in_slab(ones(torch.float32, 6, 4), 3, 2)
    error = refused(Fp8Block128SlabRows, ones(FN, 6, 512), packed)
    assert (error.reason, error.hint) == ("dtype is int32, expected float32", "these values do satisfy Fp8Block128PackedSlabRows")
    error = refused(Fp8Block128PackedSlabRows, ones(FN, 6, 512), plain)
    assert (error.reason, error.hint) == ("dtype is float32, expected int32", "these values do satisfy Fp8Block128SlabRows")


@pytest.mark.parametrize("cls", [Fp8Block128SlabRows, Fp8Block128PackedSlabRows])
@pytest.mark.parametrize(("experts", "capacity"), [(1, 6), (6, 1), (2, 3), (3, 2), (2, 0)])
@pytest.mark.parametrize("hidden", [512, 1024])
def test_the_meaning_does_not_hang_on_the_shape(cls: type[ScaledRows], experts: int, capacity: int, hidden: int) -> None:
    payload = slab(cls, noise(experts * capacity, hidden), experts, capacity)
    with debug("strict"):
        assert torch.equal(payload.dequantize(), meaning(payload).float().view(-1, hidden))
        payload.check_live(experts * capacity)
    assert isinstance(payload, SlabScaledRows)
    assert payload.row_scale.is_contiguous()

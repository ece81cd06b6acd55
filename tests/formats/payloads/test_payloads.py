"""Every payload class: what it takes is what its facts say, what it means is what its bytes say."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, BoundaryError, DeviceCount, Fp16Rows, Fp32Rows, LocalIds, Payload, Routing, Settled, StandardDispatchOutput, debug
from moe_typed.formats import (
    Format,
    Fp8Block128ColumnRows,
    Fp8Block128PackedRows,
    Fp8Block128PackedSlabRows,
    Fp8Block128Rows,
    Fp8Block128SlabRows,
    Fp8FnuzTensorRows,
    Fp8TensorRows,
    Fp8TokenRows,
    MxFp4Rows,
    MxFp8Rows,
    MxFp8SwizzledRows,
    NvFp4Rows,
    ScaledRows,
    ScaleFactor,
    ScaleOrder,
    catalogue,
)
from moe_typed.stages import FlatRowsInput
from tests.formats.support import E8, FN, FNUZ, FP4, SCALED, in_slab, make, meaning, noise, ones, quantized, refused, slab_shape, wide

every_scaled_class = pytest.mark.parametrize("cls", SCALED, ids=lambda cls: cls.__name__)
ALL_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int8, torch.uint8, FN, FNUZ, FP4, E8)


def aligned(dtype: torch.dtype, rows: int, columns: int, stride: int | None = None) -> Tensor:
    """Return (rows, columns), column-major, each column ``stride`` after the one before: rows rounded up to four by default."""
    stride = -(-rows // 4) * 4 if stride is None else stride
    return ones(dtype, columns * max(stride, 1)).as_strided((rows, columns), (1, stride))


def by_facts(fmt: Format, rows: int, hidden: int) -> list[object]:
    """Return the arguments of a payload as nothing but its facts describe them."""
    data = ones(fmt.data_dtype, rows, hidden // fmt.per_element)
    scale = fmt.scale
    if scale is None:
        return [data]
    groups = hidden // (scale.group[1] or hidden)
    made: Tensor
    match scale.order:
        case ScaleOrder.SCALAR:
            made = ones(scale.dtype, 1)
        case ScaleOrder.PER_ROW:
            made = ones(scale.dtype, rows)
        case ScaleOrder.ROW_MAJOR:
            made = ones(scale.dtype, rows, groups)
        case ScaleOrder.ROW_MAJOR_PAIRS:
            made = ones(scale.dtype, rows, groups // 2, 2)
        case ScaleOrder.COLUMN_MAJOR_ALIGNED:
            made = aligned(scale.dtype, rows, -(-groups // scale.per_element))
        case ScaleOrder.SLAB_COLUMN_MAJOR:
            made = in_slab(ones(scale.dtype, rows, groups // scale.per_element), *slab_shape(rows))
        case _:
            made = ones(scale.dtype, -(-rows // 128) * -(-groups // 4) * 512)
    return [data, made, *([ScaleFactor(torch.ones(1))] if fmt.name == "nvfp4" else [])]


# ---- layout ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", catalogue.PAYLOADS, ids=lambda cls: cls.__name__)
class TestFacts:
    @pytest.mark.parametrize("rows", [0, 1, 3, 4, 130])
    @pytest.mark.parametrize("hidden", [128, 512, 1152])
    def test_what_the_facts_describe_is_accepted(self, cls: type[Payload], rows: int, hidden: int) -> None:
        hidden = wide(cls, hidden)
        with debug("strict"):
            made = make(cls, *by_facts(cls.format, rows, hidden))
        assert (made.rows, made.hidden) == (rows, hidden)

    @pytest.mark.parametrize("part", ["data", "scale"])
    def test_no_other_dtype_is(self, cls: type[Payload], part: str) -> None:
        parts = by_facts(cls.format, 3, 512)
        if part == "scale" and len(parts) == 1:
            pytest.skip("has no scale")
        place = ["data", "scale"].index(part)
        right = parts[place]
        assert isinstance(right, Tensor)
        for dtype in ALL_DTYPES:
            if dtype == right.dtype:
                continue
            # the same shape and strides in another dtype
            parts[place] = ones(dtype, right.untyped_storage().nbytes()).as_strided(right.shape, right.stride())
            error = refused(cls, *parts)
            assert (error.field, error.reason.split(",")[0]) == (part, f"dtype is {str(dtype).removeprefix('torch.')}")

    def test_no_data_that_is_cut_from_wider_rows_is(self, cls: type[Payload]) -> None:
        data, *others = by_facts(cls.format, 3, 512)
        assert isinstance(data, Tensor)
        cut = ones(data.dtype, 3, 2 * data.shape[1])[:, : data.shape[1]]
        if cls.format.scale is None:  # models may hold rows as they like
            with debug("strict"):
                make(cls, cut)
        else:
            assert refused(cls, cut, *others).reason.startswith("is not contiguous")

    def test_bytes(self, cls: type[Payload]) -> None:
        tensors = [part for part in by_facts(cls.format, 128, 512) if isinstance(part, Tensor)]
        assert cls.format.payload_bytes(128, 512) == sum(part.untyped_storage().nbytes() for part in tensors)  # 128 x 512 needs no padding
        assert cls.format.payload_bytes(0, 512) == 0


@pytest.mark.parametrize(
    ("cls", "hidden", "channels"),
    [
        (Fp8Block128Rows, 192, 128),
        (Fp8Block128ColumnRows, 192, 128),
        (Fp8Block128PackedRows, 192, 128),
        (Fp8Block128SlabRows, 192, 128),
        (Fp8Block128PackedSlabRows, 640, 512),
        (MxFp8Rows, 48, 32),
        (MxFp8SwizzledRows, 48, 32),
    ],
)
def test_rows_of_part_of_a_group_are_refused(cls: type[ScaledRows], hidden: int, channels: int) -> None:
    error = refused(cls, *by_facts(cls.format, 3, hidden))
    assert error.reason == f"hidden = {hidden} is not a multiple of {channels}"


@pytest.mark.parametrize(("cls", "held", "multiple"), [(MxFp4Rows, 24, 16), (NvFp4Rows, 12, 8)])
def test_packed_rows_of_part_of_a_group_are_refused(cls: type[ScaledRows], held: int, multiple: int) -> None:
    assert refused(cls, *by_facts(cls.format, 3, 2 * held)).reason == f"bytes = {held} is not a multiple of {multiple}"


DATA, MX = ones(FN, 3, 512), ones(E8, 3, 16)


@pytest.mark.parametrize(
    ("cls", "scale", "reason", "hint"),
    [
        pytest.param(
            Fp8Block128ColumnRows,
            ones(torch.float32, 3, 4),
            "stride of axis 0 is 4, expected 1",
            "these values do satisfy Fp8Block128Rows",
            id="row-major for column-major",
        ),
        pytest.param(
            Fp8Block128ColumnRows,
            aligned(torch.float32, 3, 4, stride=3),
            "stride of axis 1 is 3, expected 4*(-(-rows//4)) = 4",
            "",
            id="columns that do not begin at 16 bytes",
        ),
        pytest.param(
            Fp8Block128ColumnRows,
            aligned(torch.float32, 3, 4, stride=8),
            "stride of axis 1 is 8, expected 4*(-(-rows//4)) = 4",
            "",
            id="columns too far apart",
        ),
        pytest.param(
            Fp8Block128ColumnRows, aligned(torch.float32, 3, 16), "axis 1 is 16, expected hidden//128 = 4", "", id="a scale for 32 channels"
        ),
        pytest.param(
            Fp8Block128Rows,
            aligned(torch.float32, 3, 4),
            "is not contiguous: stride (1, 4) for shape [3, 4]",
            "these values do satisfy Fp8Block128ColumnRows",
            id="column-major for row-major",
        ),
        pytest.param(
            Fp8Block128Rows,
            aligned(torch.int32, 3, 1),
            "dtype is int32, expected float32",
            "these values do satisfy Fp8Block128PackedRows",
            id="packed for float32",
        ),
        pytest.param(
            Fp8Block128PackedRows,
            ones(torch.float32, 3, 4),
            "dtype is float32, expected int32",
            "these values do satisfy Fp8Block128Rows",
            id="float32 for packed",
        ),
        pytest.param(
            Fp8Block128PackedRows,
            aligned(torch.int32, 3, 4),
            "axis 1 is 4, expected -(-(hidden//128)//4) = 1",
            "",
            id="a word for each group",
        ),
        pytest.param(
            MxFp8Rows, ones(E8, 2048), "has 1 dims, expected 2 (rows hidden//32)", "these values do satisfy MxFp8SwizzledRows", id="swizzled"
        ),
        pytest.param(MxFp8Rows, ones(E8, 48), "has 1 dims, expected 2 (rows hidden//32)", "", id="flat"),
        pytest.param(MxFp8Rows, ones(E8, 3, 4), "axis 1 is 4, expected hidden//32 = 16", "", id="e8m0 for 128 channels"),
        pytest.param(MxFp8Rows, ones(E8, 16, 3).t(), "is not contiguous: stride (1, 3) for shape [3, 16]", "", id="column-major e8m0"),
        pytest.param(
            MxFp8SwizzledRows,
            MX,
            "has 2 dims, expected 1 (512*(-(-rows//128))*(-(-(hidden//32)//4)))",
            "these values do satisfy MxFp8Rows",
            id="rows",
        ),
        pytest.param(
            MxFp8SwizzledRows,
            ones(E8, 48),
            "axis 0 is 48, expected 512*(-(-rows//128))*(-(-(hidden//32)//4)) = 2048",
            "",
            id="flat for swizzled",
        ),
        pytest.param(Fp8TokenRows, ones(torch.float32, 3, 1), "has 2 dims, expected 1 (rows)", "", id="a column for a vector"),
        pytest.param(Fp8TokenRows, ones(torch.float32, 6)[::2], "is not contiguous: stride (2,) for shape [3]", "", id="every other"),
        pytest.param(
            Fp8TokenRows, ones(torch.float32, 1), "axis 0 is 1, expected rows = 3", "these values do satisfy Fp8TensorRows", id="one for all"
        ),
        pytest.param(Fp8TensorRows, ones(torch.float32, 3), "axis 0 is 3, expected 1", "these values do satisfy Fp8TokenRows", id="one a row"),
    ],
)
def test_scales_in_another_order_are_refused_and_the_hint_names_theirs(cls: type[ScaledRows], scale: Tensor, reason: str, hint: str) -> None:
    error = refused(cls, DATA, scale)
    assert error.field == "scale"
    assert error.reason.startswith(reason)
    assert hint in error.hint
    assert hint or "satisfy" not in error.hint


@pytest.mark.parametrize(("rows", "size"), [(1, 512), (128, 512), (129, 1024), (256, 1024), (257, 1536)])
def test_swizzled_scales_are_whole_tiles(rows: int, size: int) -> None:
    with debug("strict"):
        MxFp8SwizzledRows(ones(FN, rows, 128), ones(E8, size))
    for wrong in (size - 512, size + 512, rows * 4):
        if wrong != size:
            assert refused(MxFp8SwizzledRows, ones(FN, rows, 128), ones(E8, wrong)).field == "scale"


@pytest.mark.parametrize(("cls", "dtype", "per_element"), [(Fp8Block128ColumnRows, torch.float32, 1), (Fp8Block128PackedRows, torch.int32, 4)])
class TestStridesThatAddressNothing:
    def test_of_one_row(self, cls: type[ScaledRows], dtype: torch.dtype, per_element: int) -> None:
        hidden = 128 * per_element * 2
        with debug("strict"):
            make(cls, ones(FN, 1, hidden), ones(dtype, 8).as_strided((1, 2), (7, 4)))
        error = refused(cls, ones(FN, 1, hidden), ones(dtype, 1, 2))  # but its second column is somewhere
        assert error.reason == "stride of axis 1 is 1, expected 4*(-(-rows//4)) = 4"

    def test_of_one_column(self, cls: type[ScaledRows], dtype: torch.dtype, per_element: int) -> None:
        with debug("strict"):
            make(cls, ones(FN, 3, 128), ones(dtype, 9)[:3].view(3, 1))

    def test_of_no_rows(self, cls: type[ScaledRows], dtype: torch.dtype, per_element: int) -> None:
        with debug("strict"):
            make(cls, ones(FN, 0, 256 * per_element), ones(dtype, 0, 2))


def test_the_two_e4m3_are_different_numbers() -> None:
    code = torch.tensor([[0x40, 0x80, 0x7F]], dtype=torch.uint8)
    one = torch.ones(1)
    fn, fnuz = Fp8TensorRows(code.view(FN), one).dequantize(), Fp8FnuzTensorRows(code.view(FNUZ), one).dequantize()
    assert (float(fn[0, 0]), float(fnuz[0, 0])) == (2.0, 1.0)
    assert torch.equal(fn.isnan(), torch.tensor([[False, False, True]]))
    assert torch.equal(fnuz.isnan(), torch.tensor([[False, True, False]]))
    error = refused(Fp8TensorRows, code.view(FNUZ).expand(2, 3).contiguous(), one)
    assert error.reason == "dtype is float8_e4m3fnuz, expected float8_e4m3fn"
    assert error.hint == "these values do satisfy Fp8FnuzTensorRows"


# ---- meaning -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [Bf16Rows, Fp16Rows, Fp32Rows])
def test_dense_rows_mean_their_values(cls: type[Bf16Rows | Fp16Rows | Fp32Rows]) -> None:
    data = torch.tensor([[1.5, -2.0, 0.1]]).to(cls.format.data_dtype)
    got = cls(data).dequantize()
    assert got.dtype == torch.float32
    assert torch.equal(got, data.to(torch.float32))


@every_scaled_class
@pytest.mark.parametrize(("rows", "hidden"), [(0, 256), (1, 128), (5, 640), (130, 128)])
def test_a_payload_means_what_its_bytes_say(cls: type[ScaledRows], rows: int, hidden: int) -> None:
    hidden = wide(cls, hidden)
    payload = quantized(cls, noise(rows, hidden))
    got = payload.dequantize()
    assert got.dtype == torch.float32
    assert torch.equal(got, meaning(payload).float().view(rows, hidden))


# ---- data that cannot be right -----------------------------------------------------------------------------------------------------

ROWS, LIVE = 6, 2


def tail_poisoned(cls: type[ScaledRows], first: int) -> ScaledRows:
    """Return rows that hold NaN from ``first`` on, as memory that nobody wrote may, and their scales too where rows have their own."""
    data = noise(ROWS, wide(cls, 256))
    data[first:] = math.nan
    return quantized(cls, data)


def routing(live: int | DeviceCount) -> Routing[LocalIds]:
    return Routing(torch.zeros(ROWS, 1, dtype=torch.int32), torch.ones(ROWS, 1), LocalIds, 1, Settled(), False, live)


OWN_SCALES = [cls for cls in SCALED if cls.format.scale is not None and cls.format.scale.order is not ScaleOrder.SCALAR]


@pytest.mark.parametrize("cls", OWN_SCALES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("stage", [StandardDispatchOutput, FlatRowsInput])
@pytest.mark.parametrize("on_device", [False, True])
def test_live_rows_alone_are_looked_at(cls: type[ScaledRows], stage: Callable[..., object], on_device: bool) -> None:
    def count(live: int) -> int | DeviceCount:
        return DeviceCount(torch.tensor([live], dtype=torch.int32)) if on_device else live

    poisoned = tail_poisoned(cls, LIVE)
    with debug("values"):
        stage(poisoned, routing(count(LIVE)))
        with pytest.raises(BoundaryError) as caught:
            stage(poisoned, routing(count(LIVE + 1)))
    assert (caught.value.boundary, caught.value.field) == (cls.__name__, "scale")
    assert caught.value.reason in ("holds an infinity or a NaN", "holds the byte 255, which is NaN")
    assert "the rows that were quantised held" in caught.value.hint


@pytest.mark.parametrize("cls", OWN_SCALES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("live", [(), (0,), (1, 4), (0, 1, 2, 4, 5)])
def test_rows_of_a_mask_alone_are_looked_at(cls: type[ScaledRows], live: tuple[int, ...]) -> None:
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[list(live)] = True
    data = noise(ROWS, wide(cls, 256))
    data[~mask] = math.nan
    payload = quantized(cls, data)
    payload.check_live(mask)
    for row in set(range(ROWS)) - set(live):
        more = mask.clone()
        more[row] = True
        with pytest.raises(BoundaryError) as caught:
            payload.check_live(more)
        assert (caught.value.boundary, caught.value.field) == (cls.__name__, "scale")


@pytest.mark.parametrize("cls", [Fp8TensorRows, Fp8FnuzTensorRows])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_scale_for_all_is_looked_at_even_without_rows(cls: type[ScaledRows], bad: float) -> None:
    payload = make(cls, ones(cls.format.data_dtype, 2, 128), torch.full((1,), bad))
    with pytest.raises(BoundaryError, match="holds an infinity or a NaN"):
        payload.check_live(0)


def test_the_global_scale_is_looked_at() -> None:
    payload = NvFp4Rows(ones(FP4, 1, 8), ones(FN, 1, 1), ScaleFactor(torch.tensor([math.nan])))
    with pytest.raises(BoundaryError) as caught:
        payload.check_live(1)
    assert (caught.value.field, caught.value.reason) == ("global_scale", "holds an infinity or a NaN")


@pytest.mark.parametrize("cls", [Bf16Rows, Fp16Rows, Fp32Rows])
def test_a_model_may_hold_what_it_likes(cls: type[Payload]) -> None:
    make(cls, torch.full((2, 4), math.nan, dtype=cls.format.data_dtype)).check_live(2)

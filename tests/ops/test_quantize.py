from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_typed.ops.minifloat import reference as minifloat
from moe_typed.ops.minifloat.spec import E2M1, E4M3FN, E4M3FNUZ, MXFP_ROUNDING, Number
from moe_typed.ops.quantize import reference
from moe_typed.ops.quantize import triton as fast
from moe_typed.ops.quantize.spec import tile
from moe_typed.ops.scale_layout.spec import ScaleLayout
from moe_typed.ops.upscale import reference as upscale
from tests.ops.quantize_cases import CASES, FP4, Case, expected, magnitudes, raw, scale_of
from tests.ops.support import devices, dtypes, floats, in_one_graph, ints, on_cuda

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter divides in numpy, which warns of infinities
HIDDEN = 512

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "triton"])


def random_rows(count: int, hidden: int = HIDDEN, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    """Return rows whose groups are of many magnitudes, with what is hard to round among them: ties, zeros, the limits of formats."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(count, hidden, generator=generator) * torch.randn(count, hidden // 16, generator=generator).mul(3).exp2().repeat_interleave(
        16, 1
    )
    if count:
        table = magnitudes(torch.float8_e4m3fn)
        ties = torch.cat((table, (table[1:] + table[:-1]) / 2, torch.tensor([464.0, 480.0, 500.0, 6.0, 5.0, 7.0, 0.25])))
        rows[0] = ties[torch.randint(len(ties), (hidden,), generator=generator)].float() * (torch.arange(hidden) % 3 - 1)
    return rows.to(device, dtype)


def hard_rows(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """Return rows with all that is no ordinary number: zeros of both signs, subnormals, the largest, infinities, NaN."""
    rows = random_rows(9)
    rows[1] = 0.0
    rows[2, ::3] = -0.0
    rows[3, 5], rows[3, 300] = float("nan"), float("inf")
    rows[4, 77] = float("-inf")
    rows[5] = torch.finfo(dtype).max
    rows[6] = torch.finfo(dtype).smallest_normal * rows[6].sign()
    rows[7] = rows[7] * torch.finfo(dtype).smallest_normal / rows[7].abs().amax()
    rows[8, 64:] = 0.0
    return rows.to(device, dtype)


# ---- the reference ------------------------------------------------------------------------------------------------------------------


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_reference_is_what_float64_says(case: Case, dtype: torch.dtype) -> None:
    rows = random_rows(24, dtype=dtype)
    scaled = case.quantize(reference, rows, None)
    found = case.upscale(upscale, scaled, torch.float32, None)
    assert torch.equal(found, expected(rows, case).float())


@pytest.mark.parametrize("number", [E4M3FN, E4M3FNUZ, E2M1], ids=["e4m3fn", "e4m3fnuz", "e2m1"])
@pytest.mark.parametrize("rounding", ["up", "floor", "even"])
def test_powers_of_two_at_every_edge(number: Number, rounding: MXFP_ROUNDING) -> None:
    dtype = {E4M3FN: torch.float8_e4m3fn, E4M3FNUZ: torch.float8_e4m3fnuz, E2M1: FP4}[number]
    case = replace(CASES["mxfp8 up"], dtype=dtype, rounding=rounding)
    edges = torch.tensor([float(number.max), 1.0, 1.25, 1.5, 1.75, 1.875, 1.9375], dtype=torch.float32)
    edges = torch.cat((edges, torch.nextafter(edges, torch.tensor(0.0)), torch.nextafter(edges, torch.tensor(float("inf")))))
    amax = (edges.unsqueeze(1) * torch.exp2(torch.arange(-100.0, 115.0, 7))).flatten()
    found = minifloat.decode_e8m0(minifloat.encode_e8m0(amax, number, rounding))
    assert torch.equal(found.double(), scale_of(amax.double(), case))


def test_scales_of_what_is_no_ordinary_group() -> None:
    amax = torch.tensor([0.0, 2.0**-149, 448 * 2.0**-127, 448 * 2.0**-126, torch.finfo(torch.float32).max, float("inf"), float("nan")])
    assert ints(minifloat.encode_e8m0(amax, E4M3FN, "up").view(torch.uint8)) == [0, 0, 0, 1, 247, 255, 255]
    assert ints(minifloat.encode_e8m0(amax, E2M1, "even").view(torch.uint8)) == [0, 0, 7, 8, 253, 255, 255]
    decoded = floats(minifloat.decode_e8m0(torch.tensor([0, 127, 134, 254], dtype=torch.uint8).view(torch.float8_e8m0fnu)))
    assert decoded == [2.0**-127, 1.0, 128.0, 2.0**127]


def test_ties_of_e2m1_go_to_the_even_code() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 7.0, float("inf"), float("nan"), 0.0])
    rounded = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0, 6.0, 0.0]
    assert floats(minifloat.decode_e2m1(minifloat.encode_e2m1(ties))) == rounded
    negative = minifloat.decode_e2m1(minifloat.encode_e2m1(-ties))
    assert floats(negative) == [-value if index != 10 else value for index, value in enumerate(rounded)]
    assert bool(torch.signbit(negative[0]))


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.floats(min_value=-(2.0**99), max_value=2.0**99, width=32), min_size=HIDDEN // 8, max_size=HIDDEN // 8),
)
def test_properties(name: str, values: list[float]) -> None:
    case = CASES[name]
    rows = torch.tensor(values).repeat(2, 8)[:, torch.randperm(HIDDEN, generator=torch.Generator().manual_seed(len(name)))]
    scaled = case.quantize(reference, rows, None)
    back = case.upscale(upscale, scaled, torch.float32, None)
    shaped, shaped_back = (tensor.view(2, -1, case.group if case.group > 0 else HIDDEN) for tensor in (rows, back))

    # Larger values do not become smaller, and nothing changes its sign.
    order = shaped.argsort(-1)
    assert bool((shaped_back.gather(-1, order).diff(dim=-1) >= 0).all())
    assert bool((shaped * shaped_back.sign() >= 0).all())

    if case.rounding is not None:
        # Rows that are held exactly are what they were.
        again = case.upscale(upscale, case.quantize(reference, back, None), torch.float32, None)
        assert torch.equal(again, back)
    if case.rounding == "up":
        # Nothing saturates: what is the largest is at most half a step of the largest binade away.
        amax, amax_back = shaped.abs().amax(-1), shaped_back.abs().amax(-1)
        assert bool(((amax - amax_back).abs() <= amax / (4 if case.dtype == FP4 else 16)).all() or (amax < 2.0**-118).any())


# ---- the kernels --------------------------------------------------------------------------------------------------------------------


def assert_same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for mine, other in zip(found, wanted, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(raw(mine), raw(other))


@cases
@dtypes("float32", "float16", "bfloat16")
def test_kernels_agree_with_the_reference_bit_for_bit(case: Case, device: str, dtype: torch.dtype) -> None:
    shapes = [(1, HIDDEN), (5, 640)]
    if device == "cuda":
        shapes += [(130, HIDDEN), (4099, 640), (33, 2880 if case.group in (16, 32) else 2944), (515, 7168)]
    for count, hidden in shapes:
        rows = random_rows(count, hidden, dtype, device, seed=count)
        assert_same(case.quantize(fast, rows, None), case.quantize(reference, rows, None))


@cases
@dtypes("float32", "float16", "bfloat16")
def test_kernels_agree_on_what_is_no_ordinary_number(case: Case, device: str, dtype: torch.dtype) -> None:
    rows = hard_rows(dtype, device)
    assert_same(case.quantize(fast, rows, None), case.quantize(reference, rows, None))


@devices
@IMPLEMENTATIONS
@cases
def test_what_is_not_finite_poisons_its_group_alone(device: str, implementation: ModuleType, case: Case) -> None:
    rows = random_rows(4, device=device)
    clean = case.upscale(upscale, case.quantize(implementation, rows, None), torch.float32, None)
    rows[2, 40], rows[3, 200] = float("inf"), float("nan")
    found = case.upscale(upscale, case.quantize(implementation, rows, None), torch.float32, None)
    poisoned = torch.zeros(rows.shape, dtype=torch.bool)
    width = {0: 1, -1: HIDDEN}.get(case.group, case.group)
    for row, column in ((2, 40), (3, 200)):
        first = column // width * width
        poisoned[row, first : first + width] = True
    assert torch.equal(torch.isnan(found).cpu(), poisoned)
    assert torch.equal(found.cpu()[~poisoned], clean.cpu()[~poisoned])


@devices
@IMPLEMENTATIONS
def test_groups_of_zeros(device: str, implementation: ModuleType) -> None:
    zeros = torch.zeros(3, HIDDEN, device=device)
    for name, byte in (("fp8 groups", None), ("fp8 rows", None), ("int8 rows", None), ("mxfp8 up", 0), ("mxfp4 floor", 0), ("nvfp4", 0)):
        data, scale, *_ = CASES[name].quantize(implementation, zeros, None)
        assert not bool(data.view(torch.uint8).any())
        assert bool((scale == 1.0).all() if byte is None else (scale.view(torch.uint8) == byte).all())


@devices
@cases
def test_rows_that_are_not_live_are_not_touched(device: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(9, device=device)
    live = torch.tensor([4], dtype=torch.int32, device=device)
    wanted = case.quantize(reference, rows, live)
    rows[4:] = float("nan")
    empty = torch.empty

    def marked(*args: object, **kwargs: object) -> Tensor:
        found = cast("Callable[..., Tensor]", empty)(*args, **kwargs)
        marks = found.view(torch.uint8) if found.numel() else found
        marks.fill_(93)
        return found

    monkeypatch.setattr(torch, "empty", marked)
    found = case.quantize(fast, rows, live)
    monkeypatch.undo()
    for mine, other in zip(found, wanted, strict=True):
        if mine.dim() == 2 or len(mine) == len(rows):
            assert torch.equal(raw(mine[:4]), raw(other[:4]))
            assert bool((raw(mine[4:]) == 93).all())
        else:
            assert torch.equal(raw(mine), raw(other))  # one for all; or whole tiles, whose rows that are not live are zeros


@devices
@pytest.mark.parametrize("quantize", [fast.quantize_fp8_rows, fast.quantize_int8_rows, fast.quantize_mxfp8, fast.quantize_fp8_groups])
def test_rows_that_are_named_alone_are_quantised_and_the_others_not_touched(
    device: str, quantize: Callable[..., tuple[Tensor, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, named, rest = random_rows(9, device=device), [7, 0, 3, 4], [1, 2, 5, 6, 8]
    only = torch.tensor([7, 9, 0, 3, 9, 9, 4], dtype=torch.int32, device=device)  # 9 names none
    wanted = quantize(rows)
    rows[rest] = float("nan")
    empty = torch.empty

    def marked(*args: object, **kwargs: object) -> Tensor:
        found = cast("Callable[..., Tensor]", empty)(*args, **kwargs)
        found.view(torch.uint8).fill_(93)
        return found

    monkeypatch.setattr(torch, "empty", marked)
    found = quantize(rows, only=only)
    nothing = quantize(rows, only=only[:0])
    monkeypatch.undo()
    for mine, other, untouched in zip(found, wanted, nothing, strict=True):
        by_row = raw(mine).view(9, -1)
        assert torch.equal(by_row[named], raw(other).view(9, -1)[named])
        assert bool((by_row[rest] == 93).all())
        assert bool((raw(untouched) == 93).all())


def test_rows_are_named_where_scales_lie_by_row_alone() -> None:
    only = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="with row-major scales; SWIZZLED"):
        fast.quantize_mxfp8(random_rows(2), layout=ScaleLayout.SWIZZLED, only=only)


@devices
@cases
def test_no_rows_launch_nothing(device: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_quantize", None)
    rows = torch.empty(0, HIDDEN, device=device)
    for mine, other in zip(case.quantize(fast, rows, None), case.quantize(reference, rows, None), strict=True):
        assert (mine.dtype, mine.shape) == (other.dtype, other.shape)


@devices
@IMPLEMENTATIONS
def test_a_scale_of_all_rows_is_that_of_the_largest_finite_value(device: str, implementation: ModuleType) -> None:
    rows = random_rows(40, 1008, device=device)
    live = torch.tensor([30], dtype=torch.int32, device=device)
    rows[3, 7], rows[5, 9], rows[35] = float("nan"), float("inf"), 1e9
    amax = rows[:30].nan_to_num(0.0, 0.0, 0.0).abs().amax().cpu()
    assert floats(implementation.fp8_tensor_scale(rows, live=live)) == floats(minifloat.divide(amax.view(1), 448.0))
    assert floats(implementation.fp8_tensor_scale(rows, torch.float8_e4m3fnuz, live)) == floats(minifloat.divide(amax.view(1), 240.0))
    assert floats(implementation.nvfp4_tensor_scale(rows, live)) == floats(minifloat.divide(amax.view(1), 2688.0))
    for empty in (torch.zeros(5, 16, device=device), torch.empty(0, 16, device=device)):
        assert floats(implementation.fp8_tensor_scale(empty)) == [1.0]


@IMPLEMENTATIONS
def test_rows_that_are_no_whole_groups_and_counts_that_are_none_are_refused(implementation: ModuleType) -> None:
    with pytest.raises(ValueError, match="192 channels are no whole groups of 128"):
        implementation.quantize_fp8_groups(torch.zeros(2, 192))
    for count in (torch.tensor([1]), torch.tensor([1, 2], dtype=torch.int32), torch.empty(1, dtype=torch.int32, device="meta")):
        with pytest.raises(ValueError, match="must be one int32 on cpu"):
            implementation.quantize_mxfp8(torch.zeros(2, 64), live=count)


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "name", ["fp8 groups, by column", "fp8 groups, words", "int8 rows", "fp8 tensor", "mxfp8 up", "mxfp4 even, swizzled", "nvfp4"]
)
def test_both_trace_into_one_graph(device: str, implementation: ModuleType, name: str) -> None:
    case = CASES[name]
    torch.compiler.reset()
    rows = random_rows(3, device=device)
    live = torch.tensor([2], dtype=torch.int32, device=device)

    def quantize(rows: Tensor, live: Tensor) -> tuple[Tensor, ...]:
        return case.quantize(implementation, rows, live)

    for mine, other in zip(in_one_graph(quantize)(rows, live), case.quantize(reference, rows, live), strict=True):
        at_most = 2 if mine.dim() == 2 or len(mine) == 3 else len(mine)
        assert torch.equal(raw(mine[:at_most]), raw(other[:at_most]))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@cases
def test_a_captured_graph_follows_the_count(device: str, case: Case) -> None:
    rows = random_rows(700, 1024, torch.bfloat16, device)
    live = torch.tensor([700], dtype=torch.int32, device=device)
    case.quantize(fast, rows, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.quantize(fast, rows, live)
    for count in (700, 0, 3, 257):
        live.fill_(count)
        graph.replay()
        wanted = case.quantize(reference, rows, live)
        assert torch.equal(raw(found[0][:count]), raw(wanted[0][:count]))


def test_tiles_waste_little_and_hold_whole_groups() -> None:
    for hidden in (1024, 2048, 2880, 4096, 7168):
        for group in (16, 32, 128, hidden):
            for layout in ScaleLayout:
                for values in (8, 16, 32):
                    if hidden % group == 0:
                        found = tile(hidden, group, layout, values)
                        pieces = -(-hidden // (group * found.groups))
                        assert 8 * pieces * found.groups * group <= 9 * hidden
                        assert found.width >= group
                        assert found.rows * found.groups * found.width in (1024, 2048, max(1024, found.width))

"""The generated checks against jaxtyping and beartype on the same annotations.

What the checks accept, the oracle accepts. What the oracle accepts and the checks refuse, they refuse for a reason that those libraries have
no word for: divisibility, strides, contiguity, the device, the dims of a nested boundary, and a bool where an int is declared.
"""

import re
from collections.abc import Callable
from typing import Annotated

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jaxtyping import Float32
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    BoundaryError,
    DebugLevel,
    DeviceCount,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    GateUp,
    LogicalIds,
    MxFp8ExpertWeights,
    MxFp8Rows,
    Pending,
    Routing,
    Settled,
    debug,
)
from moe_typed.boundary import Layout, Rename, boundary, fields_of
from moe_typed.boundary.oracle import make_oracle

BEYOND_THE_ORACLE = re.compile(
    r"is not a multiple of|is not contiguous|stride of axis|is on \w+, but the fields before it|has \w+ = \S+ inside, but|is of type bool"
)
BEYOND_WHEN_NESTED = re.compile(r"^axis 0 is \d+, expected rows = \d+$")  # the rows of a nested boundary

deterministic = settings(
    max_examples=400, derandomize=True, deadline=None, database=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much)
)


@boundary
class ColumnScales:
    data: Float32[Tensor, "rows hidden"]
    scale: Annotated[Float32[Tensor, "rows hidden//4"], Layout(stride="1 rows")]


@boundary
class Nested:
    first: ColumnScales
    second: Annotated[ColumnScales, Rename({"hidden": "width"})]
    out: Float32[Tensor, "rows _"]


FP8, E8, F32, BF16, I32, I64 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32, torch.bfloat16, torch.int32, torch.int64


@st.composite
def tensors(draw: st.DrawFn, right: torch.dtype, *shape: int) -> Tensor:
    """Draw a tensor that is right, or wrong in dtype, rank, one size, strides or device."""
    fault = draw(st.sampled_from(["none"] * 5 + ["dtype", "rank", "size", "strides", "device"]))
    dtype = draw(st.sampled_from([FP8, E8, F32, BF16, I32, I64])) if fault == "dtype" else right
    sizes = [*shape]
    if fault == "rank":
        sizes = sizes[:-1] if draw(st.booleans()) else [*sizes, 1]
    if fault == "size" and sizes:
        axis = draw(st.integers(0, len(sizes) - 1))
        sizes[axis] = draw(st.sampled_from([0, 1, 2, 3, 4, 128, 200, 256]))
    device = "meta" if fault == "device" else "cpu"
    if fault == "strides":
        return torch.empty([2 * size for size in sizes], dtype=dtype)[tuple(slice(0, size) for size in sizes)]
    if draw(st.booleans()) and len(sizes) == 2:
        return torch.empty(sizes[1], sizes[0], dtype=dtype, device=device).T
    return torch.empty(sizes, dtype=dtype, device=device)


ROWS = st.sampled_from([0, 1, 2, 3])
HIDDEN = st.sampled_from([32, 100, 128, 200, 256])


@st.composite
def scaled_rows(draw: st.DrawFn, group: int, scale: torch.dtype) -> tuple[object, ...]:
    rows, hidden = draw(ROWS), draw(HIDDEN)
    return draw(tensors(FP8, rows, hidden)), draw(tensors(scale, rows, hidden // group))


@st.composite
def routings(draw: st.DrawFn) -> tuple[object, ...]:
    rows, k = draw(ROWS), draw(st.sampled_from([0, 1, 2]))
    live = draw(st.sampled_from([0, 1, rows, True, "2", DeviceCount(torch.zeros(1, dtype=I32))]))
    return (
        draw(tensors(I32, rows, k)),
        draw(tensors(F32, rows, k)),
        draw(st.sampled_from([LogicalIds, LogicalIds, LogicalIds, GateUp, 3])),
        draw(st.sampled_from([4, 4, 4, 4.0, None])),
        draw(st.sampled_from([Settled(), Pending(2.0), Settled(), None])),
        draw(st.sampled_from([True, False, True, 1])),
        live,
        draw(st.sampled_from([0, 1])),
    )


@st.composite
def block_weights(draw: st.DrawFn) -> tuple[object, ...]:
    experts, hidden, inter = draw(ROWS), draw(st.sampled_from([128, 200])), draw(st.sampled_from([128, 192]))
    bias = draw(st.one_of(st.none(), tensors(BF16, experts, 2 * inter)))
    return (
        draw(tensors(FP8, experts, 2 * inter, hidden)),
        draw(tensors(FP8, experts, hidden, inter)),
        draw(tensors(F32, experts, 2 * (inter // 128), hidden // 128)),
        draw(tensors(F32, experts, hidden // 128, inter // 128)),
        GateUp,
        bias,
        draw(st.one_of(st.none(), tensors(BF16, experts, hidden))),
    )


@st.composite
def mx_weights(draw: st.DrawFn) -> tuple[object, ...]:
    experts, hidden, inter = draw(ROWS), draw(st.sampled_from([64, 100])), draw(st.sampled_from([32, 48]))
    return (
        draw(tensors(FP8, experts, 2 * inter, hidden)),
        draw(tensors(FP8, experts, hidden, inter)),
        draw(tensors(E8, experts, 2 * inter, hidden // 32)),
        draw(tensors(E8, experts, hidden, inter // 32)),
        draw(st.sampled_from([GateUp, LogicalIds])),
    )


@st.composite
def dense_weights(draw: st.DrawFn) -> tuple[object, ...]:
    experts, hidden, inter = draw(ROWS), draw(st.sampled_from([3, 4])), draw(st.sampled_from([1, 2]))
    return draw(tensors(BF16, experts, 2 * inter, hidden)), draw(tensors(BF16, experts, hidden, inter)), GateUp


@st.composite
def column_scales(draw: st.DrawFn) -> tuple[object, ...]:
    rows, hidden = draw(ROWS), draw(st.sampled_from([4, 6, 8]))
    return draw(tensors(F32, rows, hidden)), draw(tensors(F32, rows, hidden // 4))


@st.composite
def nested(draw: st.DrawFn) -> tuple[object, ...]:
    rows = draw(ROWS)

    def inner() -> ColumnScales:
        own = draw(st.sampled_from([rows, rows, rows, 1, 2]))
        device = draw(st.sampled_from(["cpu", "cpu", "cpu", "meta"]))
        scale = torch.empty_strided((own, 2), (1, own), device=device)
        return ColumnScales(torch.empty(own, 8, device=device), scale)

    return inner(), inner(), draw(tensors(F32, rows, 5))


def verdict(judge: Callable[[], object]) -> str | None:
    try:
        judge()
    except BoundaryError as error:
        return error.reason
    return None


CASES = [
    pytest.param(Fp8Block128Rows, scaled_rows(128, F32), id="fp8 block 128 rows"),
    pytest.param(MxFp8Rows, scaled_rows(32, E8), id="mxfp8 rows"),
    pytest.param(Routing, routings(), id="routing"),
    pytest.param(Fp8Block128ExpertWeights, block_weights(), id="fp8 block 128 weights"),
    pytest.param(MxFp8ExpertWeights, mx_weights(), id="mxfp8 weights"),
    pytest.param(Bf16ExpertWeights, dense_weights(), id="bf16 weights"),
    pytest.param(ColumnScales, column_scales(), id="column-major scales"),
    pytest.param(Nested, nested(), id="nested"),
]


@pytest.mark.parametrize(("cls", "values"), CASES)
def test_check_and_oracle_agree_but_for_what_the_oracle_has_no_word_for(
    cls: Callable[..., object], values: st.SearchStrategy[tuple[object, ...]]
) -> None:
    assert isinstance(cls, type)
    oracle = make_oracle(cls, fields_of(cls))
    seen = {"both accept": 0, "both refuse": 0, "stricter": 0}

    @deterministic
    @given(values)
    def compare(values: tuple[object, ...]) -> None:
        assume(all(value is not None for value in values[:2]))

        def build() -> object:
            with debug(DebugLevel.LAYOUT):
                return cls(*values)

        check = verdict(build)
        judge = verdict(lambda: oracle(cls(*values)))
        if check is None:
            assert judge is None, f"the oracle refuses what the check accepts: {judge}"
            seen["both accept"] += 1
        elif judge is None:
            own = BEYOND_THE_ORACLE.search(check) or (cls is Nested and BEYOND_WHEN_NESTED.search(check))
            assert own, f"the check alone refuses, for {check!r}"
            seen["stricter"] += 1
        else:
            seen["both refuse"] += 1

    compare()
    assert min(seen.values()) > 5, seen  # no branch was empty

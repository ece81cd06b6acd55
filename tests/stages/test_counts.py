"""Counts of arrived rows: what each class takes, and where the rows of segments are."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_typed import BoundaryError, debug
from moe_typed.stages import PaddedPrefixSum, PaddedReceivedPerExpert, ReceivedPerExpert, SegmentEnds
from tests.ops.support import ints
from tests.stages.support import vector

VECTORS: list[tuple[Callable[[Tensor], object], str]] = [
    (ReceivedPerExpert, "counts"),
    (lambda ends: PaddedPrefixSum(ends, 1), "ends"),
    (lambda ends: SegmentEnds(ends, 1), "ends"),
]

aligned = pytest.mark.parametrize(
    ("build", "counts"), [(PaddedReceivedPerExpert, ()), (PaddedPrefixSum, vector(4)), (SegmentEnds, vector(4))], ids=["received", "prefix", "ends"]
)


def refused(build: Callable[..., object], *values: object, level: str = "layout") -> BoundaryError:
    with debug("values" if level == "values" else "layout"), pytest.raises(BoundaryError) as caught:
        build(*values)
    return caught.value


@pytest.mark.parametrize(("build", "field"), VECTORS, ids=["received", "padded prefix sum", "segment ends"])
@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        (torch.zeros(3, dtype=torch.int64), "dtype is int64, expected int32"),
        (torch.zeros(3), "dtype is float32, expected int32"),
        (torch.zeros(3, 1, dtype=torch.int32), "has 2 dims, expected 1 (local_experts)"),
        (torch.zeros((), dtype=torch.int32), "has 0 dims, expected 1 (local_experts)"),
        (torch.zeros(6, dtype=torch.int32)[::2], "is not contiguous: stride (2,) for shape [3]"),
        ([0, 0], "is of type list, expected Int32[Tensor, 'local_experts'] with Layout(contiguous)"),
    ],
)
def test_a_vector_of_int32_alone_is_taken(build: Callable[[object], object], field: str, counts: object, reason: str) -> None:
    error = refused(build, counts)
    assert (error.field, error.reason) == (field, reason)


@pytest.mark.parametrize(("build", "field"), VECTORS, ids=["received", "padded prefix sum", "segment ends"])
def test_no_expert_and_no_row_are_taken(build: Callable[[Tensor], object], field: str) -> None:
    with debug("strict"):
        build(torch.zeros(0, dtype=torch.int32))
        build(torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("counts", [[4, 4], (4.0,), ("4",), vector(4)])
def test_padded_counts_are_a_tuple_on_the_host(counts: object) -> None:
    assert refused(PaddedReceivedPerExpert, counts, 4).field == "counts"


@pytest.mark.parametrize("alignment", [True, 4.0, vector(4)])
@aligned
def test_an_alignment_is_an_integer(build: Callable[..., object], counts: object, alignment: object) -> None:
    assert refused(build, counts, alignment).field == "alignment"


@pytest.mark.parametrize("alignment", [0, -4])
@aligned
def test_an_alignment_is_positive(build: Callable[..., object], counts: object, alignment: int) -> None:
    error = refused(build, counts, alignment, level="values")
    assert (error.field, error.reason) == ("alignment", f"is {alignment}")


@pytest.mark.parametrize(("counts", "alignment", "bad"), [((4, 3), 4, 3), ((1,), 2, 1), ((-4, 4), 4, -4), ((130,), 128, 130)])
def test_padded_counts_are_multiples(counts: tuple[int, ...], alignment: int, bad: int) -> None:
    error = refused(PaddedReceivedPerExpert, counts, alignment, level="values")
    assert error.reason == f"holds {bad}, which is no multiple of the alignment {alignment}"


@pytest.mark.parametrize("counts", [(), (0,), (4, 0, 8)])
def test_padded_counts_that_are(counts: tuple[int, ...]) -> None:
    with debug("strict"):
        PaddedReceivedPerExpert(counts, 4)


@pytest.mark.parametrize("ends", [(4, 7), (8, 4), (-4, 4), (2, 7)])
def test_a_padded_prefix_sum_rises_by_multiples(ends: tuple[int, ...]) -> None:
    error = refused(PaddedPrefixSum, vector(*ends), 4, level="values")
    assert (error.field, error.reason) == ("ends", "is no prefix sum of multiples of 4")
    assert error.hint == "the ends of live rows are SegmentEnds"


@pytest.mark.parametrize("ends", [(), (0, 0), (4, 4, 12)])
def test_a_padded_prefix_sum_that_does(ends: tuple[int, ...]) -> None:
    with debug("strict"):
        PaddedPrefixSum(vector(*ends), 4)


@pytest.mark.parametrize(("ends", "alignment"), [((3, 2), 1), ((-1,), 1), ((1, 2), 4), ((5, 7), 4)])
def test_a_segment_ends_after_its_beginning(ends: tuple[int, ...], alignment: int) -> None:
    error = refused(SegmentEnds, vector(*ends), alignment, level="values")
    assert (error.field, error.reason) == ("ends", "holds a segment that ends before it begins")
    assert "PaddedPrefixSum" in error.hint


# ---- where segments are --------------------------------------------------------------------------------------------------------------


def lay(counts: list[int], alignment: int) -> tuple[list[int], list[int], list[int]]:
    """Return starts, ends, and the expert of each row up to the last end, one row after another."""
    starts: list[int] = []
    ends: list[int] = []
    owners: list[int] = []
    for expert, count in enumerate(counts):
        while len(owners) % alignment:
            owners.append(-1)
        starts.append(len(owners))
        owners += [expert] * count
        ends.append(len(owners))
    return starts, ends, owners


def check(counts: list[int], alignment: int, spare: int) -> None:
    starts, ends, owners = lay(counts, alignment)
    with debug("strict"):
        segments = SegmentEnds(vector(*ends), alignment)
    assert ints(segments.starts()) == starts
    owners += [-1] * spare
    made = segments.experts_of_rows(len(owners))
    assert made.dtype == torch.int32
    assert ints(made) == owners


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.sampled_from([1, 4, 8]), st.integers(0, 5))
def test_segments_against_a_loop(counts: list[int], alignment: int, spare: int) -> None:
    check(counts, alignment, spare)


@pytest.mark.parametrize("alignment", [1, 4, 128])
@pytest.mark.parametrize("spare", [0, 1, 128])
@pytest.mark.parametrize("counts", [[0], [0, 0, 0], [5], [0, 5, 0], [5, 0, 0], [0, 0, 5], [1, 1, 1], [4, 4, 4], [4, 0, 4], [3, 0, 0, 3]])
def test_empty_and_full_segments(counts: list[int], alignment: int, spare: int) -> None:
    check(counts, alignment, spare)


def test_no_rows_have_no_experts() -> None:
    assert SegmentEnds(vector(0, 0), 4).experts_of_rows(0).shape == (0,)

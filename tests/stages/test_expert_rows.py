"""What a runner takes where rows lie: as many rows as slabs have, counts and segments that fit, and a weight for each row of a segment."""

import pytest
import torch

from moe_typed import Bf16Rows, Payload
from moe_typed.formats import Fp8TokenRows
from moe_typed.runners.expert_rows import (
    deepep_ll_in_place,
    deepep_v2_expanded_in_place,
    deepep_v2_masked_in_place,
    mooncake_in_place,
    nixl_in_place,
)
from moe_typed.stages import (
    DeepEPLLDispatchOutput,
    DeepEPv2ExpandedDispatchOutput,
    DeepEPv2MaskedDispatchOutput,
    MooncakeDispatchOutput,
    NixlDispatchOutput,
    ReceivedPerExpert,
    SegmentEnds,
    SegmentRowsInput,
    SlabDispatchOutput,
    SlabRowsInput,
)
from tests.stages.support import CAPACITY, CASES, EXPANDED, HIDDEN, LOCAL, NAN, SLABS, AnyOutput, Case, Owner, changed, refused, vector


def slab_input(name: str, owner: Owner) -> SlabRowsInput:
    return of_slab(CASES[name](owner).dispatched)


def segment_input(name: str, owner: Owner) -> SegmentRowsInput:
    return of_segments(CASES[name](owner).dispatched)


def of_slab(dispatched: AnyOutput) -> SlabRowsInput:
    match dispatched:
        case DeepEPLLDispatchOutput():
            return deepep_ll_in_place(dispatched)[0]
        case MooncakeDispatchOutput():
            return mooncake_in_place(dispatched)[0]
        case NixlDispatchOutput():
            return nixl_in_place(dispatched)[0]
        case _:
            raise AssertionError(dispatched)


def of_segments(dispatched: AnyOutput) -> SegmentRowsInput:
    match dispatched:
        case DeepEPv2ExpandedDispatchOutput():
            return deepep_v2_expanded_in_place(dispatched)[0]
        case DeepEPv2MaskedDispatchOutput():
            return deepep_v2_masked_in_place(dispatched)[0]
        case _:
            raise AssertionError(dispatched)


slabs = pytest.mark.parametrize("name", SLABS)
segments = pytest.mark.parametrize("name", EXPANDED)


@slabs
def test_a_slab_is_handed_over_with_what_the_host_knows(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    made = of_slab(dispatched)
    assert isinstance(dispatched, SlabDispatchOutput)
    assert made.received is dispatched.received
    assert (made.capacity, made.expected_rows) == (dispatched.capacity, dispatched.expected_rows)
    k = dispatched.origin.topk_ids.shape[1]
    assert made.most_rows == min(k, LOCAL) * CAPACITY
    assert int(made.received.counts.sum()) <= made.most_rows


def test_no_more_rows_are_live_than_all_ranks_may_send_to_k_experts(owner: Owner) -> None:
    dispatched = CASES["deepep_ll"](owner).dispatched
    assert isinstance(dispatched, DeepEPLLDispatchOutput)
    for k in (1, 2, 5):
        one = changed(dispatched, origin=changed(dispatched.origin, topk_ids=torch.zeros(3, k, dtype=torch.int32), topk_weights=torch.ones(3, k)))
        assert isinstance(one, DeepEPLLDispatchOutput)
        assert one.most_rows == min(k, LOCAL) * CAPACITY


@segments
def test_segments_are_handed_over_with_their_weights(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    assert isinstance(dispatched, (DeepEPv2ExpandedDispatchOutput, DeepEPv2MaskedDispatchOutput))
    made = of_segments(dispatched)
    assert made.segments is dispatched.segments
    assert made.slot_weights is dispatched.slot_weights
    if isinstance(dispatched, DeepEPv2MaskedDispatchOutput):
        assert made.expected_rows == dispatched.expected_rows
    else:
        assert (made.expected_rows - 1) * LOCAL < made.payload.rows <= made.expected_rows * LOCAL


# ---- what is refused ------------------------------------------------------------------------------------------------------------


def other(rows: int) -> Payload:
    return Bf16Rows(torch.zeros(rows, HIDDEN, dtype=torch.bfloat16))


@slabs
@pytest.mark.parametrize("more", [1, -1])
def test_a_slab_has_capacity_rows_an_expert(name: str, more: int, owner: Owner) -> None:
    error = refused(slab_input(name, owner), "values", payload=other(LOCAL * CAPACITY + more))
    assert (error.boundary, error.field) == ("SlabRowsInput", "payload")


@slabs
@pytest.mark.parametrize("counts", [(-1, 2), (0, CAPACITY + 1), (2**31 - 1, 0)])
def test_counts_fit_the_slab(name: str, counts: tuple[int, int], owner: Owner) -> None:
    error = refused(slab_input(name, owner), "values", received=ReceivedPerExpert(vector(*counts)))
    assert (error.field, error.reason) == ("received", f"holds a count outside 0..{CAPACITY}")


def test_more_live_rows_than_there_can_be_are_refused(owner: Owner) -> None:
    """A launch that is sized by the bound would leave them out."""
    error = refused(slab_input("deepep_ll", owner), "values", most_rows=2)
    assert error.reason == "counts 3 rows, but no more than 2 can be live"


@segments
def test_segments_end_within_the_rows(name: str, owner: Owner) -> None:
    made = segment_input(name, owner)
    rows = made.payload.rows
    error = refused(made, "values", segments=SegmentEnds(vector(2, rows + 1), 4))
    assert (error.boundary, error.field) == ("SegmentRowsInput", "segments")


@segments
@pytest.mark.parametrize(
    ("weights", "reason"),
    [
        (torch.ones(8), "axis 0 is 8, expected rows = 9"),
        (torch.ones(9, dtype=torch.bfloat16), "dtype is bfloat16, expected float32"),
        (torch.ones(9, 1), "has 2 dims, expected 1 (rows)"),
    ],
)
def test_each_row_of_a_segment_has_one_weight(name: str, weights: torch.Tensor, reason: str, owner: Owner) -> None:
    error = refused(segment_input(name, owner), slot_weights=weights)
    assert error.field == "slot_weights"
    assert error.reason.startswith(reason)


# ---- which rows are looked at ---------------------------------------------------------------------------------------------------


def scaled(case: Case, *bad: int) -> Fp8TokenRows:
    """Return rows with a scale each: NaN in the rows that are not live, and in ``bad`` ones."""
    scale = torch.ones(len(case.routes))
    scale[[routes is None for routes in case.routes]] = NAN
    scale[[*bad]] = NAN
    return Fp8TokenRows(torch.zeros(len(case.routes), HIDDEN).to(torch.float8_e4m3fn), scale)


@pytest.mark.parametrize("name", [*SLABS, *EXPANDED])
def test_each_live_row_is_looked_at_and_no_other(name: str, owner: Owner) -> None:
    case = CASES[name](owner)
    made = slab_input(name, owner) if name in SLABS else segment_input(name, owner)
    changed(made, "values", payload=scaled(case))
    for row, routes in enumerate(case.routes):
        if routes is not None:
            error = refused(made, "values", payload=scaled(case, row))
            assert (error.boundary, error.field) == ("Fp8TokenRows", "scale")

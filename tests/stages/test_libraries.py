"""The fields that each library's classes have of their own: what is refused, and in which words."""

from typing import TypeAlias

import pytest
import torch

from moe_typed import LocalIds, LogicalIds, PaddedPhysicalIds, PhysicalIds
from moe_typed.formats import Fp8Block128SlabRows
from moe_typed.routing import contiguous_residence
from moe_typed.stages import (
    PaddedPrefixSum,
    PaddedReceivedPerExpert,
    ReceivedPerExpert,
    SegmentEnds,
)
from tests.formats.support import noise, slab
from tests.stages.support import (
    ARENAS,
    CAPACITY,
    CASES,
    EXPANDED,
    FIRST,
    HIDDEN,
    LOCAL,
    SLABS,
    Owner,
    changed,
    device,
    refused,
    residence,
    routes,
    vector,
)

Wrong: TypeAlias = tuple[str, object, str]


FLAT: list[tuple[tuple[str, ...], Wrong]] = [
    (("deepep_normal", "deepep_v2_plain"), ("routing", routes(PhysicalIds, 3, 2, LOCAL), "holds space = PhysicalIds, expected LocalIds")),
    (("deepep_normal", "deepep_v2_plain"), ("routing", routes(LogicalIds, 3, 2, LOCAL), "holds space = LogicalIds, expected LocalIds")),
    (("deepep_normal",), ("routing", routes(LocalIds, 2, 2, LOCAL), "has rows = 2 inside, but rows = 3 here")),
    (("deepep_v2_plain",), ("routing", routes(LocalIds, 3, 2, LOCAL), "has rows = 3 inside, but rows = 5 here")),
    (("deepep_normal",), ("received", ReceivedPerExpert(vector(4, 4)), "is of type ReceivedPerExpert, expected PaddedReceivedPerExpert | None")),
    (("deepep_v2_plain",), ("received", None, "is of type NoneType, expected PaddedPrefixSum")),
    (("deepep_v2_plain",), ("received", SegmentEnds(vector(4, 8), 4), "is of type SegmentEnds, expected PaddedPrefixSum")),
    (("deepep_v2_plain",), ("received", ReceivedPerExpert(vector(4, 8)), "is of type ReceivedPerExpert, expected PaddedPrefixSum")),
    (("deepep_v2_plain",), ("received", PaddedReceivedPerExpert((4, 4), 4), "is of type PaddedReceivedPerExpert, expected PaddedPrefixSum")),
    (("deepep_v2_plain",), ("received", PaddedPrefixSum(vector(4, 8, 8), 4), "has experts = 3 inside, but experts = 2 here")),
]
SEGMENTED: list[tuple[tuple[str, ...], Wrong]] = [
    (EXPANDED, ("slot_weights", torch.ones(9, dtype=torch.bfloat16), "dtype is bfloat16, expected float32")),
    (EXPANDED, ("slot_weights", torch.ones(9, 1), "has 2 dims, expected 1 (slots)")),
    (EXPANDED, ("slot_weights", torch.ones(8), "axis 0 is 8, expected slots = 9")),
    (EXPANDED, ("slot_weights", None, "is of type NoneType, expected Float32[Tensor, 'slots']")),
    (EXPANDED, ("segments", PaddedPrefixSum(vector(4, 8), 4), "is of type PaddedPrefixSum, expected SegmentEnds")),
    (EXPANDED, ("segments", ReceivedPerExpert(vector(2, 3)), "is of type ReceivedPerExpert, expected SegmentEnds")),
    (EXPANDED, ("segments", vector(2, 7), "is of type Tensor, expected SegmentEnds")),
    (EXPANDED, ("scaling", 2.5, "is of type float, expected RoutedScaling")),
    (("deepep_v2_masked",), ("max_rows", None, "is of type NoneType, expected int")),
    (("deepep_v2_masked",), ("max_rows", True, "is of type bool, expected int")),
    (("deepep_v2_masked",), ("expected_rows", 1.5, "is of type float, expected int")),
]
SLAB: list[tuple[tuple[str, ...], Wrong]] = [
    (SLABS, ("received", PaddedReceivedPerExpert((1, 2), 1), "is of type PaddedReceivedPerExpert, expected ReceivedPerExpert")),
    (SLABS, ("received", SegmentEnds(vector(1, 2), 1), "is of type SegmentEnds, expected ReceivedPerExpert")),
    (SLABS, ("received", PaddedPrefixSum(vector(1, 2), 1), "is of type PaddedPrefixSum, expected ReceivedPerExpert")),
    (SLABS, ("received", device(3), "is of type DeviceCount, expected ReceivedPerExpert")),
    (SLABS, ("received", vector(1, 2), "is of type Tensor, expected ReceivedPerExpert")),
    (SLABS, ("capacity", True, "is of type bool, expected int")),
    (SLABS, ("capacity", vector(3), "is of type Tensor, expected int")),
    (SLABS, ("expected_rows", 1.5, "is of type float, expected int")),
    (SLABS, ("origin", routes(LogicalIds, 3), "holds space = LogicalIds, expected PhysicalIds or PaddedPhysicalIds")),
    (SLABS, ("origin", routes(LocalIds, 3), "holds space = LocalIds, expected PhysicalIds or PaddedPhysicalIds")),
    (SLABS, ("origin", None, "is of type NoneType, expected Routing[")),
]
ARENA: list[tuple[tuple[str, ...], Wrong]] = [
    (ARENAS, ("routing", routes(PaddedPhysicalIds, 4), "holds space = PaddedPhysicalIds, expected PhysicalIds")),
    (ARENAS, ("routing", routes(LocalIds, 4), "holds space = LocalIds, expected PhysicalIds")),
    (ARENAS, ("routing", routes(PhysicalIds, 3), "has rows = 3 inside, but rows = 4 here")),
    (ARENAS, ("origin", routes(PhysicalIds, 3, k=3), "has k = 3 inside, but k = 2 here")),
    (ARENAS, ("origin", routes(PhysicalIds, 3, experts=8), "has experts = 8 inside, but experts = 6 here")),
    (ARENAS, ("origin", routes(LogicalIds, 3), "holds space = LogicalIds, expected PhysicalIds")),
    (ARENAS, ("residence", residence().mask, "is of type ExpertMask, expected Residence")),
    (ARENAS, ("residence", residence().map, "is of type ExpertMap, expected Residence")),
    (
        ARENAS,
        ("residence", contiguous_residence(PhysicalIds, 8, FIRST, LOCAL, torch.device("cpu")), "has experts = 8 inside, but experts = 6 here"),
    ),
    (ARENAS, ("out_dtype", "bfloat16", "is of type str, expected")),
    (ARENAS[:2], ("staging", torch.zeros(4, HIDDEN), "dtype is float32, expected bfloat16")),
    (ARENAS[:2], ("staging", torch.zeros(3, HIDDEN, dtype=torch.bfloat16), "axis 0 is 3, expected rows = 4")),
    (ARENAS[:2], ("staging", torch.zeros(4, 1, HIDDEN, dtype=torch.bfloat16), "has 3 dims, expected 2 (rows out_hidden)")),
]


@pytest.mark.parametrize(
    ("name", "wrong"), [pytest.param(name, wrong, id=f"{name}-{wrong[2]}") for names, wrong in (*FLAT, *SEGMENTED, *SLAB, *ARENA) for name in names]
)
def test_a_wrong_field_of_a_dispatch_output_is_named(name: str, wrong: Wrong, owner: Owner) -> None:
    field, value, reason = wrong
    error = refused(CASES[name](owner).dispatched, **{field: value})
    assert error.field == field
    assert error.reason.startswith(reason)


# ---- values --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [(4,), (4, 4, 4), ()])
def test_counts_of_deepep_are_those_of_the_local_experts(counts: tuple[int, ...], owner: Owner) -> None:
    error = refused(CASES["deepep_normal"](owner).dispatched, "values", received=PaddedReceivedPerExpert(counts, 4))
    assert (error.field, error.reason) == ("received", f"counts {len(counts)} experts; the routing is over {LOCAL}")


@pytest.mark.parametrize("name", EXPANDED)
def test_segments_end_within_the_rows(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    error = refused(dispatched, "values", segments=SegmentEnds(vector(2, 10), 4))
    assert (error.field, error.reason) == ("segments", "end at row 10, but there are 9 rows")


@pytest.mark.parametrize("name", SLABS)
@pytest.mark.parametrize("counts", [(CAPACITY + 1, 0), (0, -1), (2**30, -(2**30))])
def test_counts_of_a_slab_fit_it(name: str, counts: tuple[int, ...], owner: Owner) -> None:
    error = refused(CASES[name](owner).dispatched, "values", received=ReceivedPerExpert(vector(*counts)))
    assert (error.field, error.reason) == ("received", f"holds a count outside 0..{CAPACITY}")
    assert "receive hook" in error.hint


@pytest.mark.parametrize("name", SLABS)
def test_rows_of_a_slab_are_experts_times_capacity(name: str, owner: Owner) -> None:
    error = refused(CASES[name](owner).dispatched, "values", capacity=CAPACITY - 1)
    assert (error.field, error.reason) == ("payload", "has 6 rows; 2 experts of 2 rows have another number")


@pytest.mark.parametrize("name", SLABS)
def test_scales_of_a_slab_say_its_shape_without_values(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    made = changed(dispatched, payload=slab(Fp8Block128SlabRows, noise(6, 128, spread=2), LOCAL, CAPACITY))
    error = refused(made, payload=slab(Fp8Block128SlabRows, noise(6, 128, spread=2), CAPACITY, LOCAL))
    assert error.reason in ("has local_experts = 2 inside, but local_experts = 3 here", "is 3, expected capacity = 2")
    assert refused(made, capacity=4).reason == "is 4, expected capacity = 3"
    assert refused(made, received=ReceivedPerExpert(vector(1, 1, 1))).reason == "has local_experts = 3 inside, but local_experts = 2 here"


@pytest.mark.parametrize("name", SLABS)
def test_the_routing_of_a_slab_is_of_other_rows_and_may_be_padded(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    for rows in (0, 1, 7):
        changed(dispatched, origin=routes(PaddedPhysicalIds, rows, k=5, experts=9))

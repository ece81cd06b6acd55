"""The fields that each library's classes have of their own: what is refused, and in which words."""

from collections.abc import Callable
from typing import TypeAlias, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_typed import BoundaryError, LocalIds, LogicalIds, PaddedPhysicalIds, Payload, PhysicalIds, Routing, Settled, debug
from moe_typed.formats import Fp8Block128SlabRows, MxFp8SwizzledRows, NvFp4Rows, head
from moe_typed.routing import Ids, contiguous_residence, sink_mask, to_sink
from moe_typed.stages import (
    AiterSinkInput,
    AiterSlotInput,
    CombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    DeepEPNormalCombineInput,
    DeepEPv2ExpandedCombineInput,
    DeepEPv2PlainCombineInput,
    MoriCombineInput,
    MoriDispatchOutput,
    MoriEPNormalDispatchOutput,
    PaddedPrefixSum,
    PaddedReceivedPerExpert,
    ReceivedPerExpert,
    SegmentedDispatchOutput,
    SegmentEnds,
    SlabCombineInput,
    SlabDispatchOutput,
)
from tests.formats.support import noise, quantized, slab
from tests.ops.support import ints
from tests.stages.support import (
    CAPACITY,
    CASES,
    FIRST,
    HIDDEN,
    LOCAL,
    NAN,
    PENDING,
    SLOTS,
    Owner,
    changed,
    device,
    local,
    origin,
    random,
    refused,
    residence,
    standard,
    vector,
)

Wrong: TypeAlias = tuple[str, object, str]


def routes(space: type[Ids], rows: int, k: int = 2, experts: int = SLOTS) -> Routing[Ids]:
    return Routing(torch.zeros(rows, k, dtype=torch.int32), torch.ones(rows, k), space, experts, Settled(), True, rows)


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
EXPANDED = ("deepep_v2_expanded", "deepep_v2_masked")
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
SLABS = ("deepep_ll", "mooncake", "nixl")
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
ARENAS = ("mori_normal", "mori_normal_staged", "mori_ll")
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


# ---- combine inputs --------------------------------------------------------------------------------------------------------------------


def combine_inputs(owner: Owner) -> list[CombineInput]:
    """Return one of each library."""
    made: list[CombineInput] = []
    rows = random(3, HIDDEN).bfloat16()
    for name in CASES:
        dispatched = CASES[name](owner).dispatched
        held, build = vars(dispatched), cls_of(dispatched.combine_input)
        if isinstance(dispatched, SlabDispatchOutput):
            made.append(build(random(LOCAL, CAPACITY, HIDDEN).bfloat16(), held["origin"], held["handle"]))
        elif isinstance(dispatched, MoriDispatchOutput):
            made.append(build(rows, held["origin"], held["handle"]))
        elif dispatched.combine_input is DeepEPNormalCombineInput:
            made.append(build(random(held["routing"].topk_ids.shape[0], HIDDEN).bfloat16(), held["routing"], held["handle"]))
        elif "handle" in held:
            made.append(build(rows, PENDING, held["handle"]))
    return made


def cls_of(cls: type[CombineInput]) -> Callable[..., CombineInput]:
    return cls


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_libraries_combine_bfloat16_alone(dtype: torch.dtype, owner: Owner) -> None:
    for made in combine_inputs(owner):
        hidden_states: Tensor = vars(made)["hidden_states"]
        error = refused(made, hidden_states=hidden_states.float().to(dtype))
        assert error.reason == f"dtype is {str(dtype).removeprefix('torch.')}, expected bfloat16"


def test_a_slab_comes_home_in_three_dims_and_all_else_in_two(owner: Owner) -> None:
    for made in combine_inputs(owner):
        hidden_states: Tensor = vars(made)["hidden_states"]
        other = hidden_states.flatten(0, 1) if hidden_states.dim() == 3 else hidden_states.unsqueeze(0)
        error = refused(made, hidden_states=other)
        assert error.field == "hidden_states"
        assert error.reason.startswith(f"has {other.dim()} dims, expected {hidden_states.dim()} (")


def test_a_slab_comes_home_contiguous(owner: Owner) -> None:
    made = [value for value in combine_inputs(owner) if issubclass(type(value), SlabCombineInput)]
    assert len(made) == len(SLABS)
    for value in made:
        hidden_states: Tensor = vars(value)["hidden_states"]
        error = refused(value, hidden_states=hidden_states.transpose(0, 1).contiguous().transpose(0, 1))
        assert error.reason.startswith("is not contiguous")


def test_results_of_deepep_are_as_many_as_its_rows(owner: Owner) -> None:
    made = next(value for value in combine_inputs(owner) if isinstance(value, DeepEPNormalCombineInput))
    assert refused(made, hidden_states=made.hidden_states[:-1]).reason == "axis 0 is 2, expected rows = 3"
    assert made.scaling is made.routing.scaling


def test_arenas_and_slabs_come_home_by_the_ranks_own_routing(owner: Owner) -> None:
    """Its rows are not those of the results."""
    for made in combine_inputs(owner):
        if "origin" in vars(made):
            assert issubclass(type(made), MoriCombineInput | SlabCombineInput)
            changed(made, origin=origin(7))
            assert refused(made, origin=routes(LocalIds, 3)).reason.startswith("holds space = LocalIds, expected PhysicalIds")


def test_the_other_two_settle_a_scaling(owner: Owner) -> None:
    made = [value for value in combine_inputs(owner) if isinstance(value, DeepEPv2PlainCombineInput | DeepEPv2ExpandedCombineInput)]
    assert len(made) == 3
    for value in made:
        assert refused(value, scaling=1.0).reason == "is of type float, expected RoutedScaling"


# ---- AITER -----------------------------------------------------------------------------------------------------------------------------


def sink_input(owner: Owner) -> AiterSinkInput:
    case = standard(owner)
    return AiterSinkInput(case.dispatched.payload, to_sink(vars(case.dispatched)["routing"]), torch.bfloat16)


def slot_input(owner: Owner) -> AiterSlotInput:
    dispatched = arena("mori_ll", owner)
    return AiterSlotInput(dispatched.payload, dispatched.routing, dispatched.residence.mask, torch.bfloat16)


@pytest.mark.parametrize("space", [LocalIds, LogicalIds, PhysicalIds, PaddedPhysicalIds])
def test_aiter_takes_no_local_ids_without_a_sink(space: type[Ids], owner: Owner) -> None:
    error = refused(sink_input(owner), routing=routes(space, 5, experts=LOCAL))
    assert (error.field, error.reason) == ("routing", f"holds space = {space.__name__}, expected LocalSinkIds")
    if space is not PhysicalIds:
        assert refused(slot_input(owner), routing=routes(space, 4)).reason == f"holds space = {space.__name__}, expected PhysicalIds"


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("mask", residence().map, "is of type ExpertMap, expected ExpertMask[PhysicalIds]"),
        ("mask", sink_mask(SLOTS - 1, torch.device("cpu")), "is of type SinkMask, expected ExpertMask[PhysicalIds]"),
        (
            "mask",
            contiguous_residence(LogicalIds, SLOTS, FIRST, LOCAL, torch.device("cpu")).mask,
            "holds space = LogicalIds, expected PhysicalIds",
        ),
        (
            "mask",
            contiguous_residence(PhysicalIds, 8, FIRST, LOCAL, torch.device("cpu")).mask,
            "has experts = 8 inside, but experts = 6 here",
        ),
        ("routing", routes(PhysicalIds, 3), "has rows = 3 inside, but rows = 4 here"),
        ("output", torch.zeros(3, HIDDEN), "axis 0 is 3, expected rows = 4"),
        ("output", torch.zeros(4, HIDDEN, dtype=torch.float64), "dtype is float64, expected bfloat16 or float16 or float32"),
        ("out_dtype", None, "is of type NoneType, expected"),
    ],
)
def test_aiter_reads_slots_by_a_mask_over_them(field: str, value: object, reason: str, owner: Owner) -> None:
    error = refused(slot_input(owner), **{field: value})
    assert error.field == field
    assert error.reason.startswith(reason)


# ---- slabs, row by row -----------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.integers(0, 3))
def test_the_experts_of_a_slab_against_a_loop(counts: list[int], spare: int) -> None:
    owner, capacity = Owner(), max(counts) + spare
    rows = quantized(NvFp4Rows, noise(len(counts) * capacity, 32))
    received = ReceivedPerExpert(vector(*counts))
    dispatched = DeepEPLLDispatchOutput(rows, received, capacity, 1, origin(), owner.handle(DeepEPLLHandle))
    expected = [expert if place < count else -1 for expert, count in enumerate(counts) for place in range(capacity)]
    assert ints(dispatched.local_experts()) == expected
    changed(dispatched)
    routing = dispatched.unit_routing()
    assert (routing.space, routing.num_experts, routing.all_live) == (LocalIds, len(counts), True)
    assert ints(routing.topk_ids.view(-1)) == expected
    assert torch.equal(routing.topk_weights, torch.ones(len(expected), 1))
    assert isinstance(routing.scaling, Settled)  # the library's combine is given the weights, and MoE's factor with them
    owner.close()


@pytest.mark.parametrize("name", EXPANDED)
def test_segments_know_no_live_rows(name: str, owner: Owner) -> None:
    dispatched = CASES[name](owner).dispatched
    assert isinstance(dispatched, SegmentedDispatchOutput)
    assert dispatched.live_rows is None


# ---- arenas, cut -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARENAS)
@pytest.mark.parametrize("rows", [3, 4])
def test_an_arena_may_be_cut_to_what_bounds_its_live_rows(name: str, rows: int, owner: Owner) -> None:
    dispatched = arena(name, owner)
    cut = dispatched.capped(rows)
    changed(cut)  # it is whole
    assert type(cut) is type(dispatched)
    same_memory(cut.payload.data, dispatched.payload.data, rows)
    same_memory(cut.routing.topk_ids, dispatched.routing.topk_ids, rows)
    same_memory(cut.routing.topk_weights, dispatched.routing.topk_weights, rows)
    assert cut.routing.live is dispatched.routing.live
    assert (cut.residence, cut.origin, cut.handle) == (dispatched.residence, dispatched.origin, dispatched.handle)
    if isinstance(dispatched, MoriEPNormalDispatchOutput):
        assert isinstance(cut, MoriEPNormalDispatchOutput)
        assert (cut.staging is None) == (dispatched.staging is None)
        if cut.staging is not None and dispatched.staging is not None:
            same_memory(cut.staging, dispatched.staging, rows)


def arena(name: str, owner: Owner) -> MoriDispatchOutput[Payload, CombineInput]:
    return cast("MoriDispatchOutput[Payload, CombineInput]", CASES[name](owner).dispatched)


def same_memory(part: Tensor, whole: Tensor, rows: int) -> None:
    assert part.shape[0] == rows
    assert part.data_ptr() == whole.data_ptr()


def test_a_cut_below_the_live_rows_is_an_error_of_values(owner: Owner) -> None:
    dispatched = arena("mori_ll", owner)
    with debug("values"), pytest.raises(BoundaryError, match="is 3, but there are 2 rows"):
        dispatched.capped(2)


@pytest.mark.parametrize("name", ARENAS)
def test_an_arena_is_cut_with_its_scales(name: str, owner: Owner) -> None:
    dispatched = arena(name, owner)
    rows = quantized(NvFp4Rows, noise(4, 32))
    cut = dispatched.with_payload(rows).capped(3)
    assert torch.equal(cut.payload.dequantize(), head(rows, 3).dequantize())
    with pytest.raises(ValueError, match="MxFp8SwizzledRows cannot be cut to 3 rows"):
        dispatched.with_payload(quantized(MxFp8SwizzledRows, noise(4, 128))).capped(3)


def test_padding_of_local_rows_goes_to_the_sink(owner: Owner) -> None:
    """AITER knows no live count: ids and weights of padding rows, whatever they are, must not count."""
    made = sink_input(owner)
    assert ints(made.routing.topk_ids.view(-1)) == [0, LOCAL, 1, 0, LOCAL, LOCAL, LOCAL, LOCAL, LOCAL, LOCAL]
    routing = local(torch.zeros(2, 1, dtype=torch.int32), torch.tensor([[1.0], [NAN]]), device(1))
    assert ints(to_sink(routing).topk_ids.view(-1)) == [0, LOCAL]

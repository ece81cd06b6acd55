"""What arrives is what was sent, bit for bit, in the classes that say how it lies."""

from collections.abc import Iterator
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from moe_typed import (
    Bf16Rows,
    CombineInput,
    DeviceCount,
    DispatchOutput,
    Experts,
    Fp8Block128ExpertWeights,
    Payload,
    Pending,
    SiluAndMul,
    bf16_as_is,
    from_topk,
    prepare_reference,
    quantize_mxfp8,
)
from moe_typed.dispatchers import (
    LL_BF16,
    LL_FP8,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    MooncakeDispatcher,
    MoriNormalDispatcher,
    MoriV2Dispatcher,
    PairedArena,
    RingArena,
)
from moe_typed.formats import ScaledRows, SlabScaledRows, relayouts
from moe_typed.routing import Routing, SlotIds, fill_nowhere, in_order, localize_by_map
from moe_typed.runners import reference_experts
from moe_typed.stages import (
    DeepEPNormalDispatchOutput,
    DeepEPv2MaskedDispatchOutput,
    DeepEPv2PlainDispatchOutput,
    MoriDispatchOutput,
    SegmentedDispatchOutput,
    SlabDispatchOutput,
)
from tests.dispatchers.libraries import low_latency_buffer, mori_op, mori_v2_op, residence_of, spread_of
from tests.dispatchers.setups import SETUPS, AnyDispatcher, arrived, expected, slots
from tests.dispatchers.support import (
    ALIGNMENT,
    CAPACITY,
    FACTOR,
    LOCAL,
    NARROW,
    TOPK,
    WIDE,
    WIRES,
    batch,
    experts_for,
    held_by,
    near,
    prepared,
    weights,
)
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_common import Config
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mori_config import EpDispatchCombineKernelType
from tests.emulation.world import World
from tests.ops.support import ints

RANKS = 2
Dispatched: TypeAlias = DispatchOutput[Payload, CombineInput]
Sent: TypeAlias = list[tuple[Bf16Rows, Routing[SlotIds]]]

WIRED = [(name, wire) for name, setup in SETUPS.items() for wire in setup.wires]


def sent(name: str) -> Sent:
    batches = [batch("mixed", rank, RANKS * LOCAL, SETUPS[name].hidden) for rank in range(RANKS)]
    return [(rows, slots(SETUPS[name], routing)) for rows, routing in batches]


def dispatched(name: str, wire: str, batches: Sent) -> list[Dispatched]:
    """Return what each rank receives; the dispatches end without a combine."""
    world = World(RANKS)

    def body(rank: int) -> Dispatched:
        dispatcher: AnyDispatcher = SETUPS[name].dispatcher(world.group(rank), wire)
        output = dispatcher.dispatch(*batches[rank])
        assert type(output) is dispatcher.variant
        assert type(output.payload) is dispatcher.payload
        output.fail(RuntimeError("the test looks at the dispatch alone"))
        return output

    return world.run(body)


def keys(values: Tensor) -> list[bytes]:
    return sorted(bytes(row.numpy().tobytes()) for row in values.contiguous())


def by_rank(batches: Sent, rank: int) -> Iterator[tuple[int, int]]:
    """Yield source rank and row of each row that goes to a rank."""
    for source, (_, routing) in enumerate(batches):
        owners = torch.where(routing.topk_ids >= 0, routing.topk_ids // LOCAL, -1)
        yield from ((source, row) for row in ints((owners == rank).any(1).nonzero()[:, 0]))


def by_expert(batches: Sent, expert: int) -> Iterator[tuple[int, int]]:
    """Yield source rank and row of each row that goes to an expert."""
    for source, (_, routing) in enumerate(batches):
        yield from ((source, row) for row in ints((routing.topk_ids == expert).any(1).nonzero()[:, 0]))


def values_of(name: str, wire: str, batches: Sent, rows: list[tuple[int, int]]) -> Tensor:
    values = [arrived(SETUPS[name], rows, wire) for rows, _ in batches]
    return torch.stack([values[source][row] for source, row in rows]) if rows else torch.empty(0, SETUPS[name].hidden)


@pytest.mark.parametrize(("name", "wire"), WIRED)
def test_rows_arrive_where_they_belong_and_mean_what_they_meant(name: str, wire: str) -> None:
    batches = sent(name)
    for rank, output in enumerate(dispatched(name, wire, batches)):
        found = output.payload.dequantize()
        match output:
            case SlabDispatchOutput():
                experts = output.local_experts()
                for local in range(LOCAL):
                    wanted = values_of(name, wire, batches, [*by_expert(batches, rank * LOCAL + local)])
                    assert keys(found[experts == local]) == keys(wanted)
                assert output.capacity == RANKS * CAPACITY
                assert output.expected_rows == batches[rank][0].rows * RANKS * TOPK // (RANKS * LOCAL) + 1
                assert output.origin is batches[rank][1]
            case SegmentedDispatchOutput():
                experts = output.segments.experts_of_rows(output.payload.rows)
                for local in range(LOCAL):
                    wanted = values_of(name, wire, batches, [*by_expert(batches, rank * LOCAL + local)])
                    lonely = found[experts == local]
                    assert keys(lonely[output.slot_weights[experts == local] != 0]) == keys(wanted)
                assert output.segments.alignment == ALIGNMENT
                assert isinstance(output.scaling, Pending)
                assert output.scaling.factor == FACTOR
                if isinstance(output, DeepEPv2MaskedDispatchOutput):
                    assert output.max_rows == RANKS * CAPACITY
            case DeepEPNormalDispatchOutput() | DeepEPv2PlainDispatchOutput() | MoriDispatchOutput():
                routing = output.routing
                local_ids = localize_by_map(output.routing, output.residence.map) if isinstance(output, MoriDispatchOutput) else routing
                live = routing.count_live()
                goes = (local_ids.topk_ids[:live] >= 0).any(1) & (local_ids.topk_weights[:live] != 0).any(1)
                wanted = values_of(name, wire, batches, [*by_rank(batches, rank)])
                if isinstance(output, MoriDispatchOutput):  # routes to nowhere go to slot 0
                    assert set(keys(found[:live][goes])) <= set(keys(wanted))
                else:
                    assert keys(found[:live][goes]) == keys(wanted)
                assert isinstance(routing.scaling, Pending)
                assert routing.scaling.factor == FACTOR
            case _:
                pytest.fail(f"{type(output)} is not looked at")


@pytest.mark.parametrize(("name", "wire"), WIRED)
def test_scales_lie_as_their_class_says(name: str, wire: str) -> None:
    for output in dispatched(name, wire, sent(name)):
        payload = output.payload
        assert payload.data.is_contiguous()
        if isinstance(payload, SlabScaledRows):
            groups, rows = payload.scale.shape[2], payload.scale.shape[1]
            assert payload.scale.stride() == (groups * rows, 1, rows)
        elif isinstance(payload, ScaledRows) and wire not in ("column", "ue8m0"):
            assert payload.scale.is_contiguous()
            assert payload.scale.shape[1] == output.payload.hidden // WIRES[wire].target.format.scale.group[1]  # type: ignore[union-attr]


def test_the_host_is_told_of_padded_counts() -> None:
    batches = sent("deepep normal")
    for rank, output in enumerate(dispatched("deepep normal", "bf16", batches)):
        assert isinstance(output, DeepEPNormalDispatchOutput)
        assert output.received is not None
        live = [len([*by_expert(batches, rank * LOCAL + local)]) for local in range(LOCAL)]
        assert output.received.counts == tuple(-(-count // ALIGNMENT) * ALIGNMENT for count in live)
    for output in dispatched("deepep normal, no sync", "bf16", batches):
        assert isinstance(output, DeepEPNormalDispatchOutput)
        assert output.received is None
        assert output.payload.rows == RANKS * CAPACITY
        assert bool(torch.isfinite(output.routing.topk_weights).all())


@pytest.mark.parametrize("name", ["mori normal", "mori v2", "mori ll", "mori ll, async", "deepep v2 plain, no sync"])
def test_the_device_alone_knows_how_many_rows_are_live(name: str) -> None:
    batches = sent(name)
    for rank, output in enumerate(dispatched(name, "bf16", batches)):
        assert isinstance(output, MoriDispatchOutput | DeepEPv2PlainDispatchOutput)
        assert isinstance(output.routing.live, DeviceCount)
        idle = 0 if name.startswith("mori") else sum(not rows.rows for rows, _ in batches) * (rank == 0)
        assert output.routing.count_live() == len([*by_rank(batches, rank)]) + idle
        assert output.payload.rows == RANKS * CAPACITY


def test_mori_s_result_is_its_own_unless_asked() -> None:
    for own in (True, False):
        group = World(1).group(0)
        op, residence = mori_op(group, "bf16", EpDispatchCombineKernelType.IntraNode), residence_of(group)
        dispatcher = MoriNormalDispatcher(op, bf16_as_is, residence, own_result=own, arena=PairedArena())
        experts = experts_for(Bf16Rows, prepared(weights("bf16", LOCAL, NARROW)))
        rows, routing = batch("full", 0, LOCAL, NARROW)
        settled = fill_nowhere(in_order(from_topk(routing.topk_ids, routing.topk_weights, LOCAL)))
        first = dispatcher.combine(experts(dispatcher.dispatch(rows, settled)))
        kept = first.clone()
        dispatcher.combine(experts(dispatcher.dispatch(Bf16Rows(rows.data * 2), settled)))
        assert torch.equal(first, kept) is own
        assert ("own_result=False" in repr(dispatcher)) is not own


def test_mori_v2_offers_its_staging_where_it_gathers() -> None:
    group = World(1).group(0)
    rows, routing = batch("full", 0, LOCAL, NARROW)
    gathering = MoriV2Dispatcher(mori_v2_op(group, "bf16"), bf16_as_is, residence_of(group), arena=PairedArena())
    output = gathering.dispatch(rows, fill_nowhere(in_order(routing)))
    assert output.staging is not None
    assert output.staging.shape == (CAPACITY, NARROW)
    output.handle.discard("looked at")
    scattering = MoriV2Dispatcher(mori_v2_op(group, "bf16", "scatter"), bf16_as_is, residence_of(group), arena=PairedArena())
    other = scattering.dispatch(rows, fill_nowhere(in_order(routing)))
    assert other.staging is None
    other.handle.discard("looked at")


def test_a_dispatch_cannot_be_traced() -> None:
    group = World(1).group(0)
    dispatcher = DeepEPNormalDispatcher(EmulatedBuffer(group), quantize_mxfp8, spread_of(group), topk_idx_t=torch.int64, dispatch_config=Config())
    rows, routing = batch("full", 0, LOCAL, NARROW)
    routes = in_order(routing)

    def dispatch(data: Tensor) -> Tensor:
        output = dispatcher.dispatch(Bf16Rows(data), routes)
        output.handle.discard("looked at")
        return output.payload.data

    torch.compiler.reset()
    compiled = torch.compile(dispatch, fullgraph=True, backend="eager")  # pyright: ignore[reportUnknownMemberType]
    with pytest.raises(Exception, match=r"which torch\.compile cannot trace"):
        compiled(rows.data)
    eager = torch.compile(dispatch, backend="eager")  # pyright: ignore[reportUnknownMemberType]
    found = eager(rows.data)  # the graph breaks, and the call runs as it is
    assert torch.equal(found.view(torch.uint8), dispatch(rows.data).view(torch.uint8))


def test_slabs_with_column_major_scales_reach_weights_in_blocks() -> None:
    """Of the two ways to experts that take row-major scales, this one keeps the values."""
    setup, world = SETUPS["deepep ll"], World(RANKS)

    def body(rank: int) -> Tensor:
        group = world.group(rank)
        dispatcher = DeepEPLowLatencyDispatcher(
            low_latency_buffer(group), LL_FP8, spread_of(group), max_tokens=CAPACITY, topk_idx_t=torch.int64, arena=RingArena()
        )
        w = held_by(weights("fp8 block", RANKS * LOCAL, WIDE), rank)
        assert isinstance(w, Fp8Block128ExpertWeights)
        layer = dispatcher.then(Experts(prepare_reference(w)).accepting(relayouts.slab_to_row))
        rows, routing = batch("mixed", rank, RANKS * LOCAL, WIDE)
        return layer(rows, in_order(routing))

    for rank, found in enumerate(world.run(body)):
        near(found, expected(setup, "mixed", rank, RANKS, "fp8 block", "fp8"))


def test_mooncake_leaves_out_the_experts_of_a_rank_that_does_not_answer() -> None:
    """The mask says so afterwards, and nothing is renormalised."""
    world = World(2, dead=frozenset({1}))
    group, active = world.group(0), torch.ones(2, dtype=torch.int32)
    dispatcher = MooncakeDispatcher(
        EmulatedMooncakeBuffer(group), LL_BF16, spread_of(group), max_tokens=CAPACITY, active_ranks=active, timeout_us=100, arena=RingArena()
    )
    w = weights("bf16", 2 * LOCAL, WIDE)
    rows, routing = batch("full", 0, 2 * LOCAL, WIDE)
    layer = dispatcher.then(Experts(prepared(held_by(w, 0))))
    (found,) = world.run(lambda rank: layer(rows, in_order(routing)))
    assert ints(active) == [1, 0]
    alive = torch.where(routing.topk_ids < LOCAL, routing.topk_ids, -1)
    near(found, FACTOR * reference_experts(rows.dequantize(), alive, routing.topk_weights, w, SiluAndMul()))

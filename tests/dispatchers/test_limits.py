"""What is refused before anything is sent, and how much of an arena is looked at."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, BoundaryError, Experts, LocalIds, Routing, UnsupportedError, bf16_as_is, from_topk, quantize_mxfp8
from moe_typed.dispatchers import (
    LL_BF16,
    BySenders,
    CapacityError,
    DeepEPNormalDispatcher,
    DeepEPv2PlainDispatcher,
    ExpertSpread,
    MooncakeDispatcher,
    MoriLowLatencyDispatcher,
    MoriNormalDispatcher,
    MoriV2Dispatcher,
    NixlDispatcher,
    PairedArena,
    ReceiveCap,
    ReceiveCapError,
    RingArena,
    VerifiedCap,
)
from moe_typed.formats import quantizers
from moe_typed.routing import PaddedPhysicalIds, fill_nowhere, in_order
from tests.dispatchers.libraries import elastic_buffer, mori_op, mori_v2_op, nixl_buffer, residence_of, spread_of
from tests.dispatchers.setups import SETUPS, expected, low_latency_wire, slots
from tests.dispatchers.support import CAPACITY, LOCAL, NARROW, TOPK, batch, held_by, near, prepared, weights
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mori import EmulatedDispatchCombineOp
from tests.emulation.mori_config import EpDispatchCombineKernelType as Kernel
from tests.emulation.world import Group, World

limited = pytest.mark.parametrize("name", [name for name in SETUPS if name != "deepep normal"])  # which has no limit of its own
setups = pytest.mark.parametrize("name", SETUPS)


def one_rank() -> Group:
    return World(1).group(0)


@limited
def test_too_many_rows_are_refused_before_they_are_sent(name: str) -> None:
    """One rank alone notices, and the others do not hang: nothing was sent, and the next dispatch works."""
    setup, group = SETUPS[name], one_rank()
    dispatcher = setup.dispatcher(group, "bf16")
    ids = torch.arange(TOPK, dtype=torch.int32).repeat(CAPACITY + 1, 1)
    routing = from_topk(ids, torch.ones(CAPACITY + 1, TOPK), LOCAL)
    with pytest.raises(CapacityError, match=f"{CAPACITY + 1} rows are more than the {CAPACITY}"):
        dispatcher.dispatch(Bf16Rows(torch.zeros((CAPACITY + 1, setup.hidden), dtype=torch.bfloat16)), slots(setup, routing))
    layer = dispatcher.then(Experts(prepared(weights("bf16", LOCAL, setup.hidden))))
    rows, routing_of_rows = batch("full", 0, LOCAL, setup.hidden)
    near(layer(rows, slots(setup, routing_of_rows)), expected(setup, "full", 0, 1, "bf16", "bf16"))


@setups
def test_a_routing_over_other_slots_is_refused(name: str) -> None:
    setup = SETUPS[name]
    dispatcher = setup.dispatcher(one_rank(), "bf16")
    rows, routing = batch("full", 0, LOCAL + 1, setup.hidden)
    with pytest.raises(ValueError, match=f"over {LOCAL + 1} slots, but the dispatcher over {LOCAL}"):
        dispatcher.dispatch(rows, slots(setup, routing))


@setups
def test_a_routing_of_other_rows_is_refused(name: str) -> None:
    setup = SETUPS[name]
    dispatcher = setup.dispatcher(one_rank(), "bf16")
    rows, routing = batch("full", 0, LOCAL, setup.hidden)
    with pytest.raises(ValueError, match=f"the routing is of {CAPACITY} rows, but there are {CAPACITY - 1}"):
        dispatcher.dispatch(Bf16Rows(rows.data[1:]), slots(setup, routing))


@setups
def test_ids_of_another_space_are_refused(name: str) -> None:
    setup = SETUPS[name]
    dispatcher = setup.dispatcher(one_rank(), "bf16")
    rows, routing = batch("full", 0, LOCAL, setup.hidden)
    local = routing.moved(routing.topk_ids, routing.topk_weights, LocalIds, LOCAL)
    with pytest.raises(BoundaryError, match="is LocalIds, expected"):
        dispatcher.dispatch(rows, local)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "ranks", "experts"), [(-1, 2, 4), (2, 2, 4), (0, 2, 3), (0, 2, 0), (0, 0, 4)])
def test_a_spread_that_there_is_not(rank: int, ranks: int, experts: int) -> None:
    with pytest.raises(ValueError, match=r"is not one of|cannot be spread"):
        ExpertSpread(rank, ranks, experts)


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_expected_rows_are_the_mean_rounded_down_and_one(rows: int) -> None:
    spread = ExpertSpread(1, 2, 6)
    assert (spread.local, spread.first) == (3, 3)
    assert spread.expected_rows(rows, 2) == rows * 2 * 2 // 6 + 1


# ---- what a library does not have ---------------------------------------------------------------------------------------------------


def test_wires_that_a_library_does_not_have() -> None:
    group = one_rank()
    spread = spread_of(group)
    with pytest.raises(UnsupportedError, match="NIXL has no wire LL_FP8_ROWS; it has LL_BF16, LL_FP8, LL_FP8_UE8M0"):
        NixlDispatcher(nixl_buffer(group), low_latency_wire("rows"), spread, max_tokens=CAPACITY, topk_idx_t=torch.int32, arena=RingArena())
    mooncake = EmulatedMooncakeBuffer(group)
    with pytest.raises(UnsupportedError, match="Mooncake has no wire LL_FP8_UE8M0"):
        MooncakeDispatcher(mooncake, low_latency_wire("ue8m0"), spread, max_tokens=CAPACITY, active_ranks=None, timeout_us=-1, arena=RingArena())
    with pytest.raises(UnsupportedError, match="DeepEP normal cannot carry Fp8Block128PackedRows"):
        DeepEPNormalDispatcher(EmulatedBuffer(group), quantizers.fp8_block128_packed, spread, topk_idx_t=torch.int64)
    with pytest.raises(UnsupportedError, match="DeepEP V2 cannot carry MxFp8SwizzledRows"):
        DeepEPv2PlainDispatcher(elastic_buffer(group), quantizers.mxfp8_swizzled, spread, max_tokens=4, topk_idx_t=torch.int64)
    with pytest.raises(UnsupportedError, match="MoRI cannot carry Fp8TokenRows"):
        MoriNormalDispatcher(mori_op(group, "bf16", Kernel.IntraNode), quantizers.fp8_token, residence_of(group), arena=PairedArena())


def test_sizes_that_kernels_refuse() -> None:
    group = one_rank()
    spread = spread_of(group)
    with pytest.raises(ValueError, match="1 ranks of 3 rows make no multiple of 4 rows"):
        NixlDispatcher(nixl_buffer(group), LL_BF16, spread, max_tokens=3, topk_idx_t=torch.int32, arena=RingArena())
    with pytest.raises(ValueError, match="must be positive"):
        DeepEPNormalDispatcher(EmulatedBuffer(group), bf16_as_is, spread, topk_idx_t=torch.int64, max_tokens=0)
    with pytest.raises(ValueError, match="must be positive"):
        DeepEPv2PlainDispatcher(elastic_buffer(group), bf16_as_is, spread, max_tokens=4, topk_idx_t=torch.int64, expert_alignment=0)


@pytest.mark.parametrize("active", [torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int64)])
def test_a_health_mask_that_mooncake_would_replace(active: Tensor) -> None:
    group = one_rank()
    with pytest.raises(ValueError, match="active_ranks must be int32"):
        MooncakeDispatcher(
            EmulatedMooncakeBuffer(group), LL_BF16, spread_of(group), max_tokens=4, active_ranks=active, timeout_us=-1, arena=RingArena()
        )


def test_scales_of_no_whole_number_of_words() -> None:
    group = one_rank()
    dispatcher = DeepEPv2PlainDispatcher(elastic_buffer(group), quantize_mxfp8, spread_of(group), max_tokens=4, topk_idx_t=torch.int64)
    rows, routing = batch("full", 0, LOCAL, 32)
    with pytest.raises(ValueError, match="fill no whole number of 4-byte words"):
        dispatcher.dispatch(rows, in_order(routing))


# ---- MoRI's config ------------------------------------------------------------------------------------------------------------------


def altered(group: Group, kernel: Kernel = Kernel.IntraNode, **changes: object) -> EmulatedDispatchCombineOp:
    op = mori_op(group, "bf16", kernel)
    for name, value in changes.items():
        setattr(op.config, name, value)
    return op


def test_configs_of_mori_that_lose_or_misread_rows() -> None:
    group = one_rank()
    residence = residence_of(group)
    with pytest.raises(ValueError, match=f"needs scale_dim={NARROW // 32} and scale_type_size=1; the op was made with 0 and 0"):
        MoriNormalDispatcher(altered(group), quantize_mxfp8, residence, arena=PairedArena())
    with pytest.raises(ValueError, match="Bf16Rows of 256 values needs scale_dim=0"):
        MoriNormalDispatcher(mori_op(group, "fp8", Kernel.IntraNode), bf16_as_is, residence, arena=PairedArena())
    with pytest.raises(ValueError, match="max_token_type_size must be 2 or more"):
        MoriNormalDispatcher(altered(group, max_token_type_size=1), bf16_as_is, residence, arena=PairedArena())
    with pytest.raises(ValueError, match="use_external_inp_buf=False"):
        MoriNormalDispatcher(altered(group, use_external_inp_buf=False), bf16_as_is, residence, arena=PairedArena())
    with pytest.raises(ValueError, match="IntraNodeLL looks at 8 routes"):
        MoriLowLatencyDispatcher(altered(group, Kernel.IntraNodeLL, num_experts_per_token=9), bf16_as_is, residence, arena=PairedArena())
    with pytest.raises(UnsupportedError, match="the op's kernel is AsyncLL, and this dispatcher is for IntraNode, InterNode, InterNodeV1"):
        MoriNormalDispatcher(altered(group, Kernel.AsyncLL), bf16_as_is, residence, arena=PairedArena())
    with pytest.raises(UnsupportedError, match="the op's kernel is IntraNode"):
        MoriLowLatencyDispatcher(altered(group), bf16_as_is, residence, arena=PairedArena())
    with pytest.raises(ValueError, match="the residence is of 2 of 4 slots, but the op's of 2 of 2"):
        MoriNormalDispatcher(altered(group), bf16_as_is, residence_of(World(2).group(1)), arena=PairedArena())
    op = mori_v2_op(group, "mxfp8")
    op.cfg.dispatch_data_type = torch.bfloat16
    with pytest.raises(ValueError, match=r"this one was made for torch\.bfloat16 and torch\.bfloat16"):
        MoriV2Dispatcher(op, quantize_mxfp8, residence, arena=PairedArena())


def test_rows_of_another_width_or_number_of_routes() -> None:
    group = one_rank()
    dispatcher = MoriNormalDispatcher(altered(group), bf16_as_is, residence_of(group), arena=PairedArena())
    rows, routing = batch("full", 0, LOCAL, NARROW)
    routes = fill_nowhere(in_order(routing))
    with pytest.raises(ValueError, match=f"{NARROW} values and {TOPK} routes; got 64 and {TOPK}"):
        dispatcher.dispatch(Bf16Rows(rows.data[:, :64].contiguous()), routes)
    one_route = routes.moved(routes.topk_ids[:, :1], routes.topk_weights[:, :1], routes.space, LOCAL)
    with pytest.raises(ValueError, match=f"got {NARROW} and 1"):
        dispatcher.dispatch(rows, one_route)


def test_a_route_to_nowhere_is_refused_by_mori() -> None:
    group = one_rank()
    dispatcher = MoriNormalDispatcher(altered(group), bf16_as_is, residence_of(group), arena=PairedArena())
    rows, routing = batch("full", 0, LOCAL, NARROW)
    padded: Routing[PaddedPhysicalIds] = in_order(routing)
    with pytest.raises(BoundaryError, match="is PaddedPhysicalIds, expected PhysicalIds"):
        dispatcher.dispatch(rows, padded)  # type: ignore[arg-type]


# ---- caps ---------------------------------------------------------------------------------------------------------------------------

TOKENS = (3, 0)  # what the ranks of a mixed batch send


def senders(counts: Sequence[int]) -> BySenders:
    return BySenders(lambda: counts)


def capped(cap: ReceiveCap, kind: str = "normal") -> list[tuple[int, Tensor]]:
    """Return how many rows of its arena each rank looks at, and its results."""
    world, w = World(2), weights("bf16", 2 * LOCAL, NARROW)

    def body(rank: int) -> tuple[int, Tensor]:
        group = world.group(rank)
        rows, routing = batch("mixed", rank, 2 * LOCAL, NARROW)
        routes, experts = fill_nowhere(in_order(routing)), Experts(prepared(held_by(w, rank)))
        if kind == "v2":
            v2 = MoriV2Dispatcher(mori_v2_op(group, "bf16"), bf16_as_is, residence_of(group), cap=cap, arena=PairedArena())
            dispatched = v2.dispatch(rows, routes)
            assert dispatched.staging is not None
            assert dispatched.staging.shape[0] == dispatched.payload.rows == dispatched.routing.topk_ids.shape[0]
            return dispatched.payload.rows, v2.combine(experts(dispatched))
        normal = MoriNormalDispatcher(mori_op(group, "bf16", Kernel.IntraNode), bf16_as_is, residence_of(group), cap=cap, arena=PairedArena())
        received = normal.dispatch(rows, routes)
        return received.payload.rows, normal.combine(experts(received))

    return world.run(body)


@pytest.mark.parametrize("kind", ["normal", "v2"])
@pytest.mark.parametrize(
    ("cap", "rows"),
    [
        pytest.param(senders(TOKENS), sum(TOKENS), id="senders"),
        pytest.param(senders((CAPACITY, 50)), 2 * CAPACITY, id="more than the arena"),
        pytest.param(VerifiedCap(5), 5, id="verified"),
    ],
)
def test_a_cap_cuts_what_nothing_arrives_in(cap: ReceiveCap, rows: int, kind: str) -> None:
    for rank, (looked_at, result) in enumerate(capped(cap, kind)):
        assert looked_at == rows
        near(result, expected(SETUPS["mori normal"], "mixed", rank, 2, "bf16", "bf16"))


@pytest.mark.parametrize("counts", [(3,), (3, 0, 0), (2, 0)], ids=["too few ranks", "too many ranks", "fewer rows than are sent"])
def test_senders_that_cannot_be_so_are_refused_before_anything_is_sent(counts: tuple[int, ...]) -> None:
    def body(rank: int) -> None:
        group = world.group(rank)
        dispatcher = MoriNormalDispatcher(
            mori_op(group, "bf16", Kernel.IntraNode), bf16_as_is, residence_of(group), cap=senders(counts), arena=PairedArena()
        )
        rows, routing = batch("mixed", rank, 2 * LOCAL, NARROW)
        if rank == 0:
            with pytest.raises(ValueError, match="sender_rows"):
                dispatcher.dispatch(rows, fill_nowhere(in_order(routing)))

    world = World(2)
    world.run(body)


def test_a_guess_that_was_too_low_is_refused_and_ends_the_dispatch() -> None:
    world = World(2)

    def body(rank: int) -> None:
        group = world.group(rank)
        dispatcher = MoriNormalDispatcher(
            mori_op(group, "bf16", Kernel.IntraNode), bf16_as_is, residence_of(group), cap=VerifiedCap(1), arena=PairedArena()
        )
        rows, routing = batch("full", rank, 2 * LOCAL, NARROW)
        with pytest.raises(ReceiveCapError, match=r"\d rows arrived, and the cap is 1"):
            dispatcher.dispatch(rows, fill_nowhere(in_order(routing)))

    world.run(body)

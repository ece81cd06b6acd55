"""A dispatch is combined once, by the dispatcher that made it, and before its memory is used again."""

import gc
from collections.abc import Callable
from typing import TypeVar, cast

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, BoundaryError, CombineInput, DispatchOutput, Payload, Routing, bf16_as_is
from moe_typed.dispatchers import (
    LL_BF16,
    ArenaError,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    MoriDispatcher,
    MoriNormalDispatcher,
    PairedArena,
    RingArena,
)
from moe_typed.routing import PhysicalIds, fill_nowhere, in_order
from moe_typed.stages import DeepEPLLHandle, HandleError, HandleWarning
from tests.dispatchers.libraries import low_latency_buffer, mori_op, residence_of, spread_of
from tests.dispatchers.setups import SETUPS, AnyDispatcher, slots
from tests.dispatchers.support import CAPACITY, LOCAL, NARROW, WIDE, batch, experts_for, held_by, prepared, weights
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.mori_config import EpDispatchCombineKernelType
from tests.emulation.world import Group, World

T = TypeVar("T")
Dispatched = DispatchOutput[Payload, CombineInput]

setups = pytest.mark.parametrize("name", SETUPS)
ringed = pytest.mark.parametrize("name", [name for name in SETUPS if name.startswith(("deepep ll", "mooncake", "nixl"))])
paired = pytest.mark.parametrize("name", [name for name in SETUPS if name.startswith("mori")])


class Rank:
    """One rank's dispatcher and experts over a setup, with a batch to send."""

    def __init__(self, name: str, group: Group, kind: str = "mixed") -> None:
        setup, experts = SETUPS[name], LOCAL * group.size()
        self.dispatcher: AnyDispatcher = setup.dispatcher(group, "bf16")
        self.experts = experts_for(self.dispatcher.payload, prepared(held_by(weights("bf16", experts, setup.hidden), group.rank())))
        rows, routing = batch(kind, group.rank(), experts, setup.hidden)
        self.rows, self.routing = rows, slots(setup, routing)

    def dispatch(self) -> Dispatched:
        return self.dispatcher.dispatch(self.rows, self.routing)

    def results(self) -> CombineInput:
        return self.experts(self.dispatch())


def run(name: str, body: Callable[[Rank], T], ranks: int = 2, kind: str = "mixed") -> list[T]:
    world = World(ranks)
    return world.run(lambda rank: body(Rank(name, world.group(rank), kind)))


@setups
def test_a_second_combine_is_refused(name: str) -> None:
    def body(rank: Rank) -> None:
        results = rank.results()
        rank.dispatcher.combine(results)
        with pytest.raises(HandleError, match="was consumed already"):
            rank.dispatcher.combine(results)

    run(name, body)


@setups
def test_another_dispatcher_is_refused_and_named(name: str) -> None:
    world = World(1)
    mine, other = Rank(name, world.group(0)), Rank(name, world.group(0))
    results = mine.results()
    with pytest.raises(HandleError, match="was made by") as raised:
        other.dispatcher.combine(results)
    assert repr(mine.dispatcher) in str(raised.value)
    assert mine.dispatcher.combine(results).shape == mine.rows.data.shape


@setups
def test_a_failure_of_the_experts_ends_the_dispatch(name: str) -> None:
    world = World(1)
    rank = Rank(name, world.group(0))
    dispatched = rank.dispatch()
    results = rank.experts(dispatched)
    dispatched.fail(ValueError("out of luck"))
    with pytest.raises(HandleError, match="out of luck"):
        rank.dispatcher.combine(results)


@setups
def test_a_dispatch_without_a_combine_is_reported(name: str) -> None:
    rank = Rank(name, World(1).group(0))

    def forget() -> None:
        rank.dispatch()
        gc.collect()

    with pytest.warns(HandleWarning, match="was never consumed"):
        forget()


class BrokenBuffer:
    """DeepEP whose combine fails."""

    def __init__(self, group: Group) -> None:
        self._inner = low_latency_buffer(group)
        self.rank, self.group_size = group.rank(), group.size()
        self.low_latency_dispatch = self._inner.low_latency_dispatch

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Tensor, Tensor, int, int, int],
        *,
        use_logfmt: bool,
        return_recv_hook: bool,
    ) -> tuple[Tensor, object, Callable[[], None] | None]:
        raise RuntimeError("timed out")


def test_a_failed_combine_ends_the_handle() -> None:
    group = World(1).group(0)
    dispatcher = DeepEPLowLatencyDispatcher(
        BrokenBuffer(group), LL_BF16, spread_of(group), max_tokens=CAPACITY, topk_idx_t=torch.int64, arena=RingArena()
    )
    rows, routing = batch("full", 0, LOCAL, WIDE)
    experts = experts_for(Bf16Rows, prepared(weights("bf16", LOCAL, WIDE)))
    results = experts(dispatcher.dispatch(rows, slots(SETUPS["deepep ll"], routing)))
    with pytest.raises(RuntimeError, match="timed out"):
        dispatcher.combine(results)
    with pytest.raises(HandleError, match=r"ended with an error \(RuntimeError: timed out\)"):
        dispatcher.combine(results)


# ---- origins -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SETUPS if name.startswith(("deepep ll", "mooncake", "nixl", "mori"))])
def test_weights_come_home_with_the_ids_that_they_were_sent_with(name: str) -> None:
    """A routing of the same shape with other ids would be combined without a word: the ids are the handle's, the weights those of the origin."""
    here = Rank(name, World(1).group(0))
    dispatched = here.dispatch()
    results = here.experts(dispatched)
    sent = cast("Routing[PhysicalIds]", vars(results)["origin"])
    other = attrs.evolve(sent, topk_ids=sent.topk_ids.flip(1))
    with pytest.raises(BoundaryError, match=rf"CombineInput\.origin: is the routing {id(other):#x} .* dispatched by the routing {id(sent):#x}"):
        here.dispatcher.combine(cast("Callable[..., CombineInput]", attrs.evolve)(results, origin=other))
    with pytest.raises(HandleError, match="ended with an error"):
        here.dispatcher.combine(results)


# ---- arenas -------------------------------------------------------------------------------------------------------------------------


@ringed
def test_two_results_are_alive_and_a_third_dispatch_is_refused(name: str) -> None:
    def body(rank: Rank) -> None:
        first, second = rank.results(), rank.results()
        with pytest.raises(ArenaError, match="2 results of this library are alive"):
            rank.dispatch()
        later = rank.dispatcher.combine(second)
        with pytest.raises(ArenaError):  # the first one's buffer is next
            rank.dispatch()
        torch.testing.assert_close(rank.dispatcher.combine(first), later)
        torch.testing.assert_close(rank.dispatcher.combine(rank.results()), later)

    run(name, body)


@paired
def test_one_result_is_alive(name: str) -> None:
    def body(rank: Rank) -> None:
        results = rank.results()
        with pytest.raises(ArenaError, match="one result of this library is alive"):
            rank.dispatch()
        first = rank.dispatcher.combine(results)
        torch.testing.assert_close(rank.dispatcher.combine(rank.results()), first)

    run(name, body)


@paired
def test_a_dispatch_that_was_not_combined_needs_a_reset(name: str) -> None:
    def body(rank: Rank) -> None:
        dispatcher = rank.dispatcher
        rank.dispatch().fail(ValueError("experts"))
        with pytest.raises(ArenaError, match="ended without a combine"):
            rank.dispatch()
        assert isinstance(dispatcher, MoriDispatcher)
        dispatcher.reset()
        assert bool(torch.isfinite(dispatcher.combine(rank.results())).all())

    run(name, body)


def test_dispatchers_of_one_library_share_an_arena() -> None:
    group, ring, pair = World(1).group(0), RingArena(), PairedArena()
    buffer, spread = low_latency_buffer(group), spread_of(group)
    layers = [DeepEPLowLatencyDispatcher(buffer, LL_BF16, spread, max_tokens=CAPACITY, topk_idx_t=torch.int64, arena=ring) for _ in range(3)]
    rows, routing = batch("full", 0, LOCAL, WIDE)
    alive = [layer.dispatch(rows, slots(SETUPS["deepep ll"], routing)) for layer in layers[:2]]
    with pytest.raises(ArenaError):
        layers[2].dispatch(rows, slots(SETUPS["deepep ll"], routing))
    op = mori_op(group, "bf16", EpDispatchCombineKernelType.IntraNode)
    first, second = (MoriNormalDispatcher(op, bf16_as_is, residence_of(group), arena=pair) for _ in range(2))
    rows, routing = batch("full", 0, LOCAL, NARROW)
    open_one = first.dispatch(rows, fill_nowhere(in_order(routing)))
    with pytest.raises(ArenaError):
        second.dispatch(rows, fill_nowhere(in_order(routing)))
    for handle in (*(dispatched.handle for dispatched in alive), open_one.handle):
        handle.discard("the test is over")


def test_a_ring_is_unsure_after_a_dispatch_that_failed() -> None:
    ring, handle = RingArena(), DeepEPLLHandle(None, None)
    ring.claim()
    ring.hold(handle)
    ring.claim()  # of two buffers one is free, but the library fails, and nobody knows which is next
    with pytest.raises(ArenaError):
        ring.claim()
    handle.discard("combined in effect")
    ring.claim()


@pytest.mark.parametrize("results", [0, -1])
def test_a_ring_holds_something(results: int) -> None:
    with pytest.raises(ValueError, match="one result or more"):
        RingArena(results)


@setups
def test_a_repr_names_the_class_the_wire_and_the_rank(name: str) -> None:
    dispatcher = Rank(name, World(1).group(0)).dispatcher
    text = repr(dispatcher)
    assert text.startswith(type(dispatcher).__qualname__ + "(")
    assert "rank 0 of 1" in text
    assert len(text) < 200


def test_a_repr_shows_what_changes_numbers() -> None:
    group = World(1).group(0)
    buffer, spread = low_latency_buffer(group), spread_of(group)
    assert "use_logfmt" in repr(
        DeepEPLowLatencyDispatcher(buffer, LL_BF16, spread, max_tokens=4, topk_idx_t=torch.int64, use_logfmt=True, arena=RingArena())
    )
    assert "quant_type='none'" in repr(Rank("mori normal", group).dispatcher)
    assert "expert_alignment=4" in repr(Rank("deepep normal", group).dispatcher)
    assert "max_tokens=4" in repr(DeepEPNormalDispatcher(EmulatedBuffer(group), bf16_as_is, spread, topk_idx_t=torch.int64, max_tokens=4))

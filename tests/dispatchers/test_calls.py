"""What a library is called with where its result alone does not tell: health masks, timeouts, compression, and caps."""

from collections.abc import Callable
from typing import ClassVar, cast, final

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, CombineInput, SiluAndMul, bf16_as_is, debug, from_topk
from moe_typed.dispatchers import (
    LL_BF16,
    BySenders,
    DeepEPLowLatencyDispatcher,
    LowLatencyBuffer,
    MooncakeBuffer,
    MooncakeDispatcher,
    MoriNormalDispatcher,
    NixlDispatcher,
    PairedArena,
    ReceiveCap,
    RingArena,
    VerifiedCap,
)
from moe_typed.routing import fill_nowhere, in_order
from moe_typed.runners import reference_experts
from tests.dispatchers.libraries import low_latency_buffer, mori_op, nixl_buffer, residence_of, spread_of
from tests.dispatchers.setups import SETUPS, AnyDispatcher, slots
from tests.dispatchers.support import CAPACITY, LOCAL, NARROW, TOPK, WIDE, batch, experts_for, held_by, near, prepared, weights
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mori_config import EpDispatchCombineKernelType as Kernel
from tests.emulation.world import Group, World


@final
class Recorder:
    """A library whose calls are kept: positional arguments, then those by name."""

    methods: ClassVar[tuple[str, ...]] = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")
    rank, group_size = 0, 1

    def __init__(self, inner: object) -> None:
        self.calls: list[tuple[tuple[object, ...], dict[str, object]]] = []
        for name in self.methods:
            if hasattr(inner, name):
                setattr(self, name, self._kept(cast("Callable[..., object]", getattr(inner, name))))

    def _kept(self, call: Callable[..., object]) -> Callable[..., object]:
        def kept(*args: object, **kwargs: object) -> object:
            self.calls.append((args, kwargs))
            return call(*args, **kwargs)

        return kept


def there_and_back(dispatcher: AnyDispatcher) -> None:
    experts = experts_for(dispatcher.payload, prepared(held_by(weights("bf16", LOCAL, WIDE), 0)))
    rows, routing = batch("full", 0, LOCAL, WIDE)
    dispatcher.then(experts)(rows, in_order(routing))


def one_rank() -> Group:
    return World(1).group(0)


def test_mooncake_is_given_the_health_mask_and_the_timeout_both_ways() -> None:
    group, active = one_rank(), torch.ones(1, dtype=torch.int32)
    recorder = Recorder(EmulatedMooncakeBuffer(group))
    buffer = cast("MooncakeBuffer", recorder)
    dispatcher = MooncakeDispatcher(buffer, LL_BF16, spread_of(group), max_tokens=CAPACITY, active_ranks=active, timeout_us=70_000, arena=RingArena())
    there_and_back(cast("AnyDispatcher", dispatcher))
    (sent, _), (home, _) = recorder.calls
    assert sent[2] is active
    assert home[3] is active
    assert (sent[5], home[4]) == (70_000, 70_000)


@pytest.mark.parametrize("use_logfmt", [False, True])
@pytest.mark.parametrize("library", [DeepEPLowLatencyDispatcher, NixlDispatcher])
def test_combine_compresses_where_it_is_asked_to(
    library: type[DeepEPLowLatencyDispatcher[Bf16Rows]] | type[NixlDispatcher[Bf16Rows]], use_logfmt: bool
) -> None:
    group = one_rank()
    recorder = Recorder(low_latency_buffer(group) if library is DeepEPLowLatencyDispatcher else nixl_buffer(group, torch.int64))
    buffer = cast("LowLatencyBuffer[object]", recorder)
    make = cast("Callable[..., AnyDispatcher]", library)
    settings = {"max_tokens": CAPACITY, "topk_idx_t": torch.int64, "arena": RingArena(), "use_logfmt": use_logfmt}
    there_and_back(make(buffer, LL_BF16, spread_of(group), **settings))
    assert [kwargs.get("use_logfmt") for _, kwargs in recorder.calls] == [None, use_logfmt]


# ---- caps --------------------------------------------------------------------------------------------------------------------------


def all_to_the_first(cap: ReceiveCap) -> None:
    """Send all rows of two ranks to the first, and compare what comes home."""
    world, w = World(2), weights("bf16", 2 * LOCAL, NARROW)
    topk_ids, topk_weights = torch.arange(TOPK, dtype=torch.int32).repeat(CAPACITY, 1), torch.full((CAPACITY, TOPK), 0.5)
    data = torch.randn(CAPACITY, NARROW, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)

    def body(rank: int) -> Tensor:
        group = world.group(rank)
        dispatcher = MoriNormalDispatcher(mori_op(group, "bf16", Kernel.IntraNode), bf16_as_is, residence_of(group), cap=cap, arena=PairedArena())
        routing = fill_nowhere(in_order(from_topk(topk_ids, topk_weights, 2 * LOCAL)))
        return dispatcher.then(experts_for(dispatcher.payload, prepared(held_by(w, rank))))(Bf16Rows(data), routing)

    for found in world.run(body):
        near(found, reference_experts(data.float(), topk_ids, topk_weights, w, SiluAndMul()))


@pytest.mark.parametrize("cap", [BySenders(lambda: (CAPACITY, CAPACITY)), VerifiedCap(2 * CAPACITY)], ids=repr)
def test_a_cap_that_is_just_enough(cap: ReceiveCap) -> None:
    all_to_the_first(cap)


# ---- strides -----------------------------------------------------------------------------------------------------------------------


def strided(tensor: Tensor) -> Tensor:
    """Return the same values in column-major order."""
    return tensor.T.contiguous().T


@pytest.mark.parametrize("name", SETUPS)
def test_libraries_are_given_contiguous_memory(name: str) -> None:
    """They read pointers: rows, routes and results in another order come home as if they were in order."""
    setup, world = SETUPS[name], World(1)
    w = weights("bf16", LOCAL, setup.hidden)
    rows, routing = batch("full", 0, LOCAL, setup.hidden)

    def layer(change: Callable[[Tensor], Tensor]) -> Tensor:
        dispatcher = setup.dispatcher(world.group(0), "bf16")
        moved = attrs.evolve(routing, topk_ids=change(routing.topk_ids), topk_weights=change(routing.topk_weights))
        routes = attrs.evolve(slots(setup, moved), topk_ids=change(slots(setup, moved).topk_ids), topk_weights=change(moved.topk_weights))
        results = experts_for(dispatcher.payload, prepared(w))(dispatcher.dispatch(Bf16Rows(change(rows.data)), routes))
        hidden_states = cast("Tensor", getattr(results, "hidden_states"))  # noqa: B009 - the base does not have it
        if hidden_states.dim() == 2:  # slabs are contiguous by their type
            results = cast("Callable[..., CombineInput]", attrs.evolve)(results, hidden_states=change(hidden_states))
        return dispatcher.combine(results)

    with debug("off"):
        assert torch.equal(layer(strided), layer(Tensor.contiguous))

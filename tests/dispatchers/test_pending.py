"""Calls that are started first and waited for later: nothing can be reached in between, and the result is the same."""

from typing import TypeAlias, cast

import pytest
import torch
from torch import Tensor

from moe_typed import DispatchOutput, Payload, UnsupportedError
from moe_typed.dispatchers import MoriLowLatencyDispatcher, PairedArena, PendingCombine, PendingDispatch, SlabDispatcher
from moe_typed.routing import fill_nowhere, in_order
from moe_typed.stages import Handle, HandleError, SlabCombineInput
from tests.dispatchers.libraries import mori_op, residence_of
from tests.dispatchers.setups import SETUPS, expected, slots
from tests.dispatchers.support import LOCAL, NARROW, WIRES, batch, experts_for, held_by, near, prepared, weights
from tests.emulation.mori_config import EpDispatchCombineKernelType as Kernel
from tests.emulation.world import World

AnySlab: TypeAlias = SlabDispatcher[Payload, SlabCombineInput, DispatchOutput[Payload, SlabCombineInput], object]

SLABS = [(name, wire) for name, setup in SETUPS.items() if name.startswith(("deepep ll", "mooncake", "nixl")) for wire in setup.wires]


@pytest.mark.parametrize(("name", "wire"), SLABS)
def test_slabs_that_were_started_are_those_that_arrive(name: str, wire: str) -> None:
    setup, world = SETUPS[name], World(2)

    def body(rank: int) -> Tensor:
        dispatcher = cast("AnySlab", setup.dispatcher(world.group(rank), wire))
        w = held_by(weights("bf16", 2 * LOCAL, setup.hidden), rank)
        experts = experts_for(dispatcher.payload, prepared(w))
        rows, routing = batch("mixed", rank, 2 * LOCAL, setup.hidden)
        pending = dispatcher.start_dispatch(rows, slots(setup, routing))
        dispatched = pending.wait()
        with pytest.raises(HandleError, match="this dispatch was waited for already"):
            pending.wait()
        combining = dispatcher.start_combine(experts(dispatched))
        result = combining.wait()
        with pytest.raises(HandleError, match="this combine was waited for already"):
            combining.wait()
        return result

    for rank, result in enumerate(world.run(body)):
        near(result, expected(setup, "mixed", rank, 2, "bf16", wire))


@pytest.mark.parametrize("wire", SETUPS["mori ll, async"].wires)
def test_mori_s_kernel_that_receives_by_itself(wire: str) -> None:
    setup, world = SETUPS["mori ll, async"], World(2)

    def body(rank: int) -> Tensor:
        group = world.group(rank)
        dispatcher = MoriLowLatencyDispatcher(mori_op(group, wire, Kernel.AsyncLL), WIRES[wire], residence_of(group), arena=PairedArena())
        experts = experts_for(dispatcher.payload, prepared(held_by(weights("bf16", 2 * LOCAL, setup.hidden), rank)))
        rows, routing = batch("mixed", rank, 2 * LOCAL, setup.hidden)
        dispatched = dispatcher.start_dispatch(rows, fill_nowhere(in_order(routing))).wait()
        return dispatcher.start_combine(experts(dispatched)).wait()

    for rank, result in enumerate(world.run(body)):
        near(result, expected(setup, "mixed", rank, 2, "bf16", wire))


def test_mori_s_other_kernels_cannot_be_started() -> None:
    group = World(1).group(0)
    dispatcher = MoriLowLatencyDispatcher(mori_op(group, "bf16", Kernel.IntraNodeLL), WIRES["bf16"], residence_of(group), arena=PairedArena())
    rows, routing = batch("full", 0, LOCAL, NARROW)
    with pytest.raises(UnsupportedError, match="the kernel IntraNodeLL does not receive in a step of its own; AsyncLL does"):
        dispatcher.start_dispatch(rows, fill_nowhere(in_order(routing)))


class AnyHandle(Handle[None]):
    """A handle of nothing."""


@pytest.mark.parametrize("kind", [PendingDispatch, PendingCombine])
def test_an_error_while_waiting_ends_the_handle(kind: type[PendingDispatch[Tensor]] | type[PendingCombine]) -> None:
    handle = AnyHandle(None, None)

    def fail() -> Tensor:
        raise RuntimeError("timed out")

    pending = kind(fail, handle)
    with pytest.raises(RuntimeError, match="timed out"):
        pending.wait()
    assert not handle.open
    with pytest.raises(HandleError, match="waited for already"):
        pending.wait()


def test_the_payload_is_out_of_reach_before_the_hook() -> None:
    handle = AnyHandle(None, None)
    pending = PendingDispatch(lambda: torch.zeros(1), handle)
    assert [name for name in dir(pending) if not name.startswith("_")] == ["wait"]
    handle.discard("the test is over")

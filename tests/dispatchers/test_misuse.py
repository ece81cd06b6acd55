"""What an engine may get wrong around a library's call: each is an error that says what, or a report, and never a wrong number."""

import gc
import logging
from collections.abc import Callable
from typing import cast

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, BoundaryError, CombineInput, PhysicalIds, bf16_as_is, debug
from moe_typed.dispatchers import MoriNormalDispatcher, PairedArena, PendingCombine
from moe_typed.routing import ExpertMap, Residence, contiguous_residence
from moe_typed.stages import Handle, HandleError, HandleWarning
from tests.dispatchers.libraries import mori_op
from tests.dispatchers.setups import SETUPS, slots
from tests.dispatchers.support import LOCAL, batch, experts_for, held_by, prepared, weights
from tests.emulation.hazards import EmulatedMisuse
from tests.emulation.mori_config import EpDispatchCombineKernelType as Kernel
from tests.emulation.world import World

setups = pytest.mark.parametrize("name", SETUPS)


def test_a_residence_of_slots_that_mori_sends_elsewhere() -> None:
    """All rows would go nowhere, or to the wrong expert, and nothing else would tell."""
    world = World(2)
    slots_of_both = [contiguous_residence(PhysicalIds, 2 * LOCAL, first, LOCAL, torch.device("cpu")) for first in (0, LOCAL)]

    def body(rank: int) -> None:
        op = mori_op(world.group(rank), "bf16", Kernel.IntraNode)
        mine, other = slots_of_both[rank], slots_of_both[1 - rank]
        backwards = Residence(mine.mask, ExpertMap(torch.where(mine.map.local < 0, -1, LOCAL - 1 - mine.map.local), PhysicalIds, LOCAL))
        for residence in (other, Residence(other.mask, mine.map), Residence(mine.mask, other.map), backwards):
            first = rank * LOCAL
            with pytest.raises(ValueError, match=f"not of slots {first} to {first + LOCAL - 1} in order, which MoRI sends to rank {rank}"):
                MoriNormalDispatcher(op, bf16_as_is, residence, arena=PairedArena())
        MoriNormalDispatcher(op, bf16_as_is, mine, arena=PairedArena())

    with debug("off"):
        world.run(body)


@setups
def test_rows_and_routes_on_two_devices_are_refused(name: str) -> None:
    """A library is given pointers: memory of the host among those of a GPU is read as if it were the GPU's."""
    setup = SETUPS[name]
    dispatcher = setup.dispatcher(World(1).group(0), "bf16")
    rows, routing = batch("full", 0, LOCAL, setup.hidden)
    with debug("layout"), pytest.raises(BoundaryError, match=r"OutgoingRows\.routing: has device = cpu inside, but device = meta here"):
        dispatcher.dispatch(Bf16Rows(rows.data.to("meta")), slots(setup, routing))


@setups
def test_a_combine_that_fails_ends_the_handle(name: str) -> None:
    """Too few rows come home, which every library refuses."""
    setup = SETUPS[name]
    dispatcher = setup.dispatcher(World(1).group(0), "bf16")
    experts = experts_for(dispatcher.payload, prepared(held_by(weights("bf16", LOCAL, setup.hidden), 0)))
    rows, routing = batch("full", 0, LOCAL, setup.hidden)
    with debug("off"):
        results = experts(dispatcher.dispatch(rows, slots(setup, routing)))
        hidden_states = cast("Tensor", getattr(results, "hidden_states"))  # noqa: B009 - the base does not have it
        too_few = cast("Callable[..., CombineInput]", attrs.evolve)(results, hidden_states=hidden_states[:0])
        with pytest.raises((RuntimeError, AssertionError, EmulatedMisuse)) as failure:
            dispatcher.combine(too_few)
        with pytest.raises(HandleError, match=rf"ended with an error \({failure.type.__name__}"):
            dispatcher.combine(results)


@setups
def test_an_error_of_experts_that_are_called_by_hand_ends_the_handle(name: str) -> None:
    setup = SETUPS[name]
    dispatcher = setup.dispatcher(World(1).group(0), "bf16")
    wide = experts_for(dispatcher.payload, prepared(weights("bf16", LOCAL, 2 * setup.hidden)))
    rows, routing = batch("full", 0, LOCAL, setup.hidden)
    dispatched = dispatcher.dispatch(rows, slots(setup, routing))
    with debug("layout"), pytest.raises(BoundaryError, match=f"hidden = {setup.hidden}"):
        wide(dispatched)
    results = experts_for(dispatcher.payload, prepared(weights("bf16", LOCAL, setup.hidden)))(dispatched)
    with pytest.raises(HandleError, match=r"ended with an error \(BoundaryError"):
        dispatcher.combine(results)


@pytest.mark.parametrize("name", [name for name in SETUPS if name.startswith(("deepep v2", "deepep ll", "mooncake", "nixl"))])
def test_a_row_that_names_a_slot_twice_is_found_before_a_kernel_traps(name: str) -> None:
    setup = SETUPS[name]
    dispatcher = setup.dispatcher(World(1).group(0), "bf16")
    rows, routing = batch("full", 0, LOCAL, setup.hidden)
    twice = slots(setup, routing)
    twice = attrs.evolve(twice, topk_ids=torch.tensor([[0, 1], [-1, -1], [1, 1], [0, 0]], dtype=torch.int32), live=3)
    with debug("values"), pytest.raises(BoundaryError, match=r"OutgoingRows\.routing: names slot 1 twice in row 2"):
        dispatcher.dispatch(rows, twice)
    with debug("values"):
        ids = torch.tensor([[0, 1], [-1, -1], [1, -1], [0, 0]], dtype=torch.int32)
        dispatcher.dispatch(rows, attrs.evolve(twice, topk_ids=ids)).fail(RuntimeError("the test is over"))


class AnyHandle(Handle[None]):
    """A handle of nothing."""


def test_a_combine_that_was_started_and_is_never_waited_for_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    handle = AnyHandle(None, None)
    handle.consume(None)

    def forget() -> None:
        PendingCombine(lambda: torch.zeros(1), handle)
        gc.collect()

    with (
        caplog.at_level(logging.WARNING, logger="moe_typed.stages"),
        pytest.warns(HandleWarning, match="a combine of AnyHandle was started and never"),
    ):
        forget()
    assert "never waited for" in caplog.text


@pytest.mark.filterwarnings("error")
def test_a_combine_that_was_waited_for_says_nothing() -> None:
    handle = AnyHandle(None, None)
    handle.consume(None)
    PendingCombine(lambda: torch.zeros(1), handle).wait()
    gc.collect()

"""The rows of slabs against a loop, and arenas that are cut to what bounds their live rows."""

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_typed import BoundaryError, LocalIds, Payload, Settled, debug
from moe_typed.formats import MxFp8SwizzledRows, NvFp4Rows, head
from moe_typed.stages import (
    CombineInput,
    DeepEPLLDispatchOutput,
    DeepEPLLHandle,
    MoriDispatchOutput,
    MoriEPNormalDispatchOutput,
    ReceivedPerExpert,
    SegmentedDispatchOutput,
)
from tests.formats.support import noise, quantized
from tests.ops.support import ints
from tests.stages.support import (
    ARENAS,
    CASES,
    EXPANDED,
    Owner,
    changed,
    origin,
    vector,
)

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

"""Tests of the emulation of Mooncake's elastic buffer."""

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_layer, expert, idle, local_layer, ranks_of, routes, rows, worlds
from tests.emulation.elastic import align
from tests.emulation.hazards import EmulatedMisuse, EmulatedTrap, Mode, Reason, poison_mask
from tests.emulation.mooncake_elastic import EmulatedMooncakeElasticBuffer, MooncakeEPHandle
from tests.emulation.world import Group, World
from tests.ops.support import int_rows, ints

HIDDEN, TOPK, TOKENS, ALIGNMENT = 64, 3, 6, 8


def make(group: Group, mode: Mode = "strict") -> EmulatedMooncakeElasticBuffer:
    return EmulatedMooncakeElasticBuffer(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, mode=mode)


def warned(expand: bool) -> AbstractContextManager[object]:
    """Expect the warning of an expanded dispatch, from whichever thread."""
    return pytest.warns(UserWarning, match="unwritten") if expand else nullcontext()


def run_expanded(x: Tensor, weights: Tensor, handle: MooncakeEPHandle, rank: int) -> Tensor:
    made, begin = torch.full(x.shape, torch.nan), 0
    for index, end in enumerate(ints(handle.psum_num_recv_tokens_per_expert)):
        made[begin:end] = weights[begin:end, None] * expert(x[begin:end], rank * LOCAL + index)
        begin = align(end, handle.expert_alignment)
    return made.to(torch.bfloat16)


@worlds
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
@pytest.mark.parametrize("expand", [True, False])
def test_a_layer_of_weighted_experts_is_the_reference_layer(ranks: int, spread: str, expand: bool) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else TOKENS, HIDDEN)  # exactly full
        ids, weights = routes(rank, x.size(0), TOPK, LOCAL if spread == "one rank" else LOCAL * ranks, dropped=1.0 if spread == "none" else 0.2)
        comm = make(world.group(rank))
        recv, local_ids, local_weights, handle, _ = comm.dispatch(x, ids, weights, LOCAL * ranks, expert_alignment=ALIGNMENT, do_expand=expand)
        assert isinstance(recv, Tensor)
        assert local_weights is not None
        if expand:
            assert poison_mask(local_ids).all()  # returned, and never written
            made = run_expanded(recv, local_weights, handle, rank)
        else:
            assert handle.num_recv_tokens == recv.size(0) == local_ids.size(0)
            made = local_layer(recv, local_ids, local_weights, rank * LOCAL).to(torch.bfloat16)
        combined, none, _ = comm.combine(made, handle, topk_weights=local_weights)
        assert none is None
        assert_layer(combined, x, ids, weights, roundings=3 if expand else 2)

    with warned(expand):
        world.run(body)


@pytest.mark.parametrize("expand", [True, False])
def test_the_list_of_counts_is_aligned_unless_expanded(expand: bool) -> None:
    world = World(2)
    given = [routes(rank, TOKENS, TOPK, LOCAL * 2) for rank in range(2)]

    def body(rank: int) -> None:
        handle = make(world.group(rank)).dispatch(rows(rank, TOKENS, HIDDEN), *given[rank], LOCAL * 2, expert_alignment=ALIGNMENT, do_expand=expand)[
            3
        ]
        counts = [sum(int((ids == rank * LOCAL + index).sum()) for ids, _ in given) for index in range(LOCAL)]
        assert handle.num_recv_tokens_per_expert_list == (counts if expand else [align(count, ALIGNMENT) for count in counts])

    with warned(expand):
        world.run(body)


def test_a_handle_moves_other_rows_in_the_same_way() -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, TOKENS, HIDDEN), routes(rank, TOKENS, TOPK, LOCAL * 2)
        comm = make(world.group(rank))
        recv, _, _, handle, _ = comm.dispatch(x, ids, weights, LOCAL * 2)
        again, _, _, same, event = comm.dispatch(-x, handle=handle, async_with_compute_stream=True)
        assert same is handle
        assert isinstance(recv, Tensor)
        assert isinstance(again, Tensor)
        assert poison_mask(again).all()
        event.current_stream_wait()
        assert torch.equal(again, -recv)
        assert torch.equal(comm.combine(again, handle)[0], (-x.float() * ranks_of(ids, LOCAL).unsqueeze(1)).to(torch.bfloat16))

    world.run(body)


def test_ids_are_read_as_int64_whatever_they_are() -> None:
    world = World(1)
    ids = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)

    def body(rank: int, mode: Mode) -> list[list[int]]:
        return int_rows(make(world.group(rank), mode).dispatch(rows(0, 2, HIDDEN), ids, None, LOCAL)[1])

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict"))
    assert misuse.value.reason is Reason.DTYPE
    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: make(world.group(rank)).dispatch(rows(0, 2, HIDDEN), ids.long().t(), None, LOCAL))
    assert misuse.value.reason is Reason.LAYOUT
    assert world.run(lambda rank: body(rank, "faithful")) == [[]]  # 2^32, and what lies behind: no row arrives


def test_the_number_of_experts_is_guessed() -> None:
    world = World(2)

    def body(rank: int, mode: Mode) -> int:
        ids = torch.tensor([[0], [2]])  # of 6 experts on 2 ranks; 2 is expert 2 of rank 0
        return len(make(world.group(rank), mode).dispatch(rows(0, 2, HIDDEN), ids)[0])

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict"))
    assert misuse.value.reason is Reason.INFERRED_EXPERTS
    with pytest.raises(RuntimeError, match="3 experts over 2 ranks"):
        world.run(lambda rank: body(rank, "faithful"))


def test_what_raises() -> None:
    world = World(1)

    def body(rank: int) -> None:
        comm, x = make(world.group(rank)), rows(0, 2, HIDDEN)
        with pytest.raises(RuntimeError, match="7 tokens are more than 6"):
            comm.dispatch(rows(0, 7, HIDDEN), torch.zeros(7, 1, dtype=torch.int64), None, LOCAL)
        with pytest.raises(EmulatedTrap, match="twice"):
            comm.dispatch(x, torch.zeros(2, 2, dtype=torch.int64), None, LOCAL)
        _, _, _, handle, _ = comm.dispatch(x, torch.zeros(2, 1, dtype=torch.int64), None, LOCAL)
        with pytest.raises(RuntimeError, match="x is bfloat16"):
            comm.combine(x[:1], handle)
        with pytest.raises(NotImplementedError):
            EmulatedMooncakeElasticBuffer(world.group(rank), allow_multiple_reduction=False)

    world.run(body)

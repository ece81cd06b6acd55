"""Tests of the NIXL EP emulation."""

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, assert_layer, idle, routes, rows, worlds
from tests.emulation.fp8_cast import cast_fp8
from tests.emulation.hazards import EmulatedMisuse, EmulatedTrap, Mode, Reason, poison_mask
from tests.emulation.nixl import EmulatedNixlBuffer
from tests.emulation.slab_support import positions, run_experts
from tests.emulation.world import World
from tests.ops.support import ints

HIDDEN, TOPK, TOKENS = 3584, 3, 8  # a hidden size that DeepEP does not have


def make(world: World, rank: int, dtype: torch.dtype = torch.int32, mode: Mode = "strict", connected: int | None = None) -> EmulatedNixlBuffer:
    comm = EmulatedNixlBuffer(rank=rank, world=world, topk_idx_t=dtype, mode=mode)
    comm.update_memory_buffers(world.ranks, LOCAL, 10**9)
    comm.connect_ranks([peer for peer in range(connected or world.ranks) if peer != rank])
    return comm


@worlds
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
def test_unweighted_experts_combine_to_the_reference_layer(ranks: int, dtype: torch.dtype, spread: str) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else TOKENS, HIDDEN)  # exactly full
        experts = LOCAL if spread == "one rank" else LOCAL * ranks
        ids, weights = routes(rank, x.size(0), TOPK, experts, dtype, dropped=1.0 if spread == "none" else 0.2)
        comm = make(world, rank, dtype)
        recv, count, handle, _, _ = comm.dispatch(x, ids, TOKENS, use_fp8=False)
        assert len(handle) == 4
        assert recv.shape == (LOCAL, ranks * TOKENS, HIDDEN)
        for index in range(LOCAL):
            assert poison_mask(recv[index, int(count[index]) :]).all()
        combined = comm.combine(run_experts(recv, rank), ids, weights, handle)[0]
        assert_layer(combined, x, ids, weights)

    world.run(body)


@worlds
@pytest.mark.parametrize("packed", [False, True])
def test_fp8_rows_and_scales_arrive_bit_for_bit(ranks: int, packed: bool) -> None:
    world = World(ranks)
    given = [(rows(rank, 5, HIDDEN), routes(rank, 5, TOPK, LOCAL * ranks, torch.int32)[0]) for rank in range(ranks)]

    def body(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (payload, scale), _, handle, _, _ = make(world, rank).low_latency_dispatch(*given[rank], TOKENS, round_scale=packed, use_ue8m0=packed)
        return payload, scale, handle[0], handle[1]

    for rank, (payload, scale, src_info, layout_range) in enumerate(world.run(body)):
        columns = HIDDEN // (512 if packed else 128)
        assert scale.stride() == (columns * ranks * TOKENS, 1, ranks * TOKENS)
        for index in range(LOCAL):
            where = positions(src_info, layout_range, index)
            assert set(where) == {
                (source, token) for source, (_, ids) in enumerate(given) for token in range(5) if (ids[token] == rank * LOCAL + index).any()
            }
            for (source, token), row in where.items():
                expected, factor = cast_fp8(given[source][0][token : token + 1], round_scale=packed)
                assert_bits(payload[index, row], expected[0])
                found = scale[index, row]
                if packed:
                    found = torch.exp2(found.contiguous().view(torch.uint8).int() - 127)
                assert torch.equal(found, factor[0])


def test_the_number_of_experts_bounds_the_shapes() -> None:
    world = World(2)

    def body(rank: int) -> None:
        comm = EmulatedNixlBuffer(rank=rank, world=world)
        comm.update_memory_buffers(4, LOCAL, 10**9)
        x, ids, weights = rows(rank, 2, HIDDEN), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
        comm.connect_ranks([1 - rank])
        recv, count, handle, _, _ = comm.dispatch(x, ids, TOKENS, use_fp8=False)
        assert recv.shape == (LOCAL, 2 * TOKENS, HIDDEN)
        recv, count, handle, _, _ = comm.dispatch(x, ids, TOKENS, LOCAL * 3, use_fp8=False)
        assert recv.shape == (LOCAL, 3 * TOKENS, HIDDEN)
        assert handle[1].shape == (LOCAL, 3)
        assert int(count[0]) == (4 if rank == 0 else 0)
        assert torch.equal(comm.combine(recv, ids, weights, handle)[0], x)
        for experts in (LOCAL, LOCAL * 5, LOCAL * 2 + 1):
            with pytest.raises(RuntimeError, match="experts"):
                comm.dispatch(x, ids, TOKENS, experts)
        comm.barrier()
        waited = torch.zeros(3, dtype=torch.int64)
        comm.dispatch(x, ids, TOKENS, LOCAL * 3, None, waited)
        assert bool((waited > 0).all())
        with pytest.raises(RuntimeError, match="tail"):
            comm.disconnect_ranks([rank])

    world.run(body)


def test_members_that_do_not_answer_are_masked() -> None:
    world = World(3, dead=frozenset({1}))

    def body(rank: int) -> None:
        comm = make(world, rank)
        x, ids, weights = rows(rank, 1, HIDDEN), torch.tensor([[0, LOCAL]], dtype=torch.int32), torch.tensor([[0.5, 0.25]])
        recv, _, handle, _, _ = comm.dispatch(x, ids, TOKENS, use_fp8=False)
        status = torch.full((3,), 9, dtype=torch.int32)
        comm.query_mask_buffer(status)
        assert ints(status) == [0, 1, 0]
        assert torch.equal(comm.combine(recv, ids, weights, handle)[0], x * 0.5)
        comm.clean_mask_buffer()
        comm.update_mask_buffer(2, mask=True)
        comm.query_mask_buffer(status)
        assert ints(status) == [0, 0, 1]

    world.run(body)


def test_the_last_ranks_leave() -> None:
    world = World(2)

    def body(rank: int) -> None:
        comm = make(world, rank)
        assert comm.group_size == 2
        if rank == 0:
            comm.disconnect_ranks([1])
            assert comm.group_size == 1

    world.run(body)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_the_third_dispatch_overwrites_the_first(mode: Mode) -> None:
    world = World(1)

    def body(rank: int) -> None:
        comm = make(world, rank, mode=mode)
        ids, weights = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
        results = [comm.dispatch(torch.full((1, HIDDEN), value, dtype=torch.bfloat16), ids, TOKENS, use_fp8=False) for value in range(3)]
        assert [float(recv[0, 0, 0]) for recv, *_ in results] == [2.0, 1.0, 2.0]
        first, _, handle, _, _ = results[0]
        if mode == "strict":
            with pytest.raises(EmulatedMisuse) as misuse:
                comm.combine(first, ids, weights, handle)
            assert misuse.value.reason is Reason.STALE_HANDLE
        else:
            assert float(comm.combine(first, ids, weights, handle)[0][0, 0]) == 2.0

    world.run(body)


def test_hooks_and_the_registered_buffer() -> None:
    world = World(1)

    def body(rank: int) -> None:
        comm = make(world, rank)
        x, ids, weights = rows(rank, 2, HIDDEN), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
        recv, count, handle, _, hook = comm.dispatch(x, ids, TOKENS, use_fp8=False, return_recv_hook=True)
        assert poison_mask(recv).all()
        assert poison_mask(count).all()
        assert hook is not None
        hook()
        assert ints(count) == [2, 0, 0]
        registered = comm.get_next_combine_buffer(handle)
        assert not registered.is_contiguous()
        registered.copy_(recv)
        assert torch.equal(comm.combine(registered, ids, weights, handle, zero_copy=True)[0], x)
        with pytest.raises(EmulatedMisuse) as misuse:
            comm.combine(recv, ids, weights, handle, zero_copy=True)
        assert misuse.value.reason is Reason.FOREIGN_BUFFER

    world.run(body)


def test_what_raises() -> None:
    world = World(1)
    x, ids = rows(0, 2, HIDDEN), torch.zeros(2, 1, dtype=torch.int32)

    def body(rank: int) -> None:
        comm = make(world, rank)
        with pytest.raises(EmulatedTrap, match="not below 3"):
            comm.dispatch(x, torch.full((2, 1), LOCAL, dtype=torch.int32), TOKENS)
        with pytest.raises(RuntimeError, match="int32, not"):
            comm.dispatch(x, ids.long(), TOKENS)
        with pytest.raises(RuntimeError, match="3 tokens are more than 2"):
            comm.dispatch(rows(0, 3, HIDDEN), torch.zeros(3, 1, dtype=torch.int32), 2)
        with pytest.raises(RuntimeError, match="at most 16"):
            comm.dispatch(x, torch.zeros(2, 17, dtype=torch.int32), TOKENS)
        with pytest.raises(RuntimeError, match="allocated once"):
            comm.update_memory_buffers(1, LOCAL, 0)
        with pytest.raises(RuntimeError, match="made for low latency"):
            comm.ht_dispatch(x)
        with pytest.raises(NotImplementedError):
            EmulatedNixlBuffer(low_latency_mode=False, world=world).ht_combine(x, ())
        with pytest.raises(RuntimeError, match="high throughput"):
            EmulatedNixlBuffer(low_latency_mode=False, world=world).dispatch(x, ids, TOKENS)
        with pytest.raises(RuntimeError, match="comes first"):
            EmulatedNixlBuffer(world=world).dispatch(x, ids, TOKENS)

    world.run(body)


def test_a_failing_rank_does_not_hang_the_others() -> None:
    world = World(4)

    def body(rank: int) -> None:
        ids = torch.zeros(1, 1, dtype=torch.int64 if rank == 3 else torch.int32)
        make(world, rank).dispatch(rows(0, 1, HIDDEN), ids, TOKENS)

    with pytest.raises(RuntimeError, match="int32, not"):
        world.run(body)

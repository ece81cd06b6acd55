"""Tests of the Mooncake EP emulation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, assert_layer, idle, routes, rows, worlds
from tests.emulation.fp8_cast import cast_fp8
from tests.emulation.hazards import EmulatedMisuse, Mode, Reason, poison_mask
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.slab_support import positions, run_experts
from tests.emulation.world import EmulatedHang, World
from tests.ops.support import ints

HIDDEN, TOPK, TOKENS = 2048, 3, 8

paths = pytest.mark.parametrize("fallback", [False, True], ids=["fast", "fallback"])


def healthy(ranks: int) -> Tensor:
    return torch.ones(ranks, dtype=torch.int32)


@worlds
@paths
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
def test_unweighted_experts_combine_to_the_reference_layer(ranks: int, fallback: bool, spread: str) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else TOKENS, HIDDEN)  # exactly full
        ids, weights = routes(rank, x.size(0), TOPK, LOCAL if spread == "one rank" else LOCAL * ranks, dropped=1.0 if spread == "none" else 0.2)
        comm = EmulatedMooncakeBuffer(world.group(rank), fallback=fallback)
        recv, count, handle, event, hook = comm.dispatch(x, ids, healthy(ranks), TOKENS, LOCAL * ranks, -1, use_fp8=False)
        for index in range(LOCAL):
            tail, sources = recv[index, int(count[index]) :], handle[0][index, int(count[index]) :]
            assert bool((tail == 0).all() if fallback else poison_mask(tail).all())
            assert bool((sources == -1).all() if fallback else poison_mask(sources).all())
        if fallback:
            assert hook is not None
            hook()
            event.current_stream_wait()
        else:
            assert hook is None
            with pytest.raises(AssertionError, match="no event"):
                event.current_stream_wait()
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        combined, _, _ = comm.combine(run_experts(recv, rank), ids, weights, None, -1, handle, out=out)
        assert combined is out
        assert_layer(combined, x, ids, weights)

    world.run(body)


@worlds
@paths
def test_fp8_rows_and_scales_arrive_bit_for_bit_in_the_strides_of_the_path(ranks: int, fallback: bool) -> None:
    world = World(ranks)
    given = [(rows(rank, 5, HIDDEN), routes(rank, 5, TOPK, LOCAL * ranks)[0]) for rank in range(ranks)]

    def body(rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        comm = EmulatedMooncakeBuffer(world.group(rank), fallback=fallback)
        recv, _, handle, _, _ = comm.dispatch(*given[rank], None, TOKENS, LOCAL * ranks, -1)
        assert isinstance(recv, tuple)  # fp8 unless told otherwise
        return *recv, handle[0], handle[1]

    columns = HIDDEN // 128
    for rank, (payload, scale, src_info, layout_range) in enumerate(world.run(body)):
        height = ranks * TOKENS
        assert scale.stride() == ((height * columns, columns, 1) if fallback else (columns * height, 1, height))
        for index in range(LOCAL):
            where = positions(src_info, layout_range, index)
            assert set(where) == {
                (source, token) for source, (_, ids) in enumerate(given) for token in range(5) if (ids[token] == rank * LOCAL + index).any()
            }
            for (source, token), row in where.items():
                expected, factor = cast_fp8(given[source][0][token : token + 1], round_scale=False)
                assert_bits(payload[index, row], expected[0])
                assert_bits(scale[index, row], factor[0])


@paths
@pytest.mark.parametrize("how", ["hook", "event"])
def test_results_are_poison_until_they_are_received_on_the_fast_path(fallback: bool, how: str) -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, TOKENS, HIDDEN), routes(rank, TOKENS, TOPK, LOCAL * 2)
        comm = EmulatedMooncakeBuffer(world.group(rank), fallback=fallback)
        flags = {"async_finish": how == "event", "return_recv_hook": how == "hook"}
        recv, count, handle, event, hook = comm.dispatch(x, ids, None, TOKENS, LOCAL * 2, -1, False, flags["async_finish"], flags["return_recv_hook"])
        assert bool(poison_mask(recv).all()) == bool(poison_mask(count).all()) == (not fallback)
        receive: Callable[[], None] | None = hook if how == "hook" else event.current_stream_wait
        assert receive is not None
        receive()
        assert not torch.isnan(recv[0, : int(count[0])]).any()
        combined, event, hook = comm.combine(
            torch.zeros_like(recv), ids, weights, None, -1, handle, False, flags["async_finish"], flags["return_recv_hook"]
        )
        assert bool(torch.isnan(combined).all()) == (not fallback)
        receive = hook if how == "hook" else event.current_stream_wait
        assert receive is not None
        receive()
        assert not combined.any()

    world.run(body)


@pytest.mark.parametrize("given", [True, False])
def test_a_rank_that_does_not_answer_is_marked_and_its_share_is_missing(given: bool) -> None:
    world = World(3, dead=frozenset({1}))

    def body(rank: int) -> None:
        active = healthy(3) if given else None
        comm = EmulatedMooncakeBuffer(world.group(rank))
        x, ids, weights = rows(rank, 2, HIDDEN), torch.tensor([[0, LOCAL], [LOCAL, 2 * LOCAL]]), torch.tensor([[0.5, 0.25], [0.125, 0.75]])
        recv, count, handle, _, _ = comm.dispatch(x, ids, active, TOKENS, LOCAL * 3, 1000, use_fp8=False)
        if active is not None:
            assert ints(active) == [1, 0, 1]
        assert int(count[0]) == 2
        combined = comm.combine(recv, ids, weights, active, 1000, handle)[0]
        assert torch.equal(combined, x * torch.tensor([[0.5], [0.75]], dtype=torch.bfloat16))  # nothing is renormalised

    world.run(body)
    with pytest.raises(EmulatedHang, match=r"for ever for ranks \[1\]"):
        world.run(
            lambda rank: EmulatedMooncakeBuffer(world.group(rank)).dispatch(
                rows(0, 1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64), None, TOKENS, LOCAL * 3, -1
            )
        )


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_a_health_mask_of_another_length_is_not_written(mode: Mode) -> None:
    world = World(2, dead=frozenset({1}))
    active = healthy(3)

    def body(rank: int) -> None:
        comm = EmulatedMooncakeBuffer(world.group(rank), mode=mode)
        comm.dispatch(rows(0, 1, HIDDEN), torch.zeros(1, 1, dtype=torch.int64), active, TOKENS, LOCAL * 2, 1000)

    if mode == "strict":
        with pytest.raises(EmulatedMisuse) as misuse:
            world.run(body)
        assert misuse.value.reason is Reason.HEALTH_MASK
    else:
        world.run(body)
        assert ints(active) == [1, 1, 1]  # the failure is told to nobody


@paths
def test_the_third_dispatch_overwrites_the_first_on_the_fast_path(fallback: bool) -> None:
    world = World(1)

    def body(rank: int) -> None:
        comm = EmulatedMooncakeBuffer(world.group(rank), fallback=fallback)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        results = [
            comm.dispatch(torch.full((1, HIDDEN), value, dtype=torch.bfloat16), ids, None, TOKENS, LOCAL, -1, use_fp8=False)[0] for value in range(3)
        ]
        assert [float(recv[0, 0, 0]) for recv in results] == ([0.0, 1.0, 2.0] if fallback else [2.0, 1.0, 2.0])

    world.run(body)


def test_what_raises() -> None:
    world = World(2)
    x, ids = rows(0, 2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64)

    def body(rank: int) -> None:
        comm = EmulatedMooncakeBuffer(world.group(rank))

        def raised(
            error: type[BaseException], match: str, x: Tensor = x, ids: Tensor = ids, active: Tensor | None = None, tokens: int = TOKENS
        ) -> None:
            with pytest.raises(error, match=match):
                comm.dispatch(x, ids, active, tokens, LOCAL * 2, -1)

        raised(AssertionError, "int64, not", ids=ids.int())
        raised(AssertionError, "bfloat16", x=x.float())
        raised(AssertionError, "multiple of 128", x=rows(0, 2, 64))
        raised(RuntimeError, "hidden is one of", x=rows(0, 2, 128))
        raised(AssertionError, "2 tokens are more than 1", tokens=1)
        raised(AssertionError, "multiple of 4", tokens=3)
        raised(AssertionError, "at most 11", ids=torch.zeros(2, 12, dtype=torch.int64))
        raised(AssertionError, "active_ranks is int32", active=torch.ones(2))
        with pytest.raises(RuntimeError, match="not both"):
            comm.dispatch(x, ids, None, TOKENS, LOCAL * 2, -1, None, async_finish=True, return_recv_hook=True)
        recv, _, handle, _, _ = comm.dispatch(x, ids, None, TOKENS, LOCAL * 2, -1, use_fp8=False)
        with pytest.raises(NotImplementedError):
            comm.combine(recv, ids, torch.ones(2, 1), None, -1, handle, zero_copy=True)
        with pytest.raises(NotImplementedError):
            comm.get_next_combine_buffer(handle)
        with pytest.raises(AssertionError, match="topk_weights is float32"):
            comm.combine(recv, ids, torch.ones(2, 1).double(), None, -1, handle)
        maca = EmulatedMooncakeBuffer(world.group(rank), maca=True)
        with pytest.raises(NotImplementedError, match="MACA"):
            maca.dispatch(x, ids, None, TOKENS, LOCAL * 2, -1, use_fp8=True)
        assert isinstance(maca.dispatch(x, ids, None, TOKENS, LOCAL * 2, -1)[0], Tensor)
        small = EmulatedMooncakeBuffer(world.group(rank), fallback=True).dispatch(rows(0, 1, 128), ids[:1], None, TOKENS, LOCAL * 2, -1)
        assert small[2][3] == 128

    world.run(body)


def test_an_id_past_the_experts() -> None:
    world = World(1)

    def body(rank: int, mode: Mode) -> list[int]:
        comm = EmulatedMooncakeBuffer(world.group(rank), mode=mode)
        return ints(comm.dispatch(rows(0, 2, HIDDEN), torch.tensor([[0], [LOCAL]]), None, TOKENS, LOCAL, -1)[1])

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict"))
    assert misuse.value.reason is Reason.EXPERT_ID
    assert world.run(lambda rank: body(rank, "faithful")) == [[1, 0, 0]]


def test_a_failing_rank_does_not_hang_the_others() -> None:
    world = World(4)

    def body(rank: int) -> None:
        comm = EmulatedMooncakeBuffer(world.group(rank))
        ids = torch.zeros(1, 1, dtype=torch.int32 if rank == 2 else torch.int64)
        comm.dispatch(rows(0, 1, HIDDEN), ids, None, TOKENS, LOCAL * 4, -1)

    with pytest.raises(AssertionError, match="int64, not"):
        world.run(body)

"""Tests of the low-latency methods of the DeepEP emulation."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, assert_layer, idle, routes, rows, worlds
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_low_latency import LowLatencyHandle
from tests.emulation.fp8_cast import cast_fp8, log_format
from tests.emulation.hazards import EmulatedMisuse, EmulatedTrap, Mode, Reason, poison_mask
from tests.emulation.slab_support import positions, run_experts
from tests.emulation.world import EmulatedHang, Group, World
from tests.ops.support import ints

HIDDEN, TOPK, TOKENS = 2048, 3, 8  # 8 tokens are the capacity


def buffer(group: Group, mode: Mode = "strict", *, shrink: bool = False) -> EmulatedBuffer:
    size = EmulatedBuffer.get_low_latency_rdma_size_hint(2 * TOKENS, HIDDEN, group.size(), LOCAL * group.size())
    return EmulatedBuffer(group, num_rdma_bytes=size, low_latency_mode=True, enable_shrink=shrink, mode=mode)


@worlds
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
def test_unweighted_experts_combine_to_the_reference_layer(ranks: int, spread: str) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else TOKENS, HIDDEN)  # exactly full
        ids, weights = routes(rank, x.size(0), TOPK, LOCAL if spread == "one rank" else LOCAL * ranks, dropped=1.0 if spread == "none" else 0.2)
        comm = buffer(world.group(rank))
        recv, count, handle, _, hook = comm.low_latency_dispatch(x, ids, TOKENS, LOCAL * ranks, use_fp8=False)
        assert hook is None
        for index in range(LOCAL):
            assert poison_mask(recv[index, int(count[index]) :]).all()
            assert not torch.isnan(recv[index, : int(count[index])]).any()
        out = torch.empty(x.shape, dtype=torch.bfloat16)
        combined, _, _ = comm.low_latency_combine(run_experts(recv, rank), ids, weights, handle, out=out)
        assert combined is out
        assert_layer(combined, x, ids, weights)

    world.run(body)


@worlds
@pytest.mark.parametrize("form", ["float32", "rounded", "packed"])
def test_fp8_rows_and_scales_arrive_bit_for_bit(ranks: int, form: str) -> None:
    world = World(ranks)
    given = [(rows(rank, 5, HIDDEN), routes(rank, 5, TOPK, LOCAL * ranks)[0]) for rank in range(ranks)]

    def body(rank: int) -> tuple[tuple[Tensor, Tensor], Tensor, LowLatencyHandle]:
        packed = form == "packed"
        recv, count, handle, _, _ = buffer(world.group(rank)).low_latency_dispatch(
            *given[rank], TOKENS, LOCAL * ranks, round_scale=form != "float32", use_ue8m0=packed
        )
        return recv, count, handle

    for rank, ((payload, scale), count, handle) in enumerate(world.run(body)):
        columns = HIDDEN // (512 if form == "packed" else 128)
        assert payload.dtype == torch.float8_e4m3fn
        assert scale.shape == (LOCAL, ranks * TOKENS, columns)
        assert scale.stride() == (columns * ranks * TOKENS, 1, ranks * TOKENS)
        for index in range(LOCAL):
            where = positions(handle[0], handle[1], index)
            sent = {(source, token) for source, (_, ids) in enumerate(given) for token in range(5) if (ids[token] == rank * LOCAL + index).any()}
            assert set(where) == sent
            assert int(count[index]) == len(sent)
            assert poison_mask(scale[index, len(sent) :]).all()
            assert poison_mask(handle[0][index, len(sent) :]).all()
            for (source, token), row in where.items():
                expected, factor = cast_fp8(given[source][0][token : token + 1], round_scale=form != "float32")
                assert_bits(payload[index, row], expected[0])
                if form == "packed":
                    exponents = scale[index, row].contiguous().view(torch.uint8).int()
                    assert torch.equal(torch.exp2(exponents - 127), factor[0])
                else:
                    assert_bits(scale[index, row], factor[0])


def test_the_cast_floors_amax_and_rounds_scales_up() -> None:
    x = torch.zeros(2, 256, dtype=torch.bfloat16)
    x[1, :128], x[1, 128] = 1e-6, 448.0
    payload, scale = cast_fp8(x, round_scale=False)
    assert torch.equal(scale, torch.tensor([[1e-4, 1e-4], [1e-4, 448.0]]) / 448.0)
    assert payload[1, 128].item() == 448.0
    rounded = cast_fp8(torch.tensor([[3.0 * 448] * 128 + [2.0 * 448] * 128], dtype=torch.bfloat16), round_scale=True)[1]
    assert torch.equal(rounded, torch.tensor([[4.0, 2.0]]))


def test_a_rank_without_tokens_takes_part_in_fp8() -> None:
    world = World(2)

    def body(rank: int) -> None:
        comm, x = buffer(world.group(rank)), rows(rank, rank, HIDDEN)  # none, and one
        ids, weights = torch.zeros(rank, 1, dtype=torch.int64), torch.ones(rank, 1)
        _, count, handle, _, _ = comm.low_latency_dispatch(x, ids, TOKENS, LOCAL * 2, round_scale=True, use_ue8m0=True)
        assert ints(count) == ([1, 0, 0] if rank == 0 else [0, 0, 0])
        y = torch.ones((*handle[0].shape, HIDDEN), dtype=torch.bfloat16)
        assert torch.equal(comm.low_latency_combine(y, ids, weights, handle, use_logfmt=True)[0], torch.ones_like(x))

    world.run(body)


def test_the_order_of_rows_is_left_open() -> None:
    def orders(seed: int) -> list[list[int]]:
        world = World(4, seed=seed)

        def body(rank: int) -> list[int]:
            ids = torch.zeros(TOKENS, 1, dtype=torch.int64)
            handle = buffer(world.group(rank)).low_latency_dispatch(rows(rank, TOKENS, HIDDEN), ids, TOKENS, LOCAL * 4)[2]
            return [*ints(handle[1][0] >> 32), *ints(handle[0][0])]

        return world.run(body)

    assert orders(0) == orders(0)
    assert orders(0)[0] != orders(1)[0]
    begins = orders(0)[0][:4]
    assert begins != sorted(begins)  # source ranks are in no order either


@pytest.mark.parametrize("how", ["hook", "event"])
def test_results_are_poison_until_they_are_received(how: str) -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, TOKENS, HIDDEN), routes(rank, TOKENS, TOPK, LOCAL * 2)
        comm = buffer(world.group(rank))
        received, waited = torch.full((LOCAL,), 10, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
        (payload, scale), count, handle, event, hook = comm.low_latency_dispatch(
            x, ids, TOKENS, LOCAL * 2, received, waited, async_finish=how == "event", return_recv_hook=how == "hook"
        )
        for tensor in (payload, scale, count):
            assert poison_mask(tensor).all()
        assert ints(received) == [10] * LOCAL
        receive: Callable[[], None] | None = hook if how == "hook" else event.current_stream_wait
        assert receive is not None
        receive()
        assert torch.equal(received, count + 10)
        assert bool((waited > 0).all())
        assert not torch.isnan(payload[0, : int(count[0])].float()).any()
        y = torch.zeros(payload.shape, dtype=torch.bfloat16)
        combined, event, hook = comm.low_latency_combine(y, ids, weights, handle, async_finish=how == "event", return_recv_hook=how == "hook")
        assert torch.isnan(combined).all()
        receive = hook if how == "hook" else event.current_stream_wait
        assert receive is not None
        receive()
        assert not combined.any()

    world.run(body)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_the_third_dispatch_overwrites_the_first(mode: Mode) -> None:
    world = World(1)

    def body(rank: int) -> None:
        comm = buffer(world.group(rank), mode)
        ids, weights = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        results = [
            comm.low_latency_dispatch(torch.full((2, HIDDEN), value, dtype=torch.bfloat16), ids, TOKENS, LOCAL, use_fp8=False) for value in range(3)
        ]
        assert [float(recv[0, 0, 0]) for recv, *_ in results] == [2.0, 1.0, 2.0]
        (first, _, handle, _, _), (second, _, next_handle, _, _), _ = results
        assert torch.equal(comm.low_latency_combine(second, ids, weights, next_handle)[0], torch.ones(2, HIDDEN, dtype=torch.bfloat16))
        if mode == "strict":
            with pytest.raises(EmulatedMisuse) as misuse:
                comm.low_latency_combine(first, ids, weights, handle)
            assert misuse.value.reason is Reason.STALE_HANDLE
        else:
            assert torch.equal(comm.low_latency_combine(first, ids, weights, handle)[0], torch.full((2, HIDDEN), 2.0, dtype=torch.bfloat16))

    world.run(body)


def test_a_combine_with_other_ids_finds_rows_that_never_came() -> None:
    world = World(1)

    def body(rank: int) -> Tensor:
        comm = buffer(world.group(rank))
        ids, weights = torch.tensor([[0], [1]]), torch.ones(2, 1)
        recv, _, handle, _, _ = comm.low_latency_dispatch(rows(rank, 2, HIDDEN), ids, TOKENS, LOCAL, use_fp8=False)
        return comm.low_latency_combine(recv, torch.tensor([[0], [2]]), weights, handle)[0]

    assert [bool(torch.isnan(row).any()) for row in world.run(body)[0].unbind()] == [False, True]


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_zero_copy_sends_the_registered_buffer(mode: Mode) -> None:
    world = World(1)

    def body(rank: int) -> None:
        comm = buffer(world.group(rank), mode)
        x, ids, weights = rows(rank, 2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1)
        recv, _, handle, _, _ = comm.low_latency_dispatch(x, ids, TOKENS, LOCAL, use_fp8=False)
        registered = comm.get_next_low_latency_combine_buffer(handle)
        assert registered.shape == recv.shape
        assert not registered.is_contiguous()
        registered.copy_(recv * 2)
        assert torch.equal(comm.low_latency_combine(registered, ids, weights, handle, zero_copy=True)[0], x * 2)
        if mode == "strict":
            with pytest.raises(EmulatedMisuse) as misuse:
                comm.low_latency_combine(recv, ids, weights, handle, zero_copy=True)
            assert misuse.value.reason is Reason.FOREIGN_BUFFER
        else:
            assert torch.equal(comm.low_latency_combine(recv, ids, weights, handle, zero_copy=True)[0], x * 2)

    world.run(body)


def test_log_format_is_lossy_by_less_than_its_step() -> None:
    x = rows(0, 4, HIDDEN)
    error = (log_format(x).float() - x.float()).abs() / x.float().abs().clamp(min=1e-6)
    assert 0 < float(error.max()) < 2 ** (32 / 510) - 1 + 2**-8
    world = World(1)

    def body(rank: int) -> None:
        comm = buffer(world.group(rank))
        ids, weights = torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
        recv, _, handle, _, _ = comm.low_latency_dispatch(x, ids, TOKENS, LOCAL, use_fp8=False)
        assert torch.equal(comm.low_latency_combine(recv, ids, weights, handle, use_logfmt=True)[0], log_format(x))

    world.run(body)


def test_what_the_host_checks_raise() -> None:
    world = World(2)

    def raised(match: str, error: type[BaseException] = RuntimeError, **changes: object) -> None:
        def body(rank: int) -> None:
            x, ids = changes.get("x", rows(0, 2, HIDDEN)), changes.get("ids", torch.zeros(2, 1, dtype=torch.int64))
            assert isinstance(x, Tensor)
            assert isinstance(ids, Tensor)
            tokens = int(str(changes.get("tokens", TOKENS)))
            comm = buffer(world.group(rank)) if "plain" not in changes else EmulatedBuffer(world.group(rank))
            stats = torch.zeros(LOCAL, dtype=torch.int64) if "stats" in changes else None
            comm.low_latency_dispatch(x, ids, tokens, int(str(changes.get("experts", LOCAL * 2))), stats, use_ue8m0="ue8m0" in changes)

        with pytest.raises(error, match=match):
            world.run(body)

    raised("bfloat16", x=torch.zeros(2, HIDDEN))
    raised("hidden is one of", x=rows(0, 2, 1024))
    raised("int64, not torch.int32", ids=torch.zeros(2, 1, dtype=torch.int32))
    raised("at most 11 routes", ids=torch.zeros(2, 12, dtype=torch.int64))
    raised("9 tokens are more than 8", x=rows(0, 9, HIDDEN), ids=torch.zeros(9, 1, dtype=torch.int64))
    raised("7 experts over 2 ranks", experts=7)
    raised("multiple of 4", tokens=3)
    raised("needs round_scale", ue8m0=True)
    raised("statistics", stats=True)
    raised("low_latency_mode", plain=True)


def test_traps_and_hangs() -> None:
    world = World(2)
    ids = torch.zeros(2, 1, dtype=torch.int64)

    def few_queues(rank: int) -> None:
        comm = EmulatedBuffer(world.group(rank), num_rdma_bytes=128 * 10**6, low_latency_mode=True, num_qps_per_rank=2)
        comm.low_latency_dispatch(rows(rank, 2, HIDDEN), ids, TOKENS, LOCAL * 2)

    with pytest.raises(EmulatedTrap, match="num_qps_per_rank 2"):
        world.run(few_queues)

    def unequal(rank: int, mode: Mode) -> None:
        buffer(world.group(rank), mode).low_latency_dispatch(rows(rank, 2, HIDDEN), ids, (8, 4)[rank], LOCAL * 2)

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: unequal(rank, "strict"))
    assert misuse.value.reason is Reason.UNEQUAL_ACROSS_RANKS
    with pytest.raises(EmulatedHang):
        world.run(lambda rank: unequal(rank, "faithful"))


def test_an_id_past_the_experts() -> None:
    world = World(1)

    def body(rank: int, mode: Mode) -> list[int]:
        return ints(buffer(world.group(rank), mode).low_latency_dispatch(rows(0, 2, HIDDEN), torch.tensor([[0], [LOCAL]]), TOKENS, LOCAL)[1])

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict"))
    assert misuse.value.reason is Reason.EXPERT_ID
    assert world.run(lambda rank: body(rank, "faithful")) == [[1, 0, 0]]


def test_a_masked_rank_is_left_out() -> None:
    world = World(2)

    def body(rank: int) -> None:
        comm = buffer(world.group(rank), shrink=True)
        if rank == 0:
            comm.low_latency_update_mask_buffer(1, mask=True)
        status = torch.zeros(2, dtype=torch.int32)
        comm.low_latency_query_mask_buffer(status)
        assert ints(status) == ([0, 1] if rank == 0 else [0, 0])
        x, ids, weights = rows(rank, 2, HIDDEN), torch.tensor([[0, LOCAL]] * 2), torch.tensor([[0.5, 0.25]] * 2)
        recv, count, handle, _, _ = comm.low_latency_dispatch(x, ids, TOKENS, LOCAL * 2, use_fp8=False)
        assert int(count[0]) == 2  # those of the rank itself
        combined = comm.low_latency_combine(recv, ids, weights, handle)[0]
        if rank == 0:
            assert torch.equal(combined, x * 0.5)  # nothing is renormalised
        comm.low_latency_clean_mask_buffer()

    world.run(body)
    with pytest.raises(RuntimeError, match="enable_shrink"):
        world.run(lambda rank: buffer(world.group(rank)).low_latency_clean_mask_buffer())

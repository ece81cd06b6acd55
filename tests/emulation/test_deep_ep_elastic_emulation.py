"""Tests of the emulation of DeepEP's ElasticBuffer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, assert_layer, expert, idle, local_layer, ranks_of, routes, rows, same_rows, worlds
from tests.emulation.deep_ep_elastic import EmulatedElasticBuffer, Rows
from tests.emulation.elastic import EPHandle, align
from tests.emulation.events import EventHandle, EventOverlap
from tests.emulation.hazards import EmulatedMisuse, EmulatedTrap, Mode, Reason, poison_mask
from tests.emulation.world import Group, World
from tests.ops.support import ints

HIDDEN, TOPK, TOKENS, ALIGNMENT = 64, 3, 6, 8


def buffer(group: Group, mode: Mode = "strict", *, deterministic: bool = False) -> EmulatedElasticBuffer:
    return EmulatedElasticBuffer(group, num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, deterministic=deterministic, mode=mode)


def groups(handle: EPHandle) -> list[range]:
    """Return the rows of each local expert by the expanded meaning of psum."""
    begins = [0, *(align(end, handle.expert_alignment) for end in ints(handle.psum_num_recv_tokens_per_expert))]
    return [range(begin, end) for begin, end in zip(begins, ints(handle.psum_num_recv_tokens_per_expert), strict=False)]


def run_expanded(x: Tensor, weights: Tensor, handle: EPHandle, rank: int) -> Tensor:
    """Return weighted rows of the experts, and NaN in the padding."""
    made = torch.full(x.shape, torch.nan)
    for index, group in enumerate(groups(handle)):
        for row in group:
            made[row] = weights[row] * expert(x[row], rank * LOCAL + index)
    return made.to(torch.bfloat16)


@worlds
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("expand", [True, False])
def test_a_layer_of_weighted_experts_is_the_reference_layer(ranks: int, spread: str, exact: bool, expand: bool) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else TOKENS, HIDDEN)
        ids, weights = routes(rank, x.size(0), TOPK, LOCAL if spread == "one rank" else LOCAL * ranks, dropped=1.0 if spread == "none" else 0.2)
        comm = buffer(world.group(rank))
        recv, local_ids, local_weights, handle, _ = comm.dispatch(
            x, ids, weights, num_experts=LOCAL * ranks, expert_alignment=ALIGNMENT, do_cpu_sync=exact, do_expand=expand
        )
        assert isinstance(recv, Tensor)
        assert local_weights is not None
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        if expand:
            assert local_ids is None
            assert local_weights.shape == (recv.size(0),)
            made = run_expanded(recv, local_weights, handle, rank)
        else:
            assert local_ids is not None
            assert recv.size(0) == (count if exact else ranks * TOKENS)
            made = torch.full(recv.shape, torch.nan, dtype=torch.bfloat16)
            made[:count] = local_layer(recv[:count], local_ids[:count], local_weights[:count], rank * LOCAL).to(torch.bfloat16)
        combined, none, _ = comm.combine(made, handle)
        assert none is None
        assert_layer(combined, x, ids, weights, roundings=3 if expand else 2)

    world.run(body)


@worlds
@pytest.mark.parametrize("expand", [True, False])
def test_identity_experts_give_a_plain_sum(ranks: int, expand: bool) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, TOKENS, HIDDEN), routes(rank, TOKENS, TOPK, LOCAL * ranks)
        comm = buffer(world.group(rank))
        recv, _, local_weights, handle, _ = comm.dispatch(x, ids, weights, num_experts=LOCAL * ranks, do_expand=expand)
        assert isinstance(recv, Tensor)
        combined, total, _ = comm.combine(recv, handle, topk_weights=local_weights, bias=(x, x))
        copies = (ids >= 0).sum(1) if expand else ranks_of(ids, LOCAL)
        torch.testing.assert_close(combined.float(), x.float() * (copies.unsqueeze(1) + 2), rtol=1e-2, atol=1e-2)
        assert total is not None
        expected = torch.where(ids >= 0, weights, 0.0) if expand else weights * ranks_of(ids, LOCAL).unsqueeze(1)
        torch.testing.assert_close(total, expected)

    world.run(body)


def test_each_level_of_a_sum_is_rounded_to_bf16() -> None:
    world = World(2)
    values = torch.tensor([1.0, 2**-8, 2**-8, 2**-8])  # 1 + 2^-8 is a tie of bf16, and goes down to 1

    def body(rank: int) -> Tensor:
        comm = buffer(world.group(rank))
        x = torch.ones((1, HIDDEN), dtype=torch.bfloat16)
        recv, _, weights, handle, _ = comm.dispatch(x, torch.tensor([[0, 1, 3, 4]]), values.unsqueeze(0), num_experts=6, do_expand=True)
        assert isinstance(recv, Tensor)
        assert weights is not None
        return comm.combine((recv * weights.unsqueeze(1)).to(torch.bfloat16), handle)[0][0, 0]

    in_one = (values.sum()).to(torch.bfloat16)
    by_rank = (values[:2].sum().to(torch.bfloat16) + values[2:].sum().to(torch.bfloat16)).float().to(torch.bfloat16)
    assert not torch.equal(in_one, by_rank)
    assert all(torch.equal(found, by_rank) for found in world.run(body))


@worlds
@pytest.mark.parametrize("column_major", [True, False])
def test_bytes_arrive_with_their_origin(ranks: int, column_major: bool) -> None:
    world = World(ranks)
    payloads = [rows(rank, 5, HIDDEN).to(torch.float8_e4m3fn) for rank in range(ranks)]
    scales = [torch.arange(10 * rank, 10 * rank + 10, dtype=torch.int32).view(2, 5).t() for rank in range(ranks)]
    given = [routes(rank, 5, TOPK, LOCAL * ranks) for rank in range(ranks)]

    def body(rank: int) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        ids, weights = given[rank]
        scaled = (payloads[rank], scales[rank])
        return buffer(world.group(rank)).dispatch(scaled, ids, weights, num_experts=LOCAL * ranks, use_tma_aligned_col_major_sf=column_major)

    for rank, (recv, ids, weights, handle, _) in enumerate(world.run(body)):
        assert isinstance(recv, tuple)
        assert ids is not None
        assert weights is not None
        payload, scale = recv
        count = payload.size(0)
        assert scale.stride() == ((1, align(count, 4)) if column_major else (2, 1))
        places = ints(handle.recv_src_metadata[:, 0])
        assert [place // TOKENS for place in places] == sorted(place // TOKENS for place in places)  # by rank
        going = [int(((peer_ids // LOCAL == rank) & (peer_ids >= 0)).any(1).sum()) for peer_ids, _ in given]
        assert ints(handle.psum_num_recv_tokens_per_scaleup_rank) == ints(torch.tensor(going).cumsum(0))
        for row, place in enumerate(places):
            source, token = divmod(place, TOKENS)
            assert_bits(payload[row], payloads[source][token])
            assert_bits(scale[row], scales[source][token])
            sent = given[source][0][token]
            assert ints(ids[row]) == ints(torch.where((sent >= 0) & (sent // LOCAL == rank), sent - rank * LOCAL, -1))
            assert_bits(weights[row], given[source][1][token])  # not masked


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("zero_padding", [True, False])
def test_expanded_groups_are_aligned_and_padded(exact: bool, zero_padding: bool) -> None:
    world = World(2)
    given = [routes(rank, TOKENS, TOPK, LOCAL * 2) for rank in range(2)]

    def body(rank: int) -> None:
        scaled = (rows(rank, TOKENS, HIDDEN).to(torch.float8_e4m3fn), torch.ones(TOKENS, 2))
        stats = torch.full((LOCAL,), 5, dtype=torch.int32)
        recv, _, weights, handle, _ = buffer(world.group(rank)).dispatch(
            scaled,
            *given[rank],
            stats,
            LOCAL * 2,
            expert_alignment=ALIGNMENT,
            do_expand=True,
            do_cpu_sync=exact,
            do_zero_padding=zero_padding,
        )
        counts = [sum(int((ids == rank * LOCAL + index).sum()) for ids, _ in given) for index in range(LOCAL)]
        assert ints(handle.num_unaligned_recv_tokens_per_expert) == counts
        assert ints(stats) == [count + 5 for count in counts]
        assert handle.num_recv_tokens_per_expert_list == ([align(count, ALIGNMENT) for count in counts] if exact else [])
        assert [len(group) for group in groups(handle)] == counts
        assert isinstance(recv, tuple)
        assert weights is not None
        used = sum(align(count, ALIGNMENT) for count in counts)
        capacity = align(2 * TOKENS * min(TOPK, LOCAL) + (ALIGNMENT - 1) * LOCAL, ALIGNMENT)
        assert recv[0].size(0) == handle.num_expanded_tokens == (used if exact else capacity)
        live = {row for group in groups(handle) for row in group}
        for row in range(recv[0].size(0)):
            for tensor in (recv[0][row], recv[1][row], weights[row]):
                if row in live:
                    assert not poison_mask(tensor).any()
                elif zero_padding and row < used:
                    assert not tensor.float().any()
                else:
                    assert poison_mask(tensor).all()

    world.run(body)


def test_plain_psum_has_the_alignment_in_it_and_tails_are_poison() -> None:
    world = World(2)
    given = [routes(rank, 3, TOPK, LOCAL * 2) for rank in range(2)]

    def body(rank: int) -> None:
        comm = buffer(world.group(rank))
        recv, ids, weights, handle, _ = comm.dispatch(
            rows(rank, 3, HIDDEN), *given[rank], num_experts=LOCAL * 2, expert_alignment=ALIGNMENT, do_cpu_sync=False
        )
        counts = [sum(int((peer == rank * LOCAL + index).sum()) for peer, _ in given) for index in range(LOCAL)]
        assert ints(handle.psum_num_recv_tokens_per_expert) == ints(torch.tensor([align(count, ALIGNMENT) for count in counts]).cumsum(0))
        assert poison_mask(handle.num_unaligned_recv_tokens_per_expert).all()
        count = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
        for tensor in (recv, ids, weights, handle.recv_src_metadata):
            assert isinstance(tensor, Tensor)
            assert tensor.size(0) == 2 * TOKENS
            assert poison_mask(tensor[count:]).all()
            assert not poison_mask(tensor[:count, 0]).any()

    world.run(body)


def test_slot_order_is_left_open_unless_deterministic() -> None:
    def orders(seed: int, *, deterministic: bool) -> list[list[int]]:
        world = World(2, seed=seed)
        ids = torch.zeros(TOKENS, 1, dtype=torch.int64)
        return world.run(
            lambda rank: ints(
                buffer(world.group(rank), deterministic=deterministic)
                .dispatch(rows(rank, TOKENS, HIDDEN), ids, num_experts=LOCAL * 2)[3]
                .recv_src_metadata[:, 0]
            )
        )

    assert orders(0, deterministic=True) == orders(1, deterministic=True) == [list(range(2 * TOKENS)), []]
    assert orders(0, deterministic=False) == orders(0, deterministic=False) != orders(1, deterministic=False)


@pytest.mark.parametrize("expand", [True, False])
def test_a_handle_moves_other_rows_in_the_same_way(expand: bool) -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, TOKENS, HIDDEN), routes(rank, TOKENS, TOPK, LOCAL * 2)
        comm = buffer(world.group(rank))
        recv, _, _, handle, _ = comm.dispatch(x, ids, weights, num_experts=LOCAL * 2, do_expand=expand)
        ids.fill_(-1)  # the handle has a copy
        again, _, _, same, _ = comm.dispatch(-x, handle=handle, num_experts=LOCAL * 2)
        assert same is handle
        assert isinstance(recv, Tensor)
        assert isinstance(again, Tensor)
        assert torch.equal(again, -recv)
        assert torch.equal(comm.combine(again, handle)[0], -comm.combine(recv, handle)[0])

    world.run(body)


def test_without_a_copy_the_handle_follows_the_callers_ids() -> None:
    world = World(1)
    ids = torch.zeros(2, 1, dtype=torch.int64)
    (result,) = world.run(lambda rank: buffer(world.group(rank)).dispatch(rows(0, 2, HIDDEN), ids, num_experts=LOCAL, do_handle_copy=False))
    assert result[3].topk_idx is ids


def test_asynchronous_results_are_poison_until_the_event() -> None:
    world = World(1)

    def body(rank: int) -> None:
        x, ids = rows(rank, 2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64)
        comm = buffer(world.group(rank))
        recv, _, _, handle, event = comm.dispatch(x, ids, num_experts=LOCAL, async_with_compute_stream=True)
        assert isinstance(recv, Tensor)
        assert poison_mask(recv).all()
        called: list[int] = []
        event.register_hook_after_wait(lambda: called.append(1))
        event.current_stream_wait(release_handle=True)
        assert called == [1]
        assert event.event is None
        assert same_rows(recv, x)
        assert torch.isnan(comm.combine(recv, handle, async_with_compute_stream=True)[0]).all()

    world.run(body)


def test_what_raises() -> None:
    world = World(2)
    x, ids = rows(0, 2, HIDDEN), torch.zeros(2, 1, dtype=torch.int64)

    def body(rank: int) -> None:
        comm = buffer(world.group(rank))
        handle = comm.dispatch(x, ids, num_experts=LOCAL * 2)[3]
        with pytest.raises(TypeError, match="even with a handle"):
            comm.dispatch(x, handle=handle)
        comm.dispatch(x, handle=handle, num_sms=4)
        with pytest.raises(AssertionError, match="its ids"):
            comm.dispatch(x, ids, handle=handle, num_experts=LOCAL * 2)
        with pytest.raises(AssertionError, match="expert_alignment"):
            comm.dispatch(x, handle=handle, num_experts=LOCAL * 2, expert_alignment=2)
        with pytest.raises(RuntimeError, match="int64, not"):
            comm.dispatch(x, ids.int(), num_experts=LOCAL * 2)
        with pytest.raises(RuntimeError, match="4 bytes"):
            comm.dispatch((x, torch.ones(2, 1, dtype=torch.uint8)), ids, num_experts=LOCAL * 2)
        with pytest.raises(RuntimeError, match="7 tokens are more than 6"):
            comm.dispatch(rows(0, 7, HIDDEN), torch.zeros(7, 1, dtype=torch.int64), num_experts=LOCAL * 2)
        with pytest.raises(RuntimeError, match="do_zero_padding"):
            comm.dispatch(x, ids, num_experts=LOCAL * 2, do_zero_padding=True)
        with pytest.raises(RuntimeError, match="allocate_on_comm_stream"):
            comm.dispatch(x, ids, num_experts=LOCAL * 2, previous_event=EventHandle())
        with pytest.raises(TypeError, match="not EventOverlap"):
            comm.dispatch(x, ids, num_experts=LOCAL * 2, previous_event=EventOverlap())  # type: ignore[call-overload]
        with pytest.raises(EmulatedTrap, match="twice"):
            comm.dispatch(x, torch.zeros(2, 2, dtype=torch.int64), num_experts=LOCAL * 2)
        with pytest.raises(RuntimeError, match="x has 1 rows and 4 were received" if rank == 0 else "x has 1 rows and 0"):
            comm.combine(x[:1], handle)

    world.run(body)
    with pytest.raises(AssertionError, match="num_bytes"):
        EmulatedElasticBuffer(world.group(0))


def test_an_id_past_the_experts() -> None:
    world = World(1)

    def body(rank: int, mode: Mode) -> int:
        recv = buffer(world.group(rank), mode).dispatch(rows(0, 2, HIDDEN), torch.tensor([[0], [LOCAL]]), num_experts=LOCAL)[0]
        return len(recv)

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict"))
    assert misuse.value.reason is Reason.EXPERT_ID
    assert world.run(lambda rank: body(rank, "faithful")) == [1]


def test_a_handle_of_another_dispatch_is_not_seen() -> None:
    world = World(1)

    def body(rank: int) -> Tensor:
        comm, x = buffer(world.group(rank)), rows(rank, 2, HIDDEN)
        recv, _, _, handle, _ = comm.dispatch(x, torch.tensor([[0], [-1]]), num_experts=LOCAL)
        other = replace(handle, recv_src_metadata=handle.recv_src_metadata + 1)
        assert isinstance(recv, Tensor)
        return comm.combine(recv, other)[0]

    (combined,) = world.run(body)
    assert torch.equal(combined[1], rows(0, 2, HIDDEN)[0])

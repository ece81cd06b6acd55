"""Tests of the emulation of MoRI v1: what arrives, where, and what combine makes of it."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, assert_layer, idle, local_layer, ranks_of, routes, rows, worlds
from tests.emulation.hazards import EmulatedMisuse, Mode, Reason, poison_mask
from tests.emulation.mori import Dispatched, EmulatedDispatchCombineOp
from tests.emulation.mori_config import KERNELS, EpDispatchRoutingHandle
from tests.emulation.mori_config import EpDispatchCombineKernelType as Kernel
from tests.emulation.mori_support import HIDDEN, TOKENS, TOPK, make
from tests.emulation.world import World
from tests.ops.support import int_rows, ints


def run_experts(dispatched: Dispatched, rank: int, count: int) -> Tensor:
    """Return weighted rows, summed over the experts of the rank, and NaN past the count."""
    out, weights, _, ids, _ = dispatched
    made = torch.full(out.shape, torch.nan, dtype=torch.bfloat16)
    local = torch.where(ids[:count] // LOCAL == rank, ids[:count] - rank * LOCAL, -1)
    made[:count] = local_layer(out[:count], local, weights[:count], rank * LOCAL).to(torch.bfloat16)
    return made


@worlds
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
def test_a_layer_of_weighted_experts_is_the_reference_layer(ranks: int, spread: str) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else TOKENS, HIDDEN)  # exactly full
        experts = LOCAL if spread == "one rank" else LOCAL * ranks
        ids, weights = routes(rank, x.size(0), TOPK, experts, torch.int32, dropped=1.0 if spread == "none" else 0.2)
        op = make(world.group(rank))
        received = op.dispatch(x, weights, None, ids)
        count = int(received[4])
        combined, none = op.combine(run_experts(received, rank, count), None, ids)
        assert none is None
        assert combined.shape == (TOKENS, HIDDEN)
        assert poison_mask(combined[x.size(0) :]).all()
        assert_layer(combined[: x.size(0)], x, ids, weights)

    world.run(body)


@worlds
def test_identity_experts_give_the_number_of_ranks_times_the_row(ranks: int) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, TOKENS, HIDDEN), routes(rank, TOKENS, TOPK, LOCAL * ranks, torch.int32)
        op = make(world.group(rank))
        out, out_weights, _, _, total = op.dispatch(x, weights, None, ids)
        assert int(total) == op.get_dispatch_src_token_pos().numel()
        combined, total_weights = op.combine(out, out_weights, ids)
        copies = ranks_of(ids, LOCAL).unsqueeze(1)
        assert torch.equal(combined, (x.float() * copies).to(torch.bfloat16))
        assert total_weights is not None
        torch.testing.assert_close(total_weights, weights * copies)

    world.run(body)


PAYLOADS = [
    pytest.param(torch.float8_e4m3fn, torch.float32, 2, id="fp8, fp32 scales"),
    pytest.param(torch.float8_e4m3fnuz, torch.float8_e8m0fnu, 2, id="mxfp8"),
    pytest.param(torch.float4_e2m1fn_x2, torch.float8_e8m0fnu, 2, id="fp4"),
    pytest.param(torch.bfloat16, None, 0, id="bf16"),
]


@worlds
@pytest.mark.parametrize(("dtype", "scale_dtype", "scale_dim"), PAYLOADS)
def test_bytes_arrive_in_an_order_that_is_told(ranks: int, dtype: torch.dtype, scale_dtype: torch.dtype | None, scale_dim: int) -> None:
    world = World(ranks)
    columns = HIDDEN // 2 if dtype == torch.float4_e2m1fn_x2 else HIDDEN
    generator = torch.Generator().manual_seed(0)

    def noise(width: int, of: torch.dtype) -> Tensor:
        return torch.randint(0, 256, (5, width * of.itemsize), generator=generator, dtype=torch.uint8).view(of)

    payloads = [noise(columns, dtype) for _ in range(ranks)]
    scales = [None if scale_dtype is None else noise(scale_dim, scale_dtype) for _ in range(ranks)]
    given = [routes(rank, 5, TOPK, LOCAL * ranks, torch.int32) for rank in range(ranks)]

    def body(rank: int) -> tuple[Dispatched, Tensor, EmulatedDispatchCombineOp]:
        size = 1 if scale_dtype is None else scale_dtype.itemsize
        op = make(world.group(rank), scale_dim=scale_dim, scale_type_size=size)
        return op.dispatch(payloads[rank], given[rank][1], scales[rank], given[rank][0]), op.get_dispatch_src_token_pos(), op

    for rank, ((out, weights, out_scales, ids, total), places, op) in enumerate(world.run(body)):
        origins = [op.decode_send_flat_idx(place) for place in ints(places)]
        sent = {(source, token) for source in range(ranks) for token in range(5) if ((given[source][0][token] // LOCAL) == rank).any()}
        assert set(origins) == sent
        assert int(total) == len(origins) == len(sent)
        assert out.dtype == dtype
        assert out.shape == (ranks * TOKENS, columns)
        for tensor in (out, weights, ids, *(() if out_scales is None else (out_scales,))):
            assert poison_mask(tensor[len(sent) :]).all()
        for row, (source, token) in enumerate(origins):
            assert_bits(out[row], payloads[source][token])
            assert_bits(weights[row], given[source][1][token])
            assert_bits(ids[row], given[source][0][token])  # global, and those of other ranks too
            scale = scales[source]
            assert (out_scales is None) == (scale is None)
            if out_scales is not None and scale is not None:
                assert_bits(out_scales[row], scale[token])


def test_the_order_of_arrival_is_left_open() -> None:
    def places(seed: int) -> list[int]:
        world = World(1, seed=seed)

        def body(rank: int) -> list[int]:
            op = make(world.group(rank))
            op.dispatch(rows(rank, TOKENS, HIDDEN), None, None, torch.zeros(TOKENS, TOPK, dtype=torch.int32))
            return ints(op.get_dispatch_src_token_pos())

        return world.run(body)[0]

    assert places(0) == places(0)
    assert sorted(places(0)) == list(range(TOKENS))
    assert len({tuple(places(seed)) for seed in range(4)}) > 1


def test_results_are_overwritten_by_the_next_call_and_the_count_becomes_zero() -> None:
    world = World(1)

    def body(rank: int) -> None:
        op = make(world.group(rank))
        ids = torch.zeros(2, TOPK, dtype=torch.int32)
        first, weights, _, _, total = op.dispatch(torch.ones(2, HIDDEN), torch.ones(2, TOPK), None, ids)
        assert int(total) == 2
        combined, _ = op.combine(first.clone(), None, ids)
        assert int(total) == 0
        again = op.dispatch(torch.full((1, HIDDEN), 7.0), None, None, ids[:1])
        assert again[0].data_ptr() == first.data_ptr()
        assert float(first[0, 0]) == 7.0
        assert poison_mask(first[1:]).all()
        assert poison_mask(weights).all()  # none were given this time
        op.combine(again[0] * 2, None, ids[:1])
        assert float(combined[0, 0]) == 14.0
        assert poison_mask(combined[1:]).all()

    world.run(body)


def test_a_routing_handle_replays_a_layout_and_keeps_its_count() -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, 4, HIDDEN), routes(rank, 4, TOPK, LOCAL * 2, torch.int32)
        op = make(world.group(rank))
        out, _, _, _, total, routing = op.dispatch(x, weights, None, ids, return_routing=True)
        count = int(total)
        before = out[:count].clone()
        op.dispatch(rows(9, 6, HIDDEN), None, None, routes(9, 6, TOPK, LOCAL * 2, torch.int32)[0])
        routing = EpDispatchRoutingHandle.from_tensors(routing.tensors(), routing.cur_rank_num_token)
        again, _, _, _, total = op.dispatch(-x, weights, None, ids, routing=routing)
        assert total is routing.total_recv_token_num
        assert_bits(again[:count], -before)
        combined, _ = op.combine(again, None, ids, routing=routing)
        assert int(total) == count
        assert torch.equal(combined[:4], (-x.float() * ranks_of(ids, LOCAL).unsqueeze(1)).to(torch.bfloat16))
        with pytest.raises(ValueError, match="is of 4 tokens, not 3"):
            op.dispatch(x[:3], None, None, ids[:3], routing=routing)
        with pytest.raises(ValueError, match="no tokens"):
            op.dispatch(x, None, None, ids, routing=replace(routing, cur_rank_num_token=0))
        for kernel in KERNELS:
            if kernel not in (Kernel.IntraNode, Kernel.InterNodeV1):
                with pytest.raises(NotImplementedError, match=kernel.name):
                    make(world.group(rank), kernel_type=kernel).dispatch(x, weights, None, ids, return_routing=True)

    world.run(body)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_negative_ids_by_kernel(kernel: Kernel) -> None:
    world = World(2)
    truncates = kernel in (Kernel.InterNode, Kernel.AsyncLL)

    def body(rank: int, mode: Mode, local: int) -> tuple[int, list[list[int]]]:
        op = make(world.group(rank), mode, kernel_type=kernel, num_experts_per_rank=local, num_experts_per_token=2)
        ids = torch.tensor([[-1, 2 * local - 1], [-1, -local]], dtype=torch.int32)
        result = op.dispatch(rows(rank, 2, HIDDEN), torch.ones(2, 2), None, ids)
        if kernel == Kernel.AsyncLL:
            op.dispatch_recv()
        return int(result[4]), int_rows(result[3][: int(result[4])])

    assert [count for count, _ in world.run(lambda rank: body(rank, "strict", 1))] == [0, 2]
    if not truncates:
        assert [count for count, _ in world.run(lambda rank: body(rank, "strict", LOCAL))] == [0, 2]
        return
    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict", LOCAL))
    assert misuse.value.reason is Reason.EXPERT_ID
    counts = world.run(lambda rank: body(rank, "faithful", LOCAL))
    assert [count for count, _ in counts] == [4, 2]
    assert all(-1 in ids for ids in counts[0][1])


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_ids_past_the_experts_are_dropped(mode: Mode) -> None:
    world = World(1)
    ids = torch.tensor([[0, LOCAL, -1], [LOCAL, -1, -1]], dtype=torch.int32)
    if mode == "strict":
        with pytest.raises(EmulatedMisuse) as misuse:
            world.run(lambda rank: make(world.group(rank)).dispatch(rows(rank, 2, HIDDEN), None, None, ids))
        assert misuse.value.reason is Reason.EXPERT_ID
    else:
        assert world.run(lambda rank: int(make(world.group(rank), mode).dispatch(rows(rank, 2, HIDDEN), None, None, ids)[4])) == [1]

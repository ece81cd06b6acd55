"""Tests of the emulation of MoRI v2."""

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, assert_layer, idle, local_layer, ranks_of, routes, rows, worlds
from tests.emulation.hazards import EmulatedMisuse, Mode, Reason, poison_mask
from tests.emulation.mori_v2 import EmulatedCommunicator, EmulatedDispatchCombineOpV2
from tests.emulation.mori_v2_config import EpDispatchCombineConfigV2, EpDispatchRoutingHandleV2
from tests.emulation.world import Group, World
from tests.ops.support import int_rows, ints

HIDDEN, TOPK, TOKENS = 64, 3, 6


def make(group: Group, mode: Mode = "strict", **changes: object) -> EmulatedDispatchCombineOpV2:
    base = EpDispatchCombineConfigV2(group.rank(), group.size(), HIDDEN, TOKENS, LOCAL, TOPK)
    for name, value in changes.items():
        setattr(base, name, value)
    base.__post_init__()
    return EmulatedDispatchCombineOpV2(base, EmulatedCommunicator(group), mode=mode, gfx="gfx950")


@worlds
@pytest.mark.parametrize("spread", ["all", "idle", "none", "one rank"])
@pytest.mark.parametrize("staged", [True, False])
def test_a_layer_of_weighted_experts_is_the_reference_layer(ranks: int, spread: str, staged: bool) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x = rows(rank, idle(rank) if spread == "idle" else TOKENS, HIDDEN)  # exactly full
        experts = LOCAL if spread == "one rank" else LOCAL * ranks
        ids, weights = routes(rank, x.size(0), TOPK, experts, torch.int32, dropped=1.0 if spread == "none" else 0.2)
        with make(world.group(rank)) as op:
            out, out_weights, scales, out_ids, total, routing = op.dispatch(x, weights, None, ids, return_routing=True)
            assert scales is None
            count = int(total)
            for tensor in (out, out_weights, out_ids):
                assert tensor.size(0) == ranks * TOKENS
                assert poison_mask(tensor[count:]).all()
            made = op.combine_in_view() if staged else torch.empty_like(out)
            made.fill_(torch.nan)
            local = torch.where(out_ids[:count] // LOCAL == rank, out_ids[:count] - rank * LOCAL, -1)
            made[:count] = local_layer(out[:count], local, out_weights[:count], rank * LOCAL).to(torch.bfloat16)
            combined, none = op.combine(made, routing=routing)
            assert none is None
            assert combined.shape == x.shape  # exact, unlike v1
            assert_layer(combined, x, ids, weights)
            assert int(total) == count

    world.run(body)


@worlds
def test_identity_experts_give_the_number_of_ranks_times_the_row(ranks: int) -> None:
    world = World(ranks)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, 4, HIDDEN), routes(rank, 4, TOPK, LOCAL * ranks, torch.int32)
        op = make(world.group(rank))
        out, _, _, _, _, routing = op.dispatch(x, weights, None, ids, return_routing=True)
        asked_for = torch.empty(0)  # its values are not read
        combined, total = op.combine(out, asked_for, routing=routing)
        copies = ranks_of(ids, LOCAL).unsqueeze(1)
        assert torch.equal(combined, (x.float() * copies).to(torch.bfloat16))
        assert total is not None
        torch.testing.assert_close(total, weights * copies)

    world.run(body)


@worlds
@pytest.mark.parametrize(("dtype", "columns"), [(torch.float32, 2), (torch.float8_e8m0fnu, 7)])
def test_scales_come_back_as_words(ranks: int, dtype: torch.dtype, columns: int) -> None:
    world = World(ranks)
    size = columns * dtype.itemsize
    scales = [torch.arange(5 * size, dtype=torch.uint8).view(5, size).add(rank).view(dtype) for rank in range(ranks)]
    payload = [rows(rank, 5, HIDDEN).to(torch.float8_e4m3fn) for rank in range(ranks)]
    given = [routes(rank, 5, TOPK, LOCAL * ranks, torch.int32) for rank in range(ranks)]

    def body(rank: int) -> tuple[Tensor, Tensor | None, Tensor]:
        types = {"dispatch_data_type": torch.float8_e4m3fn, "combine_data_type": torch.bfloat16}
        op = make(world.group(rank), "strict", scale_dim=columns, scale_type_size=dtype.itemsize, **types)
        out, _, words, _, total, routing = op.dispatch(payload[rank], given[rank][1], scales[rank], given[rank][0], return_routing=True)
        places = routing.disp_tok_id_to_src_tok_id_local[: int(total)]
        return out, words, places

    for out, words, places in world.run(body):
        assert words is not None
        assert words.dtype == torch.int32
        assert words.shape == (ranks * TOKENS, -(-size // 4))
        assert poison_mask(words[len(places) :]).all()
        for row, place in enumerate(ints(places)):
            source, token = divmod(place, ranks * TOKENS)
            assert_bits(out[row], payload[source][token])
            assert_bits(words.view(torch.uint8)[row, :size].view(dtype), scales[source][token])


def test_results_are_overwritten_by_the_next_dispatch_and_so_is_the_reverse_map() -> None:
    world = World(2)

    def body(rank: int) -> None:
        op = make(world.group(rank))
        x, ids = rows(rank, 4, HIDDEN), torch.zeros(4, TOPK, dtype=torch.int32)
        first, _, _, _, _, touched = op.dispatch(x, None, None, ids, return_routing=True)
        before = ints(touched.disp_tok_id_to_src_tok_id_local)
        second, _, _, _, _, untouched = op.dispatch(x, None, None, ids, return_routing=True)
        assert second.data_ptr() == first.data_ptr()
        op.dispatch(x[:1], None, None, ids[:1])
        assert ints(touched.disp_tok_id_to_src_tok_id_local) == before
        assert int(poison_mask(untouched.disp_tok_id_to_src_tok_id_local[:8]).sum()) == (6 if rank == 0 else 8)

    world.run(body)


def test_a_routing_handle_replays_a_layout() -> None:
    world = World(2)

    def body(rank: int) -> None:
        x, (ids, weights) = rows(rank, 4, HIDDEN), routes(rank, 4, TOPK, LOCAL * 2, torch.int32)
        op = make(world.group(rank))
        out, _, _, _, total, routing = op.dispatch(x, weights, None, ids, return_routing=True)
        before = out[: int(total)].clone()
        routing = EpDispatchRoutingHandleV2.from_tensors(routing.tensors(), routing.cur_rank_num_token)
        again, _, _, _, total = op.dispatch(-x, weights, None, ids, routing=routing)
        assert_bits(again[: int(total)], -before)
        assert torch.equal(op.combine(again, routing=routing)[0], (-x.float() * ranks_of(ids, LOCAL).unsqueeze(1)).to(torch.bfloat16))
        with pytest.raises(ValueError, match="4 tokens, not 3"):
            op.dispatch(x[:3], None, None, ids[:3], routing=routing)

    world.run(body)


def test_capacity_and_misuse() -> None:
    world = World(1)
    x, ids = rows(0, 2, HIDDEN), torch.zeros(2, TOPK, dtype=torch.int32)

    def body(rank: int) -> None:
        op, careless = make(world.group(rank)), make(world.group(rank), "faithful")
        with pytest.raises(ValueError, match="7 tokens are more than 6"):
            op.dispatch(rows(rank, 7, HIDDEN), None, None, torch.zeros(7, TOPK, dtype=torch.int32))
        with pytest.raises(EmulatedMisuse) as misuse:
            op.dispatch(x, None, None, ids.long())
        assert misuse.value.reason is Reason.DTYPE
        wide = torch.tensor([[0, 1, 2], [2, 1, 0]])
        _, _, _, out_ids, _ = careless.dispatch(x, None, None, wide)
        assert sorted(int_rows(out_ids[:2])) == [[0, 0, 1], [0, 2, 0]]
        with pytest.raises(EmulatedMisuse) as misuse:
            op.dispatch(x.float(), None, None, ids)
        assert misuse.value.reason is Reason.DTYPE
        out, _, _, _, _, routing = op.dispatch(x, None, None, ids, return_routing=True)
        with pytest.raises(EmulatedMisuse) as misuse:
            op.combine(out[:1], routing=routing)
        assert misuse.value.reason is Reason.SHORT_INPUT
        op.close()
        with pytest.raises(RuntimeError, match="closed"):
            op.dispatch(x, None, None, ids)

    world.run(body)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_a_receive_cap_that_is_too_small(mode: Mode) -> None:
    world = World(2)

    def body(rank: int) -> int:
        op = make(world.group(rank), mode, max_total_recv_tokens=4)
        return int(op.dispatch(rows(rank, 3, HIDDEN), None, None, torch.zeros(3, TOPK, dtype=torch.int32))[4])

    if mode == "strict":
        with pytest.raises(EmulatedMisuse) as misuse:
            world.run(body)
        assert misuse.value.reason is Reason.CAPACITY
    else:
        assert world.run(body) == [4, 0]


BAD = [
    ({"dispatch_data_type": torch.bfloat16}, "both or neither"),
    ({"quant_type": "fp4_blockwise"}, "quant_type is one of"),
    ({"combine_mode": "sum"}, "gather or scatter"),
    ({"world_size": 65}, "at most 64 ranks"),
    ({"hidden_dim": 60}, "no multiple of 16"),
    ({"dispatch_data_type": torch.float8_e4m3fn, "combine_data_type": torch.bfloat16, "quant_type": "fp8_blockwise"}, "different dtypes"),
    ({"data_type": torch.float4_e2m1fn_x2}, "combine has no fp4"),
    ({"kernel_backend": "cuda"}, "no kernel backend"),
    ({"kernel_backend": "hip", "scale_dim": 2}, "hip backend"),
]


@pytest.mark.parametrize(("changes", "match"), BAD)
def test_configs_that_are_refused(changes: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make(World(1).group(0), "strict", **changes)


def test_quantization_forces_scatter_and_is_lossy() -> None:
    world = World(1)

    def body(rank: int) -> None:
        op = make(world.group(rank), quant_type="fp8_direct_cast")
        assert op.cfg.combine_mode == "scatter"
        assert make(world.group(rank), kernel_backend="hip").capabilities < op.capabilities
        x, ids = rows(rank, 4, HIDDEN), torch.zeros(4, TOPK, dtype=torch.int32)
        out, _, _, _, _, routing = op.dispatch(x, None, None, ids, return_routing=True)
        combined, _ = op.combine(out, routing=routing)
        torch.testing.assert_close(combined, x, rtol=0.1, atol=0.1)
        assert not torch.equal(combined, x)

    world.run(body)

"""Tests of the emulation of MoRI v1: what is not checked, what is lossy, and what comes late."""

import pytest
import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, assert_bits, ranks_of, routes, rows, same_rows
from tests.emulation.hazards import EmulatedMisuse, EmulatedTrap, Mode, Reason, poison_mask
from tests.emulation.mori_config import KERNELS, QuantType
from tests.emulation.mori_config import EpDispatchCombineKernelType as Kernel
from tests.emulation.mori_support import HIDDEN, TOKENS, TOPK, make
from tests.emulation.world import World
from tests.ops.support import int_rows, ints


def test_raw_memory_is_read_whatever_the_tensors_are() -> None:
    world = World(1)

    def received(mode: Mode, x: Tensor, weights: Tensor | None, scales: Tensor | None, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        def body(rank: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
            op = make(world.group(rank), mode)
            out, out_weights, out_scales, out_ids, total = op.dispatch(x, weights, scales, ids)
            places = op.get_dispatch_src_token_pos().long()
            order = places.argsort()
            assert int(total) == 2
            return out[order], out_weights[order], None if out_scales is None else out_scales[order], out_ids[order]

        return world.run(body)[0]

    x, weights, ids = rows(0, 2, HIDDEN), torch.rand(2, TOPK), torch.zeros(2, TOPK, dtype=torch.int32)
    scales = torch.arange(4.0).view(2, 2)

    def misused(reason: Reason, x: Tensor = x, weights: Tensor = weights, scales: Tensor = scales, ids: Tensor = ids) -> None:
        with pytest.raises(EmulatedMisuse) as misuse:
            received("strict", x, weights, scales, ids)
        assert misuse.value.reason is reason

    wide = torch.tensor([[0, 1, 2], [2, 1, 0]])
    misused(Reason.DTYPE, ids=wide)
    assert int_rows(received("faithful", x, None, None, wide)[3]) == [[0, 0, 1], [0, 2, 0]]
    misused(Reason.DTYPE, weights=weights.double())
    misused(Reason.LAYOUT, ids=ids.t().contiguous().t())
    misused(Reason.LAYOUT, scales=scales.t())
    column_major = received("faithful", x, None, scales.t(), ids)[2]
    assert column_major is not None
    assert torch.equal(column_major, scales)  # the memory, not the transposed matrix
    misused(Reason.LAYOUT, x=rows(0, HIDDEN, 2).t())
    strided = rows(0, HIDDEN, 2)
    assert_bits(received("faithful", strided.t(), None, None, ids)[0], strided.reshape(2, HIDDEN))
    misused(Reason.DTYPE, scales=torch.ones(2, 2, dtype=torch.float16))
    with pytest.raises(KeyError):
        received("strict", x.half(), weights, scales, ids)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_combine_wants_the_original_ids(mode: Mode) -> None:
    world = World(2)

    def body(rank: int) -> None:
        op = make(world.group(rank), mode)
        x, ids = rows(rank, 2, HIDDEN), torch.tensor([[0, -1, -1], [0, 3, -1]], dtype=torch.int32)
        out, _, _, received_ids, _ = op.dispatch(x, None, None, ids)
        out, received_ids = out.clone(), received_ids.clone()
        with pytest.raises(ValueError, match="original ids"):
            op.combine(out, None, received_ids)
        other = torch.tensor([[3, -1, -1], [0, -1, -1]], dtype=torch.int32)
        if mode == "strict":
            with pytest.raises(EmulatedMisuse) as misuse:
                op.combine(out, None, other)
            assert misuse.value.reason is Reason.OTHER_IDS
        else:
            combined, _ = op.combine(out, None, other)
            assert torch.isnan(combined[0]).all()
            assert torch.equal(combined[1], x[1])  # of one rank instead of two

    world.run(body)


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_more_tokens_than_the_capacity_are_not_checked(mode: Mode) -> None:
    world = World(1)

    def body(rank: int) -> int:
        op = make(world.group(rank), mode)
        return int(op.dispatch(rows(rank, TOKENS + 1, HIDDEN), None, None, torch.zeros(TOKENS + 1, TOPK, dtype=torch.int32))[4])

    if mode == "strict":
        with pytest.raises(EmulatedMisuse) as misuse:
            world.run(body)
        assert misuse.value.reason is Reason.CAPACITY
    else:
        assert world.run(body) == [TOKENS]


@pytest.mark.parametrize("kernel", [Kernel.IntraNode, Kernel.InterNodeV1], ids=lambda kernel: kernel.name)
def test_a_receive_cap_can_be_exactly_full_and_no_fuller(kernel: Kernel) -> None:
    world = World(2)

    def body(rank: int, tokens: int, mode: Mode) -> int:
        op = make(world.group(rank), mode, kernel_type=kernel, max_total_recv_tokens=7)  # 4 of each rank
        assert op.max_num_tokens_to_recv() == 8
        assert op.max_num_tokens_to_recv_per_rank() == 4
        out, _, _, _, total = op.dispatch(rows(rank, tokens, HIDDEN), None, None, torch.zeros(tokens, TOPK, dtype=torch.int32))
        assert out.size(0) == 8
        return int(total)

    assert world.run(lambda rank: body(rank, 4, "strict")) == [8, 0]
    if kernel == Kernel.IntraNode:
        with pytest.raises(EmulatedMisuse) as misuse:
            world.run(lambda rank: body(rank, 5, "strict"))
        assert misuse.value.reason is Reason.CAPACITY
        assert world.run(lambda rank: body(rank, 5, "faithful")) == [8, 0]
    else:
        with pytest.raises(EmulatedTrap, match="2 rows more than 8"):
            world.run(lambda rank: body(rank, 5, "faithful"))


@pytest.mark.parametrize("mode", ["strict", "faithful"])
def test_a_foreign_tensor_is_not_the_registered_buffer(mode: Mode) -> None:
    world = World(1)

    def body(rank: int) -> None:
        op = make(world.group(rank), mode, use_external_inp_buf=False)
        x, ids = rows(rank, 2, HIDDEN), torch.zeros(2, TOPK, dtype=torch.int32)
        out, *_ = op.dispatch(x, None, None, ids)
        registered = op.get_registered_combine_input_buffer(torch.bfloat16)
        registered.copy_(out * 2)
        assert torch.equal(op.combine(registered, None, ids)[0][:2], x * 2)
        op.dispatch(x, None, None, ids)
        if mode == "strict":
            with pytest.raises(EmulatedMisuse) as misuse:
                op.combine(out, None, ids)
            assert misuse.value.reason is Reason.FOREIGN_BUFFER
        else:
            assert same_rows(op.combine(out, None, ids)[0][:2], x * 2)  # the old rows, in the old order
        op.dispatch(x, None, None, ids)
        assert torch.equal(op.combine(out, None, ids, use_external_inp_buf=1)[0][:2], x)
        op.dispatch(x, None, None, ids)
        short = pytest.raises(EmulatedMisuse, match="2 rows were received and 1 are given")
        if mode == "strict":
            with short:
                op.combine(out[:1], None, ids, use_external_inp_buf=1)
        else:
            assert torch.isnan(op.combine(out[:1], None, ids, use_external_inp_buf=1)[0][:2]).any()

    world.run(body)


def test_async_results_are_poison_until_they_are_received() -> None:
    world = World(2)

    def body(rank: int) -> None:
        op = make(world.group(rank), kernel_type=Kernel.AsyncLL)
        with pytest.raises(AssertionError, match="follows send"):
            op.dispatch_recv()
        x, (ids, weights) = rows(rank, 4, HIDDEN), routes(rank, 4, TOPK, LOCAL * 2, torch.int32, dropped=0)
        out, out_weights, _, out_ids, total = op.dispatch_send(x, weights, None, ids, call_local_expert_count=True)
        for tensor in (out, out_weights, out_ids, total, op.local_expert_count):
            assert poison_mask(tensor).all()
        op.dispatch_recv(call_local_expert_count=True)
        count = int(total)
        mine = out_ids[:count][out_ids[:count] // LOCAL == rank] - rank * LOCAL
        assert ints(op.local_expert_count) == ints(torch.bincount(mine.long(), minlength=LOCAL))
        combined, _ = op.combine_send(out.clone(), None, ids)
        assert poison_mask(combined).all()
        op.combine_recv()
        assert torch.equal(combined[:4], (x.float() * ranks_of(ids, LOCAL).unsqueeze(1)).to(torch.bfloat16))
        with pytest.raises(EmulatedTrap, match="weights"):
            op.dispatch(x, None, None, ids)
        other = make(world.group(rank))
        with pytest.raises(ValueError, match="IntraNode does not"):
            other.dispatch_recv()
        with pytest.raises(ValueError, match="IntraNode does not"):
            other.combine_recv()

    world.run(body)


@pytest.mark.parametrize(("quant", "tolerance"), [("none", 1e-2), ("fp8_direct_cast", 1e-1), ("fp8_blockwise", 7e-2)])
def test_the_transport_of_combine_is_lossy(quant: QuantType, tolerance: float) -> None:
    world = World(2)

    def body(rank: int) -> None:
        op = make(world.group(rank), quant_type=quant)
        x, (ids, _) = rows(rank, 4, HIDDEN), routes(rank, 4, TOPK, LOCAL * 2, torch.int32)
        out, *_ = op.dispatch(x, None, None, ids)
        expected = x.float() * ranks_of(ids, LOCAL).unsqueeze(1)
        combined = op.combine(out, None, ids)[0][:4].float()
        torch.testing.assert_close(combined, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(combined, expected.to(torch.bfloat16).float()) == (quant == "none")
        if quant == "fp8_blockwise":
            big, *_ = op.dispatch(x * 1000, None, None, ids)
            torch.testing.assert_close(op.combine(big, None, ids)[0][:4].float(), expected * 1000, rtol=tolerance, atol=tolerance * 1000)
            big, *_ = op.dispatch(x.float(), None, None, ids)
            with pytest.raises(ValueError, match="bfloat16"):
                op.combine(big, None, ids)

    world.run(body)


def test_fp4_transport_errs_by_less_than_a_step() -> None:
    world = World(1)

    def body(rank: int) -> None:
        op = make(world.group(rank), quant_type="fp4_blockwise")
        x, ids = rows(rank, 4, HIDDEN), torch.zeros(4, TOPK, dtype=torch.int32)
        out, *_ = op.dispatch(x, None, None, ids)
        error = (op.combine(out, None, ids)[0][:4].float() - x.float()).abs()
        blocks = x.float().view(4, -1, 32).abs().amax(-1, keepdim=True).expand(4, -1, 32).reshape(4, HIDDEN)
        assert bool((error <= blocks / 6 + 0.05 * x.float().abs() + 1e-2).all())
        assert bool((error > 1e-2).any())
        with pytest.raises(ValueError, match="gfx950"):
            make(world.group(rank), gfx="gfx942", quant_type="fp4_blockwise")
        with pytest.raises(ValueError, match="quant_type is one of"):
            make(world.group(rank), quant_type="fp2")

    world.run(body)


def test_intra_node_ll_looks_at_eight_routes() -> None:
    world = World(2)
    ids = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8]], dtype=torch.int32)

    def body(rank: int, mode: Mode) -> int:
        op = make(world.group(rank), mode, kernel_type=Kernel.IntraNodeLL, num_experts_per_token=9, num_experts_per_rank=8)
        return int(op.dispatch(rows(rank, 1, HIDDEN), None, None, ids)[4])

    with pytest.raises(EmulatedMisuse) as misuse:
        world.run(lambda rank: body(rank, "strict"))
    assert misuse.value.reason is Reason.TOP_K
    assert world.run(lambda rank: body(rank, "faithful")) == [2, 0]
    with pytest.raises(EmulatedTrap, match="at most 9"):
        make(world.group(0), num_experts_per_token=10)


def test_what_is_not_built_and_what_aborts() -> None:
    world = World(1)

    def body(rank: int) -> None:
        op = make(world.group(rank))
        x, ids = rows(rank, 1, HIDDEN), torch.zeros(1, TOPK, dtype=torch.int32)
        with pytest.raises(RuntimeError, match="ENABLE_STANDARD_MOE_ADAPT"):
            op.dispatch_standard_moe(x, None, None, ids)
        with pytest.raises(RuntimeError, match="ENABLE_STANDARD_MOE_ADAPT"):
            op.convert_dispatch_output(x, ids)
        with pytest.raises(EmulatedTrap, match="aborts"):
            op.dispatch(rows(rank, 1, 2 * HIDDEN), None, None, ids)
        with pytest.raises(AssertionError, match="follows a dispatch"):
            op.combine(x, None, ids)
        assert op.get_launch_config(block_num=3) == (3, 0, 8)
        op.reset()

    world.run(body)


def test_a_failing_rank_does_not_hang_the_others() -> None:
    world = World(4)

    def body(rank: int) -> None:
        dtype = torch.float16 if rank == 1 else torch.bfloat16
        make(world.group(rank)).dispatch(rows(rank, 1, HIDDEN).to(dtype), None, None, torch.zeros(1, TOPK, dtype=torch.int32))

    with pytest.raises(KeyError):
        world.run(body)


def test_enums_are_those_of_pybind() -> None:
    assert [(kernel.value, int(kernel), kernel.name) for kernel in KERNELS[:2]] == [(0, 0, "IntraNode"), (1, 1, "InterNode")]
    assert Kernel(4) == Kernel.AsyncLL
    assert Kernel.AsyncLL != 4

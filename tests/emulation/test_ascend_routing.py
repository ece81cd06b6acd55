"""Routing and gating of the emulated NPU against their goldens."""

import math

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import FinalizeMode, GroupListType, RoutingPadMode, RoutingQuantMode, RowIndexType
from tests.emulation.ascend.misuse import Device, EmulatedMisuse, EmulatedRefusal, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_reference import accumulated, counted, integers, numbers, quantized, random, random_routes, stable_order
from tests.emulation.hazards import Mode, poison_mask

T, K, E, H = 7, 3, 5, 64
SHAPES = [(T, K, E), (1, 4, 8), (6, 1, 4), (16, 2, 3)]
QUANTIZED = [RoutingQuantMode.STATIC, RoutingQuantMode.DYNAMIC]


def k_major(tokens: int, k: int) -> Tensor:
    return torch.tensor([[j * tokens + t for j in range(k)] for t in range(tokens)], dtype=torch.int32)


@pytest.mark.parametrize(("tokens", "k", "experts"), SHAPES)
def test_routing_v1_is_k_major(tokens: int, k: int, experts: int) -> None:
    x, ids = random(0, tokens, H), random_routes(1, tokens, k, experts)
    ops = EmulatedAscendOps()
    rows, index, sorted_ids = ops.npu_moe_init_routing(x, k_major(tokens, k), ids, tokens)
    order = stable_order(integers(ids))
    for place, route in enumerate(order):
        token, slot = divmod(route, k)
        assert int(sorted_ids[place]) == int(ids[token, slot])
        assert int(index[slot * tokens + token]) == place
        assert torch.equal(rows[place], x[token])
    assert (index.dtype, sorted_ids.dtype) == (torch.int32, torch.int32)
    expert_tokens = ops.npu_moe_compute_expert_tokens(sorted_ids, experts)
    assert integers(expert_tokens) == accumulated(counted(integers(ids), experts))
    assert expert_tokens.dtype == torch.int32


def test_active_num_counts_tokens_in_v1_and_rows_in_v2() -> None:
    x, ids = random(0, T, H), random_routes(1, T, K, E)
    ops = EmulatedAscendOps("faithful")
    assert len(ops.npu_moe_init_routing(x, k_major(T, K), ids, 4)[0]) == 4 * K
    assert len(ops.npu_moe_init_routing_v2(x, ids, active_num=4, expert_num=E)[0]) == 4
    assert len(ops.npu_moe_init_routing_quant(x, ids, active_num=4, expert_num=E)[0]) == 4
    strict = EmulatedAscendOps()
    for call in (
        lambda: strict.npu_moe_init_routing(x, k_major(T, K), ids, 4),
        lambda: strict.npu_moe_init_routing_v2(x, ids, active_num=4, expert_num=E),
    ):
        with pytest.raises(EmulatedMisuse) as caught:
            call()
        assert caught.value.reason is Reason.ACTIVE_NUM


def test_the_default_of_active_num_cuts_rows_off() -> None:
    """1024 in routing_quant, as its schema says: the rows of more routes are gone."""
    x, ids = random(0, 600, 32), random_routes(1, 600, 2, 4)
    assert len(EmulatedAscendOps("faithful").npu_moe_init_routing_quant(x, ids, expert_num=4)[0]) == 1024


@pytest.mark.parametrize(("tokens", "k", "experts"), SHAPES)
@pytest.mark.parametrize("bounds", [(0, None), (1, 3)])
def test_routing_v2_is_row_major(tokens: int, k: int, experts: int, bounds: tuple[int, int | None]) -> None:
    start, stop = bounds[0], bounds[1] or experts
    x, ids = random(0, tokens, H), random_routes(1, tokens, k, experts)
    rows, index, expert_tokens, scale = EmulatedAscendOps().npu_moe_init_routing_v2(
        x,
        ids,
        active_num=tokens * k,
        expert_num=experts,
        expert_tokens_num_type=GroupListType.COUNT,
        expert_tokens_num_flag=True,
        active_expert_range=[start, stop],
    )
    flat = integers(ids)
    active = [route for route in stable_order(flat) if start <= flat[route] < stop]
    assert [int(index[route]) for route in range(len(flat))] == [active.index(route) if route in active else -1 for route in range(len(flat))]
    for place, route in enumerate(active):
        assert torch.equal(rows[place], x[route // k])
    assert poison_mask(rows[len(active) :]).all()
    assert poison_mask(scale).all()
    assert integers(expert_tokens) == [flat.count(expert) for expert in range(start, stop)]
    assert (index.dtype, expert_tokens.dtype) == (torch.int32, torch.int64)


@pytest.mark.parametrize("kind", GroupListType)
def test_expert_tokens_of_every_kind(kind: GroupListType) -> None:
    ids = torch.tensor([[0, 3], [3, 4], [0, 4]], dtype=torch.int32)
    tokens = EmulatedAscendOps().npu_moe_init_routing_v2(
        random(0, 3, H), ids, expert_num=6, expert_tokens_num_type=kind, expert_tokens_num_flag=True
    )[2]
    counts = counted(integers(ids), 6)
    if kind == GroupListType.PAIRS:
        pairs = [(expert, count) for expert, count in enumerate(counts) if count]
        assert tokens.shape == (6, 2)
        assert [(int(group), int(count)) for group, count in tokens[: len(pairs) + 1]] == [*pairs, (0, 0)]
        assert poison_mask(tokens[len(pairs) + 1 :]).all()
    else:
        assert integers(tokens) == (accumulated(counts) if kind == GroupListType.CUMSUM else counts)


def test_expert_tokens_are_undefined_unless_asked_for() -> None:
    assert poison_mask(EmulatedAscendOps().npu_moe_init_routing_v2(random(0, T, H), random_routes(1, T, K, E), expert_num=E)[2]).all()


def test_the_scatter_index_is_the_other_direction() -> None:
    ids = random_routes(1, T, K, E)
    index = EmulatedAscendOps().npu_moe_init_routing_v2(
        random(0, T, H), ids, expert_num=E, active_expert_range=[1, 3], row_idx_type=RowIndexType.SCATTER
    )[1]
    flat = integers(ids)
    active = [route for route in stable_order(flat) if 1 <= flat[route] < 3]
    assert integers(index[: len(active)]) == active
    assert poison_mask(index[len(active) :]).all()


def test_dropping_and_padding() -> None:
    ids = torch.tensor([[0, 1], [0, 2], [0, 1]], dtype=torch.int32)
    x = random(0, 3, H)
    rows, index, tokens, _ = EmulatedAscendOps().npu_moe_init_routing_v2(
        x, ids, expert_num=3, expert_capacity=2, drop_pad_mode=RoutingPadMode.DROP_PAD
    )
    assert integers(index) == [0, 2, 1, 4, -1, 3]
    assert integers(tokens) == [3, 2, 1]
    assert torch.equal(rows[0], x[:2])
    assert torch.equal(rows[2], torch.stack((x[1], torch.zeros(H))))


# ---- quantised -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smooth", [None, "one", "each"])
def test_dynamic_quantisation_smooths_before_it_scales(smooth: str | None) -> None:
    x, ids = random(0, T, H, dtype=torch.bfloat16), random_routes(1, T, K, E)
    factors = {None: None, "one": random(2, 1, H).abs(), "each": random(2, E, H).abs()}[smooth]
    rows, index, _, scale = EmulatedAscendOps().npu_moe_init_routing_v2(
        x, ids, scale=factors, expert_num=E, expert_tokens_num_flag=True, quant_mode=RoutingQuantMode.DYNAMIC
    )
    for token in range(T):
        for slot in range(K):
            expert = int(ids[token, slot])
            factor = [1.0] * H if factors is None else numbers(factors[expert if smooth == "each" else 0])
            values, row_scale = quantized([a * b for a, b in zip(numbers(x[token]), factor, strict=True)], 127)
            place = int(index[token * K + slot])
            assert float(scale[place]) == pytest.approx(row_scale, rel=1e-6)
            assert max(abs(a - b) for a, b in zip(integers(rows[place]), values, strict=True)) <= 1  # float32 and Python round a tie apart
            assert sum(a != b for a, b in zip(integers(rows[place]), values, strict=True)) <= 1
    assert (rows.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, (T * K,))


def test_static_quantisation_rounds_in_half() -> None:
    x, ids = random(0, T, H), random_routes(1, T, K, E)
    rows, index, _, _ = EmulatedAscendOps().npu_moe_init_routing_v2(
        x, ids, scale=torch.tensor([37.5]), offset=torch.tensor([3.0]), expert_num=E, quant_mode=RoutingQuantMode.STATIC
    )
    wanted = [max(-128, min(127, round(value * 37.5 + 3))) for value in numbers(x[2].half())]
    assert integers(rows[int(index[2 * K])]) == wanted


def test_routing_quant_is_routing_v2_with_int32_tokens() -> None:
    x, ids = random(0, T, H), random_routes(1, T, K, E)
    ops = EmulatedAscendOps()
    rows, index, tokens, before, scale = ops.npu_moe_init_routing_quant(
        x, ids, active_num=T * K, expert_num=E, expert_tokens_num_mode=GroupListType.COUNT, expert_tokens_before_capacity_flag=True
    )
    other = ops.npu_moe_init_routing_v2(x, ids, expert_num=E, quant_mode=RoutingQuantMode.DYNAMIC)
    assert torch.equal(rows, other[0])
    assert torch.equal(index, other[1])
    assert torch.equal(scale, other[3])
    assert integers(tokens) == integers(before) == counted(integers(ids), E)
    assert tokens.dtype == torch.int32


@pytest.mark.parametrize("mode", [RoutingQuantMode.MXFP8_E4M3, RoutingQuantMode.MXFP8_E5M2])
def test_mx_exponents_of_routing_round_up(mode: RoutingQuantMode) -> None:
    x, ids = random(0, T, H), random_routes(1, T, K, E)
    x[3, :32] = 0
    rows, index, _, scale = EmulatedAscendOps(device=Device.A5).npu_moe_init_routing_v2(x, ids, expert_num=E, quant_mode=mode)
    largest = 448 if mode == RoutingQuantMode.MXFP8_E4M3 else 57344
    assert scale.shape == (T * K, 2)
    for token in range(T):
        place = int(index[token * K])
        for block in range(2):
            values = numbers(x[token, 32 * block : 32 * block + 32])
            amax = max(abs(value) for value in values)
            byte = int(scale.view(torch.uint8)[place, block])
            assert byte == (127 + math.ceil(math.log2(amax / largest)) if amax else 0)
            found = numbers(rows[place, 32 * block : 32 * block + 32])
            assert all(abs(a * 2.0 ** (byte - 127) - b) <= amax / 8 for a, b in zip(found, values, strict=True))


# ---- devices, refusals, misuse ---------------------------------------------------------------------------------------------------------------


def test_310p_gives_cumulative_counts_whatever_is_asked() -> None:
    x, ids = random(0, T, H, dtype=torch.float16), random_routes(1, T, K, E)

    def tokens(mode: Mode, kind: GroupListType) -> list[int]:
        ops = EmulatedAscendOps(mode, Device.P310)
        return integers(ops.npu_moe_init_routing_v2(x, ids, expert_num=E, expert_tokens_num_type=kind, expert_tokens_num_flag=True)[2])

    wanted = accumulated(counted(integers(ids), E))
    assert tokens("faithful", GroupListType.COUNT) == tokens("strict", GroupListType.CUMSUM) == wanted
    with pytest.raises(EmulatedMisuse) as caught:
        tokens("strict", GroupListType.COUNT)
    assert caught.value.reason is Reason.GROUP_LIST_DEVICE
    ops = EmulatedAscendOps("faithful", Device.P310)
    for refused, mode in ((x.bfloat16(), RoutingQuantMode.NONE), (x, RoutingQuantMode.DYNAMIC)):
        with pytest.raises(EmulatedRefusal, match="310P"):
            ops.npu_moe_init_routing_v2(refused, ids, expert_num=E, quant_mode=mode)


def test_what_routing_refuses() -> None:
    x, ids = random(0, T, H), random_routes(1, T, K, E)
    ops = EmulatedAscendOps("faithful")
    with pytest.raises(EmulatedRefusal, match="int32"):
        ops.npu_moe_init_routing_v2(x, ids.long(), expert_num=E)
    with pytest.raises(EmulatedRefusal, match="expert_num"):
        ops.npu_moe_init_routing_v2(x, ids)
    with pytest.raises(EmulatedRefusal, match="scale and an offset"):
        ops.npu_moe_init_routing_v2(x, ids, expert_num=E, quant_mode=RoutingQuantMode.STATIC)
    with pytest.raises(EmulatedRefusal, match="sorted"):
        ops.npu_moe_compute_expert_tokens(torch.tensor([1, 0], dtype=torch.int32), 2)
    with pytest.raises(EmulatedMisuse) as caught:
        EmulatedAscendOps().npu_moe_init_routing_v2(x, ids + E, expert_num=E)
    assert caught.value.reason is Reason.EXPERT_ID


def test_re_routing_brings_ranks_together() -> None:
    counts = torch.tensor([[2, 0, 1], [1, 3, 0]])
    tokens, scales = random(0, 7, H), random(1, 7)
    rows, moved, index, totals = EmulatedAscendOps().npu_moe_re_routing(tokens, counts, per_token_scales=scales)
    wanted: list[int] = []
    for expert in range(3):
        for rank in range(2):
            before = sum(int(counts[r, e]) for r in range(2) for e in range(3) if (r, e) < (rank, expert))
            wanted += range(before, before + int(counts[rank, expert]))
    assert integers(index) == wanted
    assert torch.equal(rows, tokens[wanted])
    assert torch.equal(moved, scales[wanted])
    assert integers(totals) == [3, 3, 1]
    assert poison_mask(EmulatedAscendOps().npu_moe_re_routing(tokens, counts)[1]).all()


def test_an_index_is_remembered_by_its_values() -> None:
    """What is the same in both orders is never called wrong."""
    ops = EmulatedAscendOps()
    ops.npu_moe_init_routing_v2(random(0, 1, H), random_routes(1, 1, 4, 8), expert_num=8)
    index = ops.npu_moe_init_routing(random(0, 1, H), k_major(1, 4), random_routes(1, 1, 4, 8), 1)[1]
    assert not ops.indices.contradicts(FinalizeMode.ROW_MAJOR, index)
    assert not ops.indices.contradicts(FinalizeMode.K_MAJOR, index)

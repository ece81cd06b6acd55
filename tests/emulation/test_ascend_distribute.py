"""Dispatch and combine of torch_npu over in-process ranks: what each rank receives and gets back, by loops over all tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_typed.runners.ascend.ops import ASSIST_INFO_PER_ROW, CombineQuantMode, DispatchQuantMode, GroupListType
from tests.emulation.ascend.misuse import Device, EmulatedMisuse, EmulatedRefusal, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.ascend_reference import accumulated, integers, numbers, quantized, random, random_routes
from tests.emulation.hazards import Mode, poison_mask
from tests.emulation.world import World

RANKS, E, B, K, H = 2, 4, 5, 3, 32
LOCAL = E // RANKS
NAME = "ep"


def rows_of(rank: int) -> Tensor:
    return random(10 + rank, B, H, dtype=torch.bfloat16)


def ids_of(rank: int) -> Tensor:
    return random_routes(20 + rank, B, K, E)


def weights_of(rank: int) -> Tensor:
    return random(30 + rank, B, K).softmax(-1)


def ops_of(world: World, rank: int, mode: Mode = "strict", *, limits: bool = False) -> EmulatedAscendOps:
    return EmulatedAscendOps(mode, groups={NAME: world.group(rank)}, limits=limits)


def expected(rank: int) -> list[tuple[int, int, int, int]]:
    """Return (local expert, rank, token, slot) of each row that arrives, in its order."""
    return [
        (expert, source, token, slot)
        for expert in range(LOCAL)
        for source in range(RANKS)
        for token in range(B)
        for slot in range(K)
        if int(ids_of(source)[token, slot]) == rank * LOCAL + expert
    ]


def on_all(body: Callable[[EmulatedAscendOps, int], object], mode: Mode = "strict") -> None:
    world = World(RANKS)
    world.run(lambda rank: body(ops_of(world, rank, mode), rank))


@pytest.mark.parametrize("kind", [GroupListType.CUMSUM, GroupListType.COUNT])
def test_rows_arrive_by_expert_rank_and_token(kind: GroupListType) -> None:
    def body(ops: EmulatedAscendOps, rank: int) -> None:
        rows, scales, assist, tokens, counts, _, weights = ops.npu_moe_distribute_dispatch_v2(
            rows_of(rank), ids_of(rank), NAME, RANKS, rank, E, expert_scales=weights_of(rank), expert_token_nums_type=kind
        )
        routes = expected(rank)
        bound = B * RANKS * min(LOCAL, K)
        assert rows.shape == (bound, H)
        assert assist.shape == (bound * ASSIST_INFO_PER_ROW,)
        assert (tokens.dtype, counts.dtype, assist.dtype) == (torch.int64, torch.int32, torch.int32)
        per_expert = [sum(route[0] == expert for route in routes) for expert in range(LOCAL)]
        assert integers(tokens) == (per_expert if kind == GroupListType.COUNT else accumulated(per_expert))
        assert integers(counts) == accumulated([sum(route[:2] == (e, r) for route in routes) for e in range(LOCAL) for r in range(RANKS)])
        for place, (_, source, token, slot) in enumerate(routes):
            assert torch.equal(rows[place], rows_of(source)[token])
            assert float(weights[place]) == float(weights_of(source)[token, slot])
        for undefined in (rows[len(routes) :], scales, weights[len(routes) :]):
            assert poison_mask(undefined).all()

    on_all(body)


@pytest.mark.parametrize("smooth", [False, True])
def test_rows_are_quantised_on_the_way(smooth: bool) -> None:
    factors = random(1, E, H).abs()

    def body(ops: EmulatedAscendOps, rank: int) -> None:
        rows, scales, *_ = ops.npu_moe_distribute_dispatch_v2(
            rows_of(rank), ids_of(rank), NAME, RANKS, rank, E, scales=factors if smooth else None, quant_mode=DispatchQuantMode.DYNAMIC
        )
        for place, (expert, source, token, _) in enumerate(expected(rank)):
            factor = numbers(factors[rank * LOCAL + expert]) if smooth else [1.0] * H
            wanted, wanted_scale = quantized([a * b for a, b in zip(numbers(rows_of(source)[token]), factor, strict=True)], 127)
            assert sum(abs(a - b) for a, b in zip(integers(rows[place]), wanted, strict=True)) <= 1
            assert float(scales[place]) == pytest.approx(wanted_scale, rel=1e-5)
        assert poison_mask(scales[len(expected(rank)) :]).all()

    on_all(body)


def there_and_back(ops: EmulatedAscendOps, rank: int, ids: Tensor, x: Tensor, *, special: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Dispatch, and multiply each row by its expert's number plus one."""
    rows, _, assist, tokens, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(
        x, ids, NAME, RANKS, rank, E, zero_expert_num=special, copy_expert_num=special, const_expert_num=special
    )
    experts = torch.arange(LOCAL).repeat_interleave(tokens) + rank * LOCAL
    rows = rows.clone()
    rows[: len(experts)] *= (experts + 1)[:, None]
    return rows, assist, counts, tokens


@pytest.mark.parametrize("quant", CombineQuantMode)
def test_combine_adds_weighted_rows(quant: CombineQuantMode) -> None:
    def body(ops: EmulatedAscendOps, rank: int) -> None:
        x, ids, weights, shared = rows_of(rank), ids_of(rank), weights_of(rank), random(40 + rank, B, H)
        rows, assist, counts, _ = there_and_back(ops, rank, ids, x)
        out = ops.npu_moe_distribute_combine_v2(
            rows, ids, assist, counts, weights, NAME, RANKS, rank, E, shared_expert_x=shared, comm_quant_mode=quant
        )
        for token in range(B):
            factor = sum(float(weights[token, slot]) * (int(ids[token, slot]) + 1) for slot in range(K))
            wanted = [factor * value + other for value, other in zip(numbers(x[token]), numbers(shared[token]), strict=True)]
            assert numbers(out[token]) == pytest.approx(wanted, rel=2e-2, abs=1e-1 if quant == CombineQuantMode.INT8 else 2e-2)

    on_all(body)


def test_zero_copy_and_constant_experts() -> None:
    """Ids 4, 5 and 6 are one of each, after the four real ones."""

    def body(ops: EmulatedAscendOps, rank: int) -> None:
        x, ids, weights = rows_of(rank), torch.tensor([[4, 0, 1], [5, 2, 3], [6, 1, 0], [0, 1, 2], [4, 5, 6]], dtype=torch.int32), weights_of(rank)
        rows, assist, counts, _ = there_and_back(ops, rank, ids, x, special=1)
        alpha_1, alpha_2, v = torch.tensor([0.5]), torch.tensor([2.0]), random(50, 1, H)
        out = ops.npu_moe_distribute_combine_v2(
            rows,
            ids,
            assist,
            counts,
            weights,
            NAME,
            RANKS,
            rank,
            E,
            ori_x=x,
            const_expert_alpha_1=alpha_1,
            const_expert_alpha_2=alpha_2,
            const_expert_v=v,
            zero_expert_num=1,
            copy_expert_num=1,
            const_expert_num=1,
        )
        for token in range(B):
            wanted = [0.0] * H
            for slot in range(K):
                expert, weight = int(ids[token, slot]), float(weights[token, slot])
                for column, value in enumerate(numbers(x[token])):
                    constant = 0.5 * value + 2 * float(v[0, column])
                    wanted[column] += weight * ((expert + 1) * value if expert < E else {4: 0.0, 5: value, 6: constant}[expert])
            assert numbers(out[token]) == pytest.approx(wanted, rel=2e-2, abs=3e-2)

    on_all(body)


def test_inactive_rows_are_not_sent_and_get_nothing_back() -> None:
    def body(ops: EmulatedAscendOps, rank: int) -> None:
        mask = torch.arange(B) < 2 + rank
        rows, _, assist, tokens, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(
            rows_of(rank), ids_of(rank), NAME, RANKS, rank, E, x_active_mask=mask
        )
        assert int(tokens.sum()) == sum(token < 2 + source for _, source, token, _ in expected(rank))
        out = ops.npu_moe_distribute_combine_v2(rows, ids_of(rank), assist, counts, weights_of(rank), NAME, RANKS, rank, E, x_active_mask=mask)
        assert torch.allclose(out[: 2 + rank].float(), rows_of(rank)[: 2 + rank].float(), atol=3e-2)
        assert poison_mask(out[2 + rank :]).all()

    on_all(body)


def test_global_bs_is_the_bound_for_ranks_of_other_sizes() -> None:
    def call(ops: EmulatedAscendOps, rank: int, global_bs: int) -> Tensor:
        size = B - rank
        return ops.npu_moe_distribute_dispatch_v2(rows_of(rank)[:size], ids_of(rank)[:size], NAME, RANKS, rank, E, global_bs=global_bs)[0]

    on_all(lambda ops, rank: call(ops, rank, B * RANKS))
    with pytest.raises(EmulatedMisuse) as caught:
        on_all(lambda ops, rank: call(ops, rank, 0))
    assert caught.value.reason is Reason.OTHER_DISPATCH


@pytest.mark.parametrize(
    ("reason", "ids", "mask"),
    [
        (Reason.EXPERT_ID, torch.tensor([[0, 1, 4]]), None),
        (Reason.DUPLICATE_EXPERT, torch.tensor([[0, 1, 1]]), None),
        (Reason.MASK_ORDER, torch.tensor([[0, 1, 2], [0, 1, 2]]), torch.tensor([False, True])),
    ],
)
def test_misuse_of_ids(reason: Reason, ids: Tensor, mask: Tensor | None) -> None:
    world = World(1)
    x = random(0, len(ids), H, dtype=torch.bfloat16)
    with pytest.raises(EmulatedMisuse) as caught:
        ops_of(world, 0).npu_moe_distribute_dispatch_v2(x, ids.int(), NAME, 1, 0, E, x_active_mask=mask)
    assert caught.value.reason is reason
    ops_of(world, 0, "faithful").npu_moe_distribute_dispatch_v2(x, ids.int(), NAME, 1, 0, E, x_active_mask=mask)


def test_combine_knows_what_was_dispatched() -> None:
    world = World(1)
    x, ids, weights = rows_of(0), ids_of(0), weights_of(0)

    def combine(mode: Mode, other: Tensor, kept: int) -> Tensor:
        ops = ops_of(world, 0, mode)
        rows, _, assist, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(x, ids, NAME, 1, 0, E)
        return ops.npu_moe_distribute_combine_v2(rows[:kept], other, assist, counts, weights, NAME, 1, 0, E)

    for reason, other, kept in ((Reason.OTHER_DISPATCH, ids.flip(0), B * K), (Reason.SHORT_ROWS, ids, B)):
        with pytest.raises(EmulatedMisuse) as caught:
            combine("strict", other, kept)
        assert caught.value.reason is reason
    assert torch.isnan(combine("faithful", ids, B)).any()


def test_what_is_refused() -> None:
    world = World(1)
    ops, x, ids = ops_of(world, 0, "faithful"), rows_of(0), ids_of(0)
    with pytest.raises(EmulatedRefusal, match="no group"):
        ops.npu_moe_distribute_dispatch_v2(x, ids, "other", 1, 0, E)
    with pytest.raises(EmulatedRefusal, match="ranks"):
        ops.npu_moe_distribute_dispatch_v2(x, ids, NAME, 2, 0, E)
    with pytest.raises(EmulatedRefusal, match="int32"):
        ops.npu_moe_distribute_dispatch_v2(x, ids.long(), NAME, 1, 0, E)
    with pytest.raises(EmulatedRefusal, match="multiple of 32"):
        ops.npu_moe_distribute_dispatch_v2(x[:, :20], ids, NAME, 1, 0, E)
    with pytest.raises(EmulatedRefusal, match="1024 to 8192 on A3"):
        ops_of(world, 0, limits=True).npu_moe_distribute_dispatch_v2(x, ids, NAME, 1, 0, E)
    assert EmulatedAscendOps().judge.device is Device.A3
    rows, _, assist, _, counts, _, _ = ops.npu_moe_distribute_dispatch_v2(x, ids, NAME, 1, 0, E)
    with pytest.raises(EmulatedRefusal, match="fp32"):
        ops.npu_moe_distribute_combine_v2(rows, ids, assist, counts, weights_of(0).bfloat16(), NAME, 1, 0, E)

"""Tensor parallelism: the ranks' parts are the whole, and what cannot be cut is refused before anything is."""

import pytest
import torch

from moe_typed import GateUp, Interleaved, SiluAndMul, debug
from moe_typed.formats import ExpertWeights, GateUpOrder, shard_inter
from moe_typed.runners import reference_experts
from tests.formats.weights.support import CASES, EXPERTS, ORDERS, Case, gate_rows, up_rows

every_class = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
every_order = pytest.mark.parametrize("order", ORDERS)


@every_class
@every_order
@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_holds_its_columns_of_gate_and_up(case: Case, order: type[GateUpOrder], size: int) -> None:
    per = 2 * case.unit
    inter = per * size
    whole = case.build(order, inter, bias=True).weights
    assert whole.b13 is not None
    assert whole.b2 is not None
    for rank in range(size):
        with debug("strict"):
            part = shard_inter(whole, rank, size)
        assert (type(part), part.order, part.inter, part.hidden, part.num_experts) == (case.cls, order, per, case.hidden, EXPERTS)
        assert part.b13 is not None
        assert part.b2 is not None
        held = slice(rank * per, (rank + 1) * per)
        for rows in (gate_rows, up_rows):
            mine, all_of_it = rows(order, per), rows(order, inter)[held]
            assert torch.equal(part.b13[:, mine], whole.b13[:, all_of_it])
            for expert in range(EXPERTS):
                assert torch.equal(part.dequantize_w13(expert)[mine], whole.dequantize_w13(expert)[all_of_it])
        for expert in range(EXPERTS):
            assert torch.equal(part.dequantize_w2(expert), whole.dequantize_w2(expert)[:, held])
        assert torch.equal(part.b2, whole.b2 if rank == 0 else torch.zeros_like(whole.b2))  # added once


def run(weights: ExpertWeights[GateUpOrder], hidden: int) -> torch.Tensor:
    rows = torch.randn(5, hidden, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 1], [-1, -1]], dtype=torch.int32)
    weights_of_routes = torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    return reference_experts(rows, ids, weights_of_routes, weights, SiluAndMul())


@every_class
@every_order
@pytest.mark.parametrize("bias", [False, True])
def test_the_sum_over_the_ranks_is_the_whole_layer(case: Case, order: type[GateUpOrder], bias: bool) -> None:
    whole = case.build(order, 4 * case.unit, bias=bias).weights
    expected = run(whole, case.hidden)
    got = torch.stack([run(shard_inter(whole, rank, 2), case.hidden) for rank in range(2)]).sum(0)
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, case in CASES.items() if case.unit > 1])
def test_a_part_that_would_cut_a_block_is_refused(name: str, case: Case, order: type[GateUpOrder], monkeypatch: pytest.MonkeyPatch) -> None:
    unit = case.unit
    whole = case.build(order, 3 * unit).weights

    def copied(*_: object) -> None:
        raise AssertionError("something was cut before everything was checked")

    monkeypatch.setattr(GateUpOrder, "part", copied)
    monkeypatch.setattr(torch.Tensor, "narrow", copied)
    with pytest.raises(
        ValueError, match=rf"^inter = {3 * unit} on 2 ranks is {3 * unit // 2} each, which is not a multiple of {unit}: \w+ has"
    ) as caught:
        shard_inter(whole, 0, 2)
    assert f"has one entry for {unit} of it" in str(caught.value)


def test_what_is_not_there_is_not_cut() -> None:
    symmetric = shard_inter(CASES["awq symmetric"].build(GateUp, 16).weights, 1, 2)
    assert not any(getattr(symmetric, name) is not None for name in ("w13_zero", "w2_zero", "b13", "b2"))


@pytest.mark.parametrize(("inter", "size", "message"), [(3, 2, "inter = 3 cannot be divided among 2 ranks"), (4, 8, "inter = 4 cannot be divided")])
def test_an_inter_that_the_ranks_do_not_divide_is_refused(inter: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shard_inter(CASES["bf16"].build(Interleaved, inter).weights, 0, size)


@pytest.mark.parametrize(("rank", "size"), [(2, 2), (-1, 2), (0, 0)])
def test_there_is_no_such_rank(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"there is no rank {rank} of {size}"):
        shard_inter(CASES["bf16"].build(GateUp, 4).weights, rank, size)


@pytest.mark.parametrize("name", ["w4a8", "w4a4 packed"])
def test_two_rows_of_a_byte_stay_together_unless_they_are_gate_and_up(name: str) -> None:
    """Where gate and up alternate, a byte holds one column of each, and can be any rank's."""
    case = CASES[name]
    with pytest.raises(ValueError, match=r"^inter = 6 on 2 ranks is 3 each, which is not a multiple of 2: w13 has one entry for 2 of it$"):
        shard_inter(case.build(GateUp, 6).weights, 0, 2)
    whole = case.build(Interleaved, 6).weights
    assert torch.equal(shard_inter(whole, 1, 2).dequantize_w13(0), whole.dequantize_w13(0)[6:])

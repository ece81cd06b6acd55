"""Experts cut among ranks on the NPU: sums that are owed and sums that are not, dispatches in flight, dtypes that are kept."""

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import Bf16ExpertWeights, Bf16Rows, BoundaryError, Experts, Fp16Rows, Fp32Rows, GateUp, SiluAndMul, debug, prepare_reference
from moe_typed.dispatchers import AscendTPDispatcher, as_int8, as_they_are, as_they_are_v1, on_310p
from moe_typed.formats import AwqExpertWeights, Fp16ExpertWeights, Int8ChannelExpertWeights, Int8TokenRows, ModelSlimW4A8ExpertWeights, shard_inter
from moe_typed.routing import Pending, Routing
from moe_typed.runners import UnsupportedError
from moe_typed.runners.ascend import prepare_ascend, prepare_ascend_fp16, prepare_ascend_gguf
from moe_typed.stages import CompleteResult, GroupEnds, HandleError, OneRank, PartialResult, RankResult, TensorParallel
from tests.emulation.ascend.misuse import Device
from tests.emulation.world import World
from tests.runners.ascend.support import EXPERTS, HIDDEN, SCHEMES, dense, emulated, error, expected, experts_of, randn, routing

ROWS = Bf16Rows(randn(3, 12, HIDDEN).bfloat16())


def bf16_weights() -> Bf16ExpertWeights[GateUp]:
    w13, w2 = dense()
    return Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), GateUp)


class Ranks(TensorParallel):
    """One rank of a world, a thread each."""

    def __init__(self, world: World, rank: int) -> None:
        self._group, self._size = world.group(rank), world.ranks

    @property
    @override
    def rank(self) -> int:
        return self._group.rank()

    @property
    @override
    def size(self) -> int:
        return self._size

    @override
    def all_reduce(self, part: Tensor) -> Tensor:
        return torch.stack(self._group.exchange("sum", part.float())).sum(0).to(part.dtype)

    @override
    def all_gather(self, columns: Tensor) -> Tensor:
        return torch.cat(self._group.exchange("gather", columns), -1)


@pytest.mark.parametrize("name", ["bf16", "w8a8", "w4a8", "w4a8 corrected", "w4a4", "awq", "gptq", "compressed"])
def test_two_ranks_add_up_their_parts(name: str) -> None:
    weights = SCHEMES[name].weights(inter=128)
    world = World(2)

    def layer(rank: int) -> Tensor:
        ops = emulated()
        part = shard_inter(weights, rank, 2)
        result = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(experts_of(part, ops))(ROWS, routing(12, 3))
        assert isinstance(result, PartialResult)
        return result.completed(Ranks(world, rank))

    first, second = world.run(layer)
    assert torch.equal(first, second)
    assert 0 < error(first, expected(ROWS.data, routing(12, 3), weights, SiluAndMul())) < 1.5 * SCHEMES[name].error


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gguf_is_complete_on_every_rank_and_is_not_summed_again(size: int) -> None:
    weights = bf16_weights()
    world = World(size)

    def layer(rank: int) -> tuple[type[RankResult], Tensor]:
        ops, ranks = emulated(), Ranks(world, rank)
        with debug("layout"):
            experts = Experts(prepare_ascend_gguf(weights, ranks, ops))
            result = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(experts)(ROWS, routing(12, 3))
        return type(result), result.completed(ranks)

    for kind, output in world.run(layer):
        assert kind is CompleteResult
        assert 0 < error(output, expected(ROWS.data, routing(12, 3), weights, SiluAndMul())) < 0.006


class TestInFlight:
    def test_two_dispatches_do_not_meet(self) -> None:
        """The second may even be combined first: nothing is kept on the dispatcher."""
        ops, weights = emulated(), bf16_weights()
        dispatcher, experts = AscendTPDispatcher(as_they_are(Bf16Rows, ops)), Experts(prepare_ascend(weights, ops))
        batches = [(Bf16Rows(randn(seed, 9 + seed, HIDDEN).bfloat16()), routing(9 + seed, 2, seed=seed)) for seed in range(2)]
        inputs = [experts(dispatcher.dispatch(rows, routes)) for rows, routes in batches]
        for (rows, routes), combine_input in reversed([*zip(batches, inputs, strict=True)]):
            output = dispatcher.combine(combine_input).hidden_states
            assert error(output, expected(rows.data, routes, weights, SiluAndMul())) < 0.006

    def test_a_dispatch_is_combined_once_and_by_its_own_dispatcher(self) -> None:
        ops = emulated()
        dispatcher, other = (AscendTPDispatcher(as_they_are(Bf16Rows, ops)) for _ in range(2))
        combine_input = Experts(prepare_ascend(bf16_weights(), ops))(dispatcher.dispatch(ROWS, routing(12, 2)))
        with pytest.raises(HandleError, match="combine with the dispatcher that dispatched"):
            other.combine(combine_input)
        dispatcher.combine(combine_input)
        with pytest.raises(HandleError, match="a dispatch is combined once"):
            dispatcher.combine(combine_input)


class TestDtypes:
    def test_an_fp16_model_stays_fp16_through_int8_rows(self) -> None:
        weights, ops = SCHEMES["w8a8"].weights(), emulated()
        assert isinstance(weights, Int8ChannelExpertWeights)
        rows = Fp16Rows(ROWS.data.half())
        with debug("strict"):
            layer = AscendTPDispatcher(as_int8(ops)).then(Experts(prepare_ascend_fp16(weights, ops)))
            output = layer(rows, routing(12, 3)).completed(OneRank())
        assert output.dtype == torch.float16
        assert 0 < error(output, expected(rows.data, routing(12, 3), weights, SiluAndMul())) < 0.02

    def test_scales_for_bf16_do_not_give_fp16(self) -> None:
        weights, ops = SCHEMES["w8a8"].weights(), emulated()
        assert isinstance(weights, Int8ChannelExpertWeights)
        layer = AscendTPDispatcher(as_int8(ops)).then(Experts(prepare_ascend(weights, ops)))
        with pytest.raises(UnsupportedError, match=r"give torch\.bfloat16, and torch\.float16 was asked for: scales in bf16 go with bf16"):
            layer(Fp16Rows(ROWS.data.half()), routing(12, 3))

    @pytest.mark.parametrize("name", ["w4a8", "awq"])
    def test_other_quantised_weights_of_an_fp16_model(self, name: str) -> None:
        weights, ops, rows = SCHEMES[name].weights(), emulated(), Fp16Rows(ROWS.data.half())
        dispatcher = AscendTPDispatcher(as_they_are(Fp16Rows, ops))
        if isinstance(weights, AwqExpertWeights):
            output = dispatcher.then(Experts(prepare_ascend_fp16(weights, ops)))(rows, routing(12, 3)).hidden_states
        else:
            assert isinstance(weights, ModelSlimW4A8ExpertWeights)
            output = dispatcher.then(Experts(prepare_ascend(weights, ops)))(rows, routing(12, 3)).hidden_states
        assert output.dtype == torch.float16
        assert 0 < error(output, expected(rows.data, routing(12, 3), weights, SiluAndMul())) < 1.5 * SCHEMES[name].error


def test_the_routed_scaling_factor_is_settled_once() -> None:
    ops, weights = emulated(), bf16_weights()
    settled = routing(12, 2)
    pending = Routing(settled.topk_ids, settled.topk_weights, settled.space, EXPERTS, Pending(2.5), True, 12)
    layer = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(Experts(prepare_ascend(weights, ops)))
    assert error(layer(ROWS, pending).hidden_states, 2.5 * expected(ROWS.data, settled, weights, SiluAndMul())) < 0.007


def test_the_reference_runner_works_behind_it() -> None:
    ops = emulated()
    w13, w2 = dense()
    weights = Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), GateUp)
    with debug("strict"):
        layer = AscendTPDispatcher(as_int8(ops)).then(Experts(prepare_reference(int8 := _int8(w13, w2))))
        output = layer(ROWS, routing(12, 3)).hidden_states
    assert 0 < error(output, expected(ROWS.data, routing(12, 3), int8, SiluAndMul())) < 0.02
    assert 0 < error(output, expected(ROWS.data, routing(12, 3), weights, SiluAndMul())) < 0.03


def _int8(w13: Tensor, w2: Tensor) -> Int8ChannelExpertWeights[GateUp]:
    s13, s2 = w13.abs().amax(2) / 127, w2.abs().amax(2) / 127
    q13, q2 = ((part / scale.unsqueeze(2)).round().to(torch.int8) for part, scale in ((w13, s13), (w2, s2)))
    return Int8ChannelExpertWeights(q13, q2, s13, s2, GateUp)


def test_atlas_inference_series_gives_cumulative_counts_whatever_is_asked() -> None:
    ops = emulated(Device.P310)
    w13, w2 = dense()
    weights = Fp16ExpertWeights(w13.half(), w2.half(), GateUp)
    rows = Fp16Rows(ROWS.data.half())
    dispatcher = AscendTPDispatcher(on_310p(ops))
    with debug("strict"):
        dispatched = dispatcher.dispatch(rows, routing(12, 3))
        assert isinstance(dispatched.groups, GroupEnds)
        output = dispatcher.combine(Experts(prepare_ascend(weights, ops))(dispatched)).hidden_states
    assert error(output, expected(rows.data, routing(12, 3), weights, SiluAndMul())) < 0.002


def test_payloads_that_the_weights_do_not_take_are_refused_when_the_layer_is_built() -> None:
    ops = emulated()
    experts = Experts(prepare_ascend(bf16_weights(), ops))
    with pytest.raises(BoundaryError, match=r"payload is Int8TokenRows .* but AscendBf16Weights takes Bf16Rows"):
        AscendTPDispatcher(as_int8(ops)).then(experts)  # type: ignore[arg-type]


def test_rows_of_other_sizes_are_refused() -> None:
    ops = emulated()
    experts = Experts(prepare_ascend(bf16_weights(), ops))
    layer = AscendTPDispatcher(as_they_are_v1(Bf16Rows, ops)).then(experts)
    with pytest.raises(ValueError, match="rows of 64 columns for 6 experts came to weights of 6 experts of 128"):
        layer(Bf16Rows(ROWS.data[:, :64].contiguous()), routing(12, 2))
    with pytest.raises(ValueError, match="for 7 experts came to weights of 6"):
        layer(ROWS, routing(12, 2, experts=7))
    assert Fp32Rows not in experts.accepts
    assert Int8TokenRows not in experts.accepts

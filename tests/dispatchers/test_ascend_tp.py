"""Experts cut among ranks on the NPU: sums that are owed and sums that are not, dispatches in flight, dtypes that are kept."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import Bf16ExpertWeights, Bf16Rows, BoundaryError, Experts, Fp16Rows, Fp32Rows, GateUp, SiluAndMul, UpGate, debug, prepare_reference
from moe_typed.dispatchers import AscendTPDispatcher, TPRouting, as_int8, as_they_are, as_they_are_v1, on_310p
from moe_typed.formats import (
    AwqExpertWeights,
    CompressedInt4ExpertWeights,
    Fp16ExpertWeights,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    Int8TokenRows,
    ModelSlimW4A8ExpertWeights,
    Payload,
    round_bf16,
    shard_inter,
)
from moe_typed.routing import Pending, Routing
from moe_typed.runners import Activation, UnsupportedError
from moe_typed.runners.ascend import prepare_ascend, prepare_ascend_fp16, prepare_ascend_gguf
from moe_typed.stages import (
    AscendRowsInput,
    AscendTPCombineInput,
    AscendTPDispatchOutput,
    CompleteResult,
    GroupCounts,
    GroupEnds,
    HandleError,
    OneRank,
    PartialResult,
    RankResult,
    SummandRows,
    TensorParallel,
)
from tests.emulation.ascend.misuse import Device
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.world import World
from tests.runners.ascend.support import ACTIVATIONS, EXPERTS, HIDDEN, SCHEMES, Weights, dense, emulated, error, expected, experts_of, randn, routing

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


@pytest.mark.parametrize("activation", ACTIVATIONS[1:], ids=lambda activation: activation.name)
@pytest.mark.parametrize("name", ["w8a8", "w4a8", "gguf"])
def test_two_ranks_agree_with_every_activation(name: str, activation: Activation) -> None:
    """Of int8 rows, and of GGUF's gathered columns."""
    scheme = SCHEMES["bf16" if name == "gguf" else name]
    weights, world = scheme.weights(inter=128), World(2)

    def layer(rank: int) -> Tensor:
        ops, ranks = emulated(), Ranks(world, rank)
        if name == "gguf":
            assert isinstance(weights, Bf16ExpertWeights)
            experts = Experts(prepare_ascend_gguf(weights, ranks, ops), activation)
            return AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(experts)(ROWS, routing(12, 3)).completed(ranks)
        part = experts_of(shard_inter(weights, rank, 2), ops, activation)
        return AscendTPDispatcher(as_int8(Bf16Rows, ops)).then(part)(ROWS, routing(12, 3)).completed(ranks)

    for output in world.run(layer):
        assert 0 < error(output, expected(ROWS.data, routing(12, 3), weights, activation)) < 1.5 * scheme.error


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
            layer = AscendTPDispatcher(as_int8(Fp16Rows, ops)).then(Experts(prepare_ascend_fp16(weights, ops)))
            output = layer(rows, routing(12, 3)).completed(OneRank())
        assert output.dtype == torch.float16
        assert 0 < error(output, expected(rows.data, routing(12, 3), weights, SiluAndMul())) < 0.02

    def test_what_another_runner_makes_of_int8_rows_is_brought_to_it(self) -> None:
        weights, rows = SCHEMES["w8a8"].weights(), Fp16Rows(ROWS.data.half())
        assert isinstance(weights, Int8ChannelExpertWeights)
        output = (
            AscendTPDispatcher(as_int8(Fp16Rows, emulated())).then(Experts(prepare_reference(weights)))(rows, routing(12, 3)).completed(OneRank())
        )
        assert output.dtype == torch.float16
        assert 0 < error(output, expected(rows.data, routing(12, 3), weights, SiluAndMul())) < 0.02

    def test_scales_for_bf16_do_not_give_fp16(self) -> None:
        weights, ops = SCHEMES["w8a8"].weights(), emulated()
        assert isinstance(weights, Int8ChannelExpertWeights)
        for rows, prepared, gives in (
            (Fp16Rows, prepare_ascend(weights, ops), "Bf16Rows"),
            (Bf16Rows, prepare_ascend_fp16(weights, ops), "Fp16Rows"),
        ):
            experts: Experts[Int8TokenRows] = Experts(prepared)
            with pytest.raises(UnsupportedError, match=f"is for {rows.__qualname__} of the model, and these weights give {gives}"):
                AscendTPDispatcher(as_int8(rows, ops)).then(experts)

    def test_nor_do_they_behind_a_conversion(self) -> None:
        ops = emulated()
        experts = Experts(prepare_ascend(bf16_weights(), ops)).accepting(round_bf16)
        with pytest.raises(UnsupportedError, match="is for Fp16Rows of the model, and these weights give Bf16Rows"):
            AscendTPDispatcher(as_they_are(Fp16Rows, ops)).then(experts)

    @pytest.mark.parametrize("make", [as_they_are, as_int8])
    def test_rows_are_those_that_the_routing_is_for(self, make: Callable[[type[Bf16Rows], EmulatedAscendOps], TPRouting[Bf16Rows, Payload]]) -> None:
        with pytest.raises(BoundaryError, match=r"rows are Fp16Rows, but .* takes Bf16Rows"):
            AscendTPDispatcher(make(Bf16Rows, emulated())).dispatch(Fp16Rows(ROWS.data.half()), routing(12, 3))  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["w4a8", "awq", "gptq", "compressed"])
    def test_other_quantised_weights_of_an_fp16_model(self, name: str) -> None:
        weights, ops, rows = SCHEMES[name].weights(), emulated(), Fp16Rows(ROWS.data.half())
        dispatcher = AscendTPDispatcher(as_they_are(Fp16Rows, ops))
        if isinstance(weights, AwqExpertWeights | GptqExpertWeights | CompressedInt4ExpertWeights):
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
        layer = AscendTPDispatcher(as_int8(Bf16Rows, ops)).then(Experts(prepare_reference(int8 := _int8(w13, w2))))
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
        AscendTPDispatcher(as_int8(Bf16Rows, ops)).then(experts)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [as_they_are, as_they_are_v1])
@pytest.mark.parametrize("tokens", [0, 5, 15])
def test_the_routing_of_other_rows_is_refused(
    make: Callable[[type[Bf16Rows], EmulatedAscendOps], TPRouting[Bf16Rows, Bf16Rows]], tokens: int
) -> None:
    """Routing v1 would take a row modulo their number, and nothing would raise."""
    with debug("off"), pytest.raises(BoundaryError, match=rf"Routing\.topk_ids: is of {tokens} rows, but 12 are dispatched"):
        AscendTPDispatcher(make(Bf16Rows, emulated())).dispatch(ROWS, routing(tokens, 2))


class TestBoundaries:
    """What is made by hand, or kept of another batch."""

    def test_every_row_is_a_route_s(self) -> None:
        dispatched = AscendTPDispatcher(as_they_are(Bf16Rows, emulated())).dispatch(ROWS, routing(12, 2))
        payload, index, handle = dispatched.payload, dispatched.index, dispatched.handle
        with debug("values"):
            with pytest.raises(BoundaryError, match="are of 6 rows, but each of the 24 is a route's"):
                AscendTPDispatchOutput(payload, GroupCounts(torch.tensor([1, 2, 3, 0, 0, 0])), index, routing(12, 2), torch.bfloat16, handle)
            with pytest.raises(BoundaryError, match="is of 9 tokens and 2 routes each, but there are 24 rows"):
                AscendTPDispatchOutput(payload, dispatched.groups, index, routing(9, 2), torch.bfloat16, handle)
            with pytest.raises(BoundaryError, match="is of 12 tokens and 3 routes each, but there are 24 rows"):
                AscendTPCombineInput(SummandRows(payload.data), dispatched.groups, index, routing(12, 3), torch.bfloat16, handle)
        handle.discard("the test ends")


def test_a_route_to_nowhere_among_others_adds_nothing() -> None:
    """It is sorted to expert 0, whose result combine leaves out, whatever its weight."""
    ops, weights, routes = emulated(), bf16_weights(), routing(12, 3)
    ids = torch.where(torch.arange(36).view(12, 3) % 5 == 0, -1, routes.topk_ids)
    holes = Routing(ids, routes.topk_weights, routes.space, EXPERTS, routes.scaling, True, 12)
    with debug("values"):
        output = AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(Experts(prepare_ascend(weights, ops)))(ROWS, holes).hidden_states
    assert 0 < error(output, expected(ROWS.data, holes, weights, SiluAndMul())) < 0.006


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["bf16", "awq", "compressed"])
def test_biases_are_added_and_once(name: str, size: int) -> None:
    """That of the second product by one rank alone."""
    plain, world = SCHEMES[name].weights(UpGate, inter=128), World(size)
    fields = {**vars(plain), "b13": randn(5, EXPERTS, 256).bfloat16(), "b2": randn(6, EXPERTS, HIDDEN).bfloat16()}
    weights: Weights = type(plain)(**fields)

    def layer(rank: int) -> Tensor:
        ops = emulated()
        experts = experts_of(shard_inter(weights, rank, size), ops)
        return AscendTPDispatcher(as_they_are(Bf16Rows, ops)).then(experts)(ROWS, routing(12, 3)).completed(Ranks(world, rank))

    for output in world.run(layer):
        assert 0 < error(output, expected(ROWS.data, routing(12, 3), weights, SiluAndMul())) < 0.006


def test_rows_of_other_sizes_are_refused() -> None:
    ops = emulated()
    experts = Experts(prepare_ascend(bf16_weights(), ops))
    layer = AscendTPDispatcher(as_they_are_v1(Bf16Rows, ops)).then(experts)
    with debug("off"):
        with pytest.raises(BoundaryError, match="has rows of 64 columns for 6 experts; the weights are of 6 experts with 128 columns"):
            layer(Bf16Rows(ROWS.data[:, :64].contiguous()), routing(12, 2))
        with pytest.raises(BoundaryError, match="has rows of 128 columns for 7 experts; the weights are of 6 experts"):
            layer(ROWS, routing(12, 2, experts=7))
    with debug("layout"):
        with pytest.raises(BoundaryError, match=r"^AscendRowsMeetWeights\.runner_input: has hidden = 64 inside, but hidden = 128 here"):
            layer(Bf16Rows(ROWS.data[:, :64].contiguous()), routing(12, 2))
        with pytest.raises(BoundaryError, match=r"^AscendRowsMeetWeights\.runner_input: has experts = 7 inside, but experts = 6 here"):
            layer(ROWS, routing(12, 2, experts=7))
    runner, no_rows = prepare_ascend(bf16_weights(), ops).runner(SiluAndMul()), torch.zeros(EXPERTS, dtype=torch.int64, device="meta")
    elsewhere = AscendRowsInput(Bf16Rows(ROWS.data.to("meta")), GroupCounts(no_rows), torch.bfloat16)
    with debug("layout"), pytest.raises(BoundaryError, match=r"^AscendRowsMeetWeights\.runner_input: .*meta"):
        runner.run(elsewhere)
    assert Fp32Rows not in experts.accepts
    assert Int8TokenRows not in experts.accepts

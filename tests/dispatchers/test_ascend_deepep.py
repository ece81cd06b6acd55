"""DeepEP on the NPU over in-process ranks: both modes, every scheme, against a float32 layer on the dequantised weights."""

from collections.abc import Callable
from typing import Any, cast

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import Bf16ExpertWeights, Bf16Rows, BoundaryError, Experts, PhysicalIds, SiluAndMul, debug, prepare_reference
from moe_typed.dispatchers import (
    NPU_BF16,
    NPU_INT8,
    NPU_MXFP8,
    ArenaError,
    CapacityError,
    DeepEPLLNpuDispatcher,
    DeepEPNormalNpuDispatcher,
    Dispatcher,
    ExpertSpread,
    LibraryError,
    NpuWire,
    RingArena,
)
from moe_typed.formats import GateUpOrder, Int8ChannelExpertWeights, Payload
from moe_typed.routing import Pending, Routing, Settled
from moe_typed.runners import Activation, UnsupportedError
from moe_typed.runners.ascend import prepare_ascend_fp16, prepare_ascend_gguf
from moe_typed.stages import HandleError, OneRank
from tests.dispatchers.test_ascend_tp import bf16_weights
from tests.emulation.ascend.deep_ep import EmulatedAscendBuffer
from tests.emulation.ascend.extension import EmulatedAscendExtensionOps
from tests.emulation.world import World
from tests.runners.ascend.support import ACTIVATIONS, EXPERTS, HIDDEN, SCHEMES, Weights, emulated, error, expected, experts_of, randn, routing

RANKS, MOST = 2, 16
TOKENS = (9, 5)  # of each rank

WIRES: dict[str, NpuWire[Any]] = {"bf16": NPU_BF16, "int8": NPU_INT8, "mxfp8": NPU_MXFP8}
CELLS = [
    *((name, "bf16") for name in ("bf16", "w8a8", "w4a8", "w4a4", "awq", "gptq", "compressed", "mxfp8", "mxfp4")),
    *((name, "int8") for name in ("w8a8", "w4a8")),
    *((name, "mxfp8") for name in ("mxfp8", "mxfp4")),
]


def normal(buffer: EmulatedAscendBuffer, wire: NpuWire[Any], rank: int) -> Dispatcher[Bf16Rows, Any, Any, PhysicalIds]:
    return DeepEPNormalNpuDispatcher(buffer, wire, ExpertSpread(rank, RANKS, EXPERTS))


def low_latency(buffer: EmulatedAscendBuffer, wire: NpuWire[Any], rank: int) -> Dispatcher[Bf16Rows, Any, Any, PhysicalIds]:
    return DeepEPLLNpuDispatcher(buffer, wire, ExpertSpread(rank, RANKS, EXPERTS), max_tokens=MOST, arena=RingArena())


Make = Callable[[EmulatedAscendBuffer, NpuWire[Any], int], Dispatcher[Bf16Rows, Any, Any, PhysicalIds]]
both_modes = pytest.mark.parametrize("make", [normal, low_latency])


def local(weights: Weights, rank: int) -> Weights:
    """Return the experts of one rank."""
    per = EXPERTS // RANKS
    held = slice(rank * per, (rank + 1) * per)
    cut = {name: value[held].contiguous() if isinstance(value, Tensor) else value for name, value in vars(weights).items()}
    made: Weights = type(weights)(**cut)
    return made


def physical(tokens: int, rank: int, k: int, live: int) -> Routing[PhysicalIds, Settled]:
    logical = routing(tokens, k, seed=rank, live=live)
    return Routing(logical.topk_ids, logical.topk_weights, PhysicalIds, EXPERTS, Settled(), True, live)


@both_modes
@pytest.mark.parametrize(("name", "wire"), CELLS)
def test_a_layer_over_two_ranks_is_the_reference_s(make: Make, name: str, wire: str) -> None:
    """Of the six experts two have no rows; the last rows of a rank are padding; low latency leaves undefined rows behind the received ones."""
    weights, world = SCHEMES[name].weights(), World(RANKS)

    def layer(rank: int) -> tuple[Tensor, Tensor]:
        ops = emulated(SCHEMES[name].device)
        rows, live = Bf16Rows(randn(rank, TOKENS[rank], HIDDEN).bfloat16()), TOKENS[rank] - rank
        routes = physical(TOKENS[rank], rank, 3, live)
        dispatcher = make(EmulatedAscendBuffer(world.group(rank)), WIRES[wire], rank)
        with debug("values"):
            output = dispatcher.then(experts_of(local(weights, rank), ops))(rows, routes)
        return output, expected(rows.data, routing(TOKENS[rank], 3, seed=rank, live=live), weights, SiluAndMul())

    for output, wanted in world.run(layer):
        assert output.dtype == torch.bfloat16
        assert 0 < error(output, wanted) < 1.5 * SCHEMES[name].error  # few rows, and what is combined was rounded once more


@both_modes
@pytest.mark.parametrize("activation", ACTIVATIONS[1:], ids=lambda activation: activation.name)
@pytest.mark.parametrize(("name", "wire", "sorted_by_extension"), [("bf16", "bf16", False), ("w4a8", "int8", False), ("w4a8", "int8", True)])
def test_a_layer_with_every_activation(make: Make, activation: Activation, name: str, wire: str, sorted_by_extension: bool) -> None:
    weights, world = SCHEMES[name].weights(), World(RANKS)

    def layer(rank: int) -> tuple[Tensor, Tensor]:
        extension = EmulatedAscendExtensionOps() if sorted_by_extension else None
        rows = Bf16Rows(randn(rank, TOKENS[rank], HIDDEN).bfloat16())
        dispatcher = make(EmulatedAscendBuffer(world.group(rank)), WIRES[wire], rank)
        experts = experts_of(local(weights, rank), emulated(), activation, extension)
        output = dispatcher.then(experts)(rows, physical(TOKENS[rank], rank, 3, TOKENS[rank]))
        return output, expected(rows.data, routing(TOKENS[rank], 3, seed=rank), weights, activation)

    for output, wanted in world.run(layer):
        assert 0 < error(output, wanted) < 1.5 * SCHEMES[name].error


@both_modes
def test_a_rank_without_rows_takes_part(make: Make) -> None:
    weights, world = SCHEMES["w8a8"].weights(), World(RANKS)

    def layer(rank: int) -> tuple[Tensor, Tensor]:
        tokens = (0, 6)[rank]
        rows = Bf16Rows(randn(rank, tokens, HIDDEN).bfloat16())
        dispatcher = make(EmulatedAscendBuffer(world.group(rank)), NPU_INT8, rank)
        output = dispatcher.then(experts_of(local(weights, rank), emulated()))(rows, physical(tokens, rank, 2, tokens))
        return output, expected(rows.data, routing(tokens, 2, seed=rank), weights, SiluAndMul())

    (empty, _), (output, wanted) = world.run(layer)
    assert empty.shape == (0, HIDDEN)
    assert 0 < error(output, wanted) < 0.02


@both_modes
def test_the_reference_runner_works_behind_it(make: Make) -> None:
    weights, world = bf16_weights(), World(RANKS)

    def layer(rank: int) -> tuple[Tensor, Tensor]:
        part = cast("Bf16ExpertWeights[GateUpOrder]", local(weights, rank))
        rows = Bf16Rows(randn(rank, 7, HIDDEN).bfloat16())
        dispatcher = make(EmulatedAscendBuffer(world.group(rank)), NPU_BF16, rank)
        output = dispatcher.then(Experts(prepare_reference(part)))(rows, physical(7, rank, 2, 7))
        return output, expected(rows.data, routing(7, 2, seed=rank), weights, SiluAndMul())

    for output, wanted in world.run(layer):
        assert 0 < error(output, wanted) < 0.006


@both_modes
def test_a_pending_factor_is_settled_once(make: Make) -> None:
    weights, world = bf16_weights(), World(RANKS)

    def layer(rank: int) -> tuple[Tensor, Tensor]:
        rows = Bf16Rows(randn(rank, 7, HIDDEN).bfloat16())
        routes = physical(7, rank, 2, 7)
        pending = Routing(routes.topk_ids, routes.topk_weights, PhysicalIds, EXPERTS, Pending(0.5), True, 7)
        dispatcher = make(EmulatedAscendBuffer(world.group(rank)), NPU_BF16, rank)
        output = dispatcher.then(experts_of(local(weights, rank), emulated()))(rows, pending)
        return output, 0.5 * expected(rows.data, routing(7, 2, seed=rank), weights, SiluAndMul())

    for output, wanted in world.run(layer):
        assert 0 < error(output, wanted) < 0.007


def alone(tokens: int, make: Make = normal, wire: NpuWire[Payload] = NPU_BF16, *, has_quant_mode: bool = True) -> Any:
    """Return one rank's dispatcher in a world of its own, with rows and routes."""
    buffer = EmulatedAscendBuffer(World(1).group(0), has_quant_mode=has_quant_mode)
    spread = ExpertSpread(0, 1, EXPERTS)
    dispatcher: Any = (
        DeepEPNormalNpuDispatcher(buffer, wire, spread)
        if make is normal
        else DeepEPLLNpuDispatcher(buffer, wire, spread, max_tokens=MOST, arena=RingArena())
    )
    return dispatcher, Bf16Rows(randn(1, tokens, HIDDEN).bfloat16()), physical(tokens, 1, 2, tokens)


@both_modes
def test_weights_for_fp16_are_refused_when_the_layer_is_made(make: Make) -> None:
    dispatcher, _, _ = alone(5, make, NPU_INT8)
    weights = SCHEMES["w8a8"].weights()
    assert isinstance(weights, Int8ChannelExpertWeights)
    with pytest.raises(UnsupportedError, match="is for Bf16Rows of the model, and these weights give Fp16Rows"):
        dispatcher.then(Experts(prepare_ascend_fp16(weights, emulated())))


class TestHandles:
    @both_modes
    def test_a_dispatch_is_combined_once(self, make: Make) -> None:
        dispatcher, rows, routes = alone(5, make)
        combine_input = experts_of(bf16_weights(), emulated())(dispatcher.dispatch(rows, routes))
        dispatcher.combine(combine_input)
        with pytest.raises(HandleError, match="a dispatch is combined once"):
            dispatcher.combine(combine_input)

    @both_modes
    def test_an_error_of_the_experts_ends_the_dispatch(self, make: Make) -> None:
        dispatcher, rows, routes = alone(5, make)
        layer = dispatcher.then(experts_of(SCHEMES["bf16"].weights(experts=5), emulated()))
        with pytest.raises(BoundaryError, match=r"^AscendRowsMeetWeights\.runner_input: "):
            layer(rows, routes)  # no HandleWarning follows

    def test_a_third_result_is_refused_while_two_are_alive(self) -> None:
        dispatcher, rows, routes = alone(5, low_latency)
        held = [dispatcher.dispatch(rows, routes) for _ in range(2)]
        with pytest.raises(ArenaError):
            dispatcher.dispatch(rows, routes)
        for dispatched in held:
            dispatched.handle.discard("the test ends")


class TestRefusals:
    def test_more_rows_than_there_is_room_for(self) -> None:
        dispatcher, rows, routes = alone(MOST + 1, low_latency)
        with pytest.raises(CapacityError):
            dispatcher.dispatch(rows, routes)

    def test_a_library_that_lets_the_environment_choose_what_it_sends(self) -> None:
        dispatcher, rows, routes = alone(3, has_quant_mode=False)
        with pytest.raises(TypeError, match="quant_mode"):
            dispatcher.dispatch(rows, routes)

    @pytest.mark.parametrize(
        ("wire", "data", "scale"),
        [
            (NPU_BF16, torch.zeros(2, 64, dtype=torch.int8), torch.ones(2)),
            (NPU_INT8, torch.zeros(2, 64, dtype=torch.bfloat16), None),
            (NPU_MXFP8, torch.zeros(2, 64, dtype=torch.int8), torch.ones(2)),
        ],
    )
    def test_a_payload_that_was_not_asked_for(self, wire: NpuWire[Payload], data: Tensor, scale: Tensor | None) -> None:
        with pytest.raises(LibraryError, match="asked for"):
            wire.arrive(data, scale)

    @both_modes
    def test_weights_whose_ranks_must_have_the_same_rows(self, make: Make) -> None:
        dispatcher, _, _ = alone(3, make)
        experts = Experts(prepare_ascend_gguf(bf16_weights(), OneRank(), emulated()))
        with pytest.raises(UnsupportedError, match="must have the same rows"):
            dispatcher.then(experts)

    def test_the_weights_of_another_batch_do_not_meet_these_ids(self) -> None:
        dispatcher, rows, routes = alone(5, low_latency)
        combine_input = experts_of(bf16_weights(), emulated())(dispatcher.dispatch(rows, routes))
        with pytest.raises(BoundaryError, match=r"origin: is the routing .* were dispatched by the routing"):
            dispatcher.combine(attrs.evolve(combine_input, origin=physical(5, 1, 2, 5)))

    @both_modes
    def test_a_buffer_over_other_ranks_than_the_experts(self, make: Make) -> None:
        dispatcher = make(EmulatedAscendBuffer(World(1).group(0)), NPU_BF16, 0)
        with pytest.raises(LibraryError, match="counts of 3 local experts were expected"):
            dispatcher.dispatch(Bf16Rows(randn(1, 3, HIDDEN).bfloat16()), physical(3, 1, 2, 3))

    def test_no_room_at_all(self) -> None:
        with pytest.raises(ValueError, match="max_tokens must be positive"):
            DeepEPLLNpuDispatcher(EmulatedAscendBuffer(World(1).group(0)), NPU_BF16, ExpertSpread(0, 1, EXPERTS), max_tokens=0, arena=RingArena())

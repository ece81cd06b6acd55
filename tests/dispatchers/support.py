"""Layers over emulated ranks: weights, batches, dispatchers of every kind, and what one rank with all experts would make of it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, TypeAlias, cast

import attrs
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    CombineInput,
    Conversion,
    DeviceCount,
    Experts,
    ExpertStage,
    Fp8Block128ExpertWeights,
    GateUp,
    LogicalIds,
    MxFp8ExpertWeights,
    Payload,
    Pending,
    Routing,
    SiluAndMul,
    bf16_as_is,
    prepare_reference,
    quantize_fp8_block128,
    quantize_mxfp8,
    upscale_bf16,
)
from moe_typed.dispatchers import (
    LL_BF16,
    LL_FP8,
    LL_FP8_ROWS,
    LL_FP8_UE8M0,
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    DeepEPv2ExpandedDispatcher,
    DeepEPv2MaskedDispatcher,
    DeepEPv2PlainDispatcher,
    Dispatcher,
    ExpertSpread,
    LowLatencyWire,
    MooncakeDispatcher,
    MoriLowLatencyDispatcher,
    MoriNormalDispatcher,
    MoriV2Dispatcher,
    NixlDispatcher,
    PairedArena,
    ReceiveCap,
    RingArena,
    WholeArena,
)
from moe_typed.formats import ExpertWeights, GateUpOrder, MxFp4ExpertWeights, MxFp4Rows, MxFp8Rows, quantize_mxfp4, quantizers
from moe_typed.routing import PhysicalIds, Residence, SlotIds, contiguous_residence, fill_nowhere, in_order, live_mask
from moe_typed.runners import PreparedWeights, reference_experts
from moe_typed.table import AnyRunner
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_common import Config
from tests.emulation.deep_ep_elastic import EmulatedElasticBuffer
from tests.emulation.fp8_cast import cast_fp8
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mori import EmulatedDispatchCombineOp
from tests.emulation.mori_config import EpDispatchCombineConfig, EpDispatchCombineKernelType
from tests.emulation.mori_v2 import EmulatedCommunicator, EmulatedDispatchCombineOpV2
from tests.emulation.mori_v2_config import EpDispatchCombineConfigV2
from tests.emulation.nixl import EmulatedNixlBuffer
from tests.emulation.world import Group, World

LOCAL: Final = 2  # expert slots of a rank
TOPK: Final = 2
INTER: Final = 128
CAPACITY: Final = 4  # the most rows that a rank sends
ALIGNMENT: Final = 4
FACTOR: Final = 1.5
NARROW: Final = 256
WIDE: Final = 2048  # the smallest width that the low-latency kernels are compiled for

Weights: TypeAlias = ExpertWeights[GateUpOrder]
AnyDispatcher: TypeAlias = Dispatcher[Bf16Rows, Payload, CombineInput, SlotIds]
Batch: TypeAlias = tuple[Bf16Rows, Routing[LogicalIds]]

# ---- weights ------------------------------------------------------------------------------------------------------------------------


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])


def _scaled(matrix: Tensor, conversion: Conversion[Bf16Rows, MxFp8Rows] | Conversion[Bf16Rows, MxFp4Rows]) -> tuple[Tensor, Tensor]:
    rows = conversion.run(Bf16Rows(matrix.to(torch.bfloat16).flatten(0, 1)))
    return rows.data.view(*matrix.shape[:2], -1), rows.scale.view(*matrix.shape[:2], -1)


def _blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    experts, rows, columns = matrix.shape
    scale = torch.rand((experts, rows // 128, columns // 128), generator=torch.Generator().manual_seed(rows)) / 8 + 0.01
    return (matrix / scale.repeat_interleave(128, 1).repeat_interleave(128, 2)).to(torch.float8_e4m3fn), scale


@cache
def weights(form: str, experts: int, hidden: int) -> Weights:
    """Return the weights of all experts."""
    w13, w2 = _random(experts, 2 * INTER, hidden, seed=1), _random(experts, hidden, INTER, seed=2)
    match form:
        case "bf16":
            return Bf16ExpertWeights(w13.to(torch.bfloat16), w2.to(torch.bfloat16), GateUp)
        case "fp8 block":
            (d13, s13), (d2, s2) = _blocks(w13), _blocks(w2)
            return Fp8Block128ExpertWeights(d13, d2, s13, s2, GateUp)
        case "mxfp8":
            (d13, s13), (d2, s2) = _scaled(w13, quantize_mxfp8), _scaled(w2, quantize_mxfp8)
            return MxFp8ExpertWeights(d13, d2, s13, s2, GateUp)
        case _:
            (d13, s13), (d2, s2) = _scaled(w13, quantize_mxfp4), _scaled(w2, quantize_mxfp4)
            return MxFp4ExpertWeights(d13, d2, s13, s2, GateUp)


def held_by(w: Weights, rank: int) -> Weights:
    """Return the weights of the experts of a rank."""
    parts = {field.name: getattr(w, field.name) for field in attrs.fields(cast("type[attrs.AttrsInstance]", type(w)))}
    cut = {name: part[rank * LOCAL : (rank + 1) * LOCAL] for name, part in parts.items() if isinstance(part, Tensor)}
    return cast("Callable[..., Weights]", attrs.evolve)(w, **cut)


def prepared(w: Weights) -> PreparedWeights[AnyRunner, Payload]:
    """Return weights for the reference runner, their accept-set forgotten."""
    return cast("Callable[[Weights], PreparedWeights[AnyRunner, Payload]]", prepare_reference)(w)


def experts_for(payload: type[Payload], ready: PreparedWeights[AnyRunner, Payload]) -> ExpertStage[Payload]:
    """Return experts that take a payload, upscaled first where they do not take it as it is."""
    experts = Experts(ready, SiluAndMul())
    return (
        experts if payload in experts.accepts else cast("ExpertStage[Payload]", experts.accepting(cast("Conversion[Payload, Payload]", upscale_bf16)))
    )


# ---- batches ------------------------------------------------------------------------------------------------------------------------

KINDS: Final = ("mixed", "full", "idle", "one row", "nowhere", "one rank", "padded host", "padded device")


def batch(kind: str, rank: int, experts: int, hidden: int) -> Batch:
    """Return what a rank brings."""
    tokens = {"mixed": (3, 0, 2, CAPACITY)[rank], "idle": 0, "one row": int(rank == 0)}.get(kind, CAPACITY)
    generator = torch.Generator().manual_seed(10 * rank + tokens)
    rows = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    among = LOCAL if kind == "one rank" else experts
    ids = torch.rand(tokens, among, generator=generator).argsort(1)[:, :TOPK].to(torch.int32)
    ids[torch.rand(tokens, TOPK, generator=generator) < (1.0 if kind == "nowhere" else 0.2)] = -1
    topk_weights = torch.rand(tokens, TOPK, generator=generator) + 0.1
    live: int | DeviceCount = tokens
    if kind.startswith("padded"):
        live = 2
        rows[live:] = torch.nan if kind == "padded host" else 100.0
        ids[live:], topk_weights[live:] = 0x7F7F7F7F, torch.nan
        live = live if kind == "padded host" else DeviceCount(torch.tensor([live], dtype=torch.int32))
    return Bf16Rows(rows), Routing(ids, topk_weights, LogicalIds, experts, Pending(FACTOR), False, live)


WIRES: Final[Mapping[str, Conversion[Bf16Rows, Payload]]] = {
    "bf16": bf16_as_is,
    "fp8": quantize_fp8_block128,
    "mxfp8": quantize_mxfp8,
    "mxfp4": quantize_mxfp4,
    "ue8m0": quantizers.fp8_block128_packed,
    "column": quantizers.fp8_block128_column,
    "rows": quantize_fp8_block128,
}
LL_WIRES: Final[Mapping[str, LowLatencyWire[Payload]]] = {"bf16": LL_BF16, "fp8": LL_FP8, "ue8m0": LL_FP8_UE8M0, "rows": LL_FP8_ROWS}


def low_latency_wire(name: str) -> LowLatencyWire[Bf16Rows]:
    """Return a wire, its payload forgotten: the classes that a library has are in the typing cases."""
    return cast("LowLatencyWire[Bf16Rows]", LL_WIRES[name])


def arrived(setup: "Setup", rows: Bf16Rows, wire: str) -> Tensor:
    """Return the values that rows have after the wire, float32."""
    if setup.hidden == NARROW or wire == "bf16":
        return WIRES[wire].run(rows).dequantize()
    data, scale = cast_fp8(rows.data, round_scale=wire == "ue8m0")  # the library quantises
    return (data.float().view(*scale.shape, 128) * scale.unsqueeze(2)).flatten(1)


def expected(setup: "Setup", kind: str, rank: int, ranks: int, form: str, wire: str) -> Tensor:
    """Return what one rank with all experts makes of a batch, after the wire, in float32."""
    rows, routing = batch(kind, rank, LOCAL * ranks, setup.hidden)
    w = weights(form, LOCAL * ranks, setup.hidden)
    ids = torch.where(live_mask(routing), routing.topk_ids, -1)
    values = arrived(setup, rows, wire)
    return FACTOR * reference_experts(values, ids, routing.topk_weights, w, SiluAndMul())


def near(found: Tensor, wanted: Tensor) -> None:
    """Assert that results agree as bf16 sums of a few rows do."""
    assert found.dtype == torch.bfloat16
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)


# ---- dispatchers --------------------------------------------------------------------------------------------------------------------


def spread_of(group: Group) -> ExpertSpread:
    return ExpertSpread(group.rank(), group.size(), LOCAL * group.size())


def residence_of(group: Group) -> Residence[PhysicalIds]:
    spread = spread_of(group)
    return contiguous_residence(PhysicalIds, spread.num_experts, spread.first, spread.local, torch.device("cpu"))


def low_latency_buffer(group: Group, hidden: int = WIDE) -> EmulatedBuffer:
    size = EmulatedBuffer.get_low_latency_rdma_size_hint(CAPACITY, hidden, group.size(), LOCAL * group.size())
    return EmulatedBuffer(group, num_rdma_bytes=size, low_latency_mode=True)


def nixl_buffer(group: Group, topk_idx_t: torch.dtype = torch.int32) -> EmulatedNixlBuffer:
    buffer = EmulatedNixlBuffer(rank=group.rank(), world=group.world, topk_idx_t=topk_idx_t)
    size = EmulatedNixlBuffer.get_rdma_size_hint(CAPACITY, WIDE, group.size(), LOCAL * group.size())
    buffer.update_memory_buffers(group.size(), LOCAL, size)
    buffer.connect_ranks([rank for rank in range(group.size()) if rank != group.rank()])
    return buffer


def elastic_buffer(group: Group) -> EmulatedElasticBuffer:
    return EmulatedElasticBuffer(group, num_max_tokens_per_rank=CAPACITY, hidden=NARROW, num_topk=TOPK)


def scales_of(wire: str, hidden: int = NARROW) -> tuple[int, int]:
    """Return how many scales of how many bytes MoRI is to carry."""
    spec = WIRES[wire].target.format.scale
    return (0, 0) if spec is None else (hidden // spec.group[1], spec.dtype.itemsize)


def mori_config(group: Group, wire: str, kernel: EpDispatchCombineKernelType, hidden: int = NARROW) -> EpDispatchCombineConfig:
    dim, size = scales_of(wire, hidden)
    return EpDispatchCombineConfig(
        data_type=torch.bfloat16,
        rank=group.rank(),
        world_size=group.size(),
        hidden_dim=hidden,
        scale_dim=dim,
        scale_type_size=size,
        max_token_type_size=2,
        max_num_inp_token_per_rank=CAPACITY,
        num_experts_per_rank=LOCAL,
        num_experts_per_token=TOPK,
        kernel_type=kernel,
    )


def mori_op(group: Group, wire: str, kernel: EpDispatchCombineKernelType, hidden: int = NARROW) -> EmulatedDispatchCombineOp:
    return EmulatedDispatchCombineOp(mori_config(group, wire, kernel, hidden), group=group, gfx="gfx950")


def mori_v2_op(group: Group, wire: str, combine_mode: Literal["gather", "scatter"] = "gather") -> EmulatedDispatchCombineOpV2:
    dim, size = scales_of(wire)
    config = EpDispatchCombineConfigV2(
        group.rank(),
        group.size(),
        NARROW,
        CAPACITY,
        LOCAL,
        TOPK,
        dispatch_data_type=WIRES[wire].target.format.data_dtype,
        combine_data_type=torch.bfloat16,
        scale_dim=dim,
        scale_type_size=size,
        combine_mode=combine_mode,
    )
    return EmulatedDispatchCombineOpV2(config, EmulatedCommunicator(group), gfx="gfx950")


Build: TypeAlias = Callable[[Group, str], object]


def _normal(max_tokens: int | None) -> Build:
    def build(group: Group, wire: str) -> object:
        config = Config() if group.size() == 1 else None  # DeepEP knows no config for one rank
        spread, limits = spread_of(group), {"dispatch_config": config, "combine_config": config}
        return DeepEPNormalDispatcher(
            EmulatedBuffer(group), WIRES[wire], spread, topk_idx_t=torch.int64, expert_alignment=ALIGNMENT, max_tokens=max_tokens, **limits
        )

    return build


def _v2_plain(host_sync: bool) -> Build:
    def build(group: Group, wire: str) -> object:
        spread = spread_of(group)
        return DeepEPv2PlainDispatcher(
            elastic_buffer(group), WIRES[wire], spread, max_tokens=CAPACITY, topk_idx_t=torch.int64, expert_alignment=ALIGNMENT, host_sync=host_sync
        )

    return build


def _v2_expanded(group: Group, wire: str) -> object:
    spread = spread_of(group)
    return DeepEPv2ExpandedDispatcher(
        elastic_buffer(group), WIRES[wire], spread, max_tokens=CAPACITY, topk_idx_t=torch.int64, expert_alignment=ALIGNMENT
    )


def _v2_masked(group: Group, wire: str) -> object:
    spread = spread_of(group)
    return DeepEPv2MaskedDispatcher(
        elastic_buffer(group), WIRES[wire], spread, max_tokens=CAPACITY, topk_idx_t=torch.int64, expert_alignment=ALIGNMENT
    )


def _deepep_ll(group: Group, wire: str) -> object:
    return DeepEPLowLatencyDispatcher(
        low_latency_buffer(group), low_latency_wire(wire), spread_of(group), max_tokens=CAPACITY, topk_idx_t=torch.int64, arena=RingArena()
    )


def _nixl(topk_idx_t: torch.dtype) -> Build:
    def build(group: Group, wire: str) -> object:
        return NixlDispatcher(
            nixl_buffer(group, topk_idx_t), low_latency_wire(wire), spread_of(group), max_tokens=CAPACITY, topk_idx_t=topk_idx_t, arena=RingArena()
        )

    return build


def _mooncake(fallback: bool) -> Build:
    def build(group: Group, wire: str) -> object:
        buffer, active = EmulatedMooncakeBuffer(group, fallback=fallback), torch.ones(group.size(), dtype=torch.int32)
        return MooncakeDispatcher(
            buffer, low_latency_wire(wire), spread_of(group), max_tokens=CAPACITY, active_ranks=active, timeout_us=-1, arena=RingArena()
        )

    return build


def _mori_normal(kernel: EpDispatchCombineKernelType, cap: ReceiveCap | None = None) -> Build:
    def build(group: Group, wire: str) -> object:
        return MoriNormalDispatcher(mori_op(group, wire, kernel), WIRES[wire], residence_of(group), cap=cap or WholeArena(), arena=PairedArena())

    return build


def _mori_ll(kernel: EpDispatchCombineKernelType) -> Build:
    def build(group: Group, wire: str) -> object:
        return MoriLowLatencyDispatcher(mori_op(group, wire, kernel), WIRES[wire], residence_of(group), arena=PairedArena())

    return build


def _mori_v2(group: Group, wire: str) -> object:
    return MoriV2Dispatcher(mori_v2_op(group, wire), WIRES[wire], residence_of(group), arena=PairedArena())


@dataclass(frozen=True)
class Setup:
    """A dispatcher over its library: which wires it has, and the hidden width that its kernels know."""

    build: Build
    wires: tuple[str, ...]
    hidden: int = NARROW

    def dispatcher(self, group: Group, wire: str) -> AnyDispatcher:
        """Return the dispatcher of a rank; a collective."""
        return cast("AnyDispatcher", self.build(group, wire))

    @property
    def needs_every_route(self) -> bool:
        """Return whether the library knows no -1."""
        return self in (SETUPS[name] for name in SETUPS if name.startswith("mori"))


_ALL: Final = ("bf16", "fp8", "mxfp8", "mxfp4")
SETUPS: Final[Mapping[str, Setup]] = {
    "deepep normal": Setup(_normal(None), _ALL),
    "deepep normal, no sync": Setup(_normal(CAPACITY), _ALL),
    "deepep ll": Setup(_deepep_ll, ("bf16", "fp8", "ue8m0"), WIDE),
    "deepep v2 plain": Setup(_v2_plain(True), (*_ALL, "column", "ue8m0")),
    "deepep v2 plain, no sync": Setup(_v2_plain(False), _ALL),
    "deepep v2 expanded": Setup(_v2_expanded, (*_ALL, "column", "ue8m0")),
    "deepep v2 masked": Setup(_v2_masked, _ALL),
    "mooncake": Setup(_mooncake(False), ("bf16", "fp8"), WIDE),
    "mooncake, no rdma": Setup(_mooncake(True), ("bf16", "rows"), WIDE),
    "nixl": Setup(_nixl(torch.int32), ("bf16", "fp8", "ue8m0"), WIDE),
    "nixl, int64": Setup(_nixl(torch.int64), ("bf16",), WIDE),
    "mori normal": Setup(_mori_normal(EpDispatchCombineKernelType.IntraNode), _ALL),
    "mori normal, between nodes": Setup(_mori_normal(EpDispatchCombineKernelType.InterNodeV1), ("bf16", "mxfp8")),
    "mori v2": Setup(_mori_v2, _ALL),
    "mori ll": Setup(_mori_ll(EpDispatchCombineKernelType.IntraNodeLL), _ALL),
    "mori ll, async": Setup(_mori_ll(EpDispatchCombineKernelType.AsyncLL), _ALL),
}


def slots(setup: Setup, routing: Routing[LogicalIds]) -> Routing[SlotIds]:
    """Return the routing over slots as the setup's library takes it."""
    return fill_nowhere(in_order(routing)) if setup.needs_every_route else in_order(routing)


def run_layers(
    setup: Setup,
    wire: str,
    form: str,
    ranks: int,
    kind: str,
    prepare: Callable[[Weights], PreparedWeights[AnyRunner, Payload]] = prepared,
    rounds: int = 1,
) -> list[list[Tensor]]:
    """Run a layer of each rank, and return the results of each round by rank."""
    world, w = World(ranks), weights(form, LOCAL * ranks, setup.hidden)

    def body(rank: int) -> list[Tensor]:
        dispatcher = setup.dispatcher(world.group(rank), wire)
        layer = dispatcher.then(experts_for(dispatcher.payload, prepare(held_by(w, rank))))
        rows, routing = batch(kind, rank, LOCAL * ranks, setup.hidden)
        return [layer(rows, slots(setup, routing)) for _ in range(rounds)]

    return world.run(body)

"""Dispatchers of every kind over emulated libraries, layers of them, and what one rank with all experts would make of a batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias, cast

import torch
from torch import Tensor

from moe_typed import (
    Bf16Rows,
    CombineInput,
    LogicalIds,
    Payload,
    Routing,
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
from moe_typed.routing import SlotIds, fill_nowhere, in_order, live_mask
from moe_typed.runners import Activation, PreparedWeights, reference_experts
from moe_typed.table import AnyRunner
from tests.dispatchers.libraries import elastic_buffer, low_latency_buffer, mori_op, mori_v2_op, nixl_buffer, residence_of, spread_of
from tests.dispatchers.support import (
    ALIGNMENT,
    CAPACITY,
    FACTOR,
    LOCAL,
    NARROW,
    SILU,
    WIDE,
    WIRES,
    Weights,
    batch,
    experts_for,
    held_by,
    prepared,
    weights,
)
from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_common import Config
from tests.emulation.fp8_cast import cast_fp8
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mori_config import EpDispatchCombineKernelType
from tests.emulation.world import Group, World

AnyDispatcher: TypeAlias = Dispatcher[Bf16Rows, Payload, CombineInput, SlotIds]

LL_WIRES: Final[Mapping[str, LowLatencyWire[Payload]]] = {"bf16": LL_BF16, "fp8": LL_FP8, "ue8m0": LL_FP8_UE8M0, "rows": LL_FP8_ROWS}


def low_latency_wire(name: str) -> LowLatencyWire[Bf16Rows]:
    """Return a wire, its payload forgotten: the classes that a library has are in the typing cases."""
    return cast("LowLatencyWire[Bf16Rows]", LL_WIRES[name])


# ---- dispatchers --------------------------------------------------------------------------------------------------------------------


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


def arrived(setup: Setup, rows: Bf16Rows, wire: str) -> Tensor:
    """Return the values that rows have after the wire, float32."""
    if setup.hidden == NARROW or wire == "bf16":
        return WIRES[wire].run(rows).dequantize()
    data, scale = cast_fp8(rows.data, round_scale=wire == "ue8m0")  # the library quantises
    return (data.float().view(*scale.shape, 128) * scale.unsqueeze(2)).flatten(1)


def expected(setup: Setup, kind: str, rank: int, ranks: int, form: str, wire: str, activation: Activation = SILU) -> Tensor:
    """Return what one rank with all experts makes of a batch, after the wire, in float32."""
    rows, routing = batch(kind, rank, LOCAL * ranks, setup.hidden)
    w = weights(form, LOCAL * ranks, setup.hidden)
    ids = torch.where(live_mask(routing), routing.topk_ids, -1)
    values = arrived(setup, rows, wire)
    return FACTOR * reference_experts(values, ids, routing.topk_weights, w, activation)


def run_layers(
    setup: Setup,
    wire: str,
    form: str,
    ranks: int,
    kind: str,
    prepare: Callable[[Weights], PreparedWeights[AnyRunner, Payload]] = prepared,
    rounds: int = 1,
    activation: Activation = SILU,
) -> list[list[Tensor]]:
    """Run a layer of each rank, and return the results of each round by rank."""
    world, w = World(ranks), weights(form, LOCAL * ranks, setup.hidden)

    def body(rank: int) -> list[Tensor]:
        dispatcher = setup.dispatcher(world.group(rank), wire)
        layer = dispatcher.then(experts_for(dispatcher.payload, prepare(held_by(w, rank)), activation))
        rows, routing = batch(kind, rank, LOCAL * ranks, setup.hidden)
        return [layer(rows, slots(setup, routing)) for _ in range(rounds)]

    return world.run(body)

"""Host time of one layer call's bookkeeping: the typed transition against the untyped dict and string registries that it replaces.

Both sides are given rows and a routing, and do what stands between dispatch and combine with a runner that computes nothing: build the dispatch
output, find the way, pre, run, post, combine (behind MoRI: the combine input, since its combine is the library's). No tensor is read or made, so that
what is left is the bookkeeping itself. Repeats of all variants are interleaved in one process, and medians are printed. ``benchmarks/_untyped.py`` is
the untyped side.

    python -m benchmarks.host_overhead [--repeats N] [--calls N]
"""

import argparse
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import ClassVar

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from benchmarks._untyped import AiterCore, Backend, TritonCore, UntypedConfig, UntypedRunner, UntypedTopK, untyped_layer, untyped_mori_layer
from moe_typed import (
    Bf16Rows,
    DebugLevel,
    DeviceCount,
    PhysicalIds,
    Routing,
    SoftmaxTopK,
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
    bf16_as_is,
    debug,
    localize,
)
from moe_typed.routing import LocalIds, Settled, contiguous_residence
from moe_typed.runners import Runner
from moe_typed.stages import (
    AiterSlotInput,
    FlatRowsInput,
    LiveRowsOutput,
    MoriEPNormalCombineInput,
    MoriEPNormalDispatchOutput,
    MoriEPNormalHandle,
    RunnerInput,
    StandardCarry,
    SummedRowsOutput,
)
from moe_typed.table import connect

# ---- the typed side ------------------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class NoRunner(Runner[FlatRowsInput, SummedRowsOutput]):
    """A runner that computes nothing."""

    name: ClassVar[str] = "nothing"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (FlatRowsInput,)

    @override
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput:
        return SummedRowsOutput(runner_input.payload.data)


@attrs.frozen(eq=False)
class NoAiter(Runner[AiterSlotInput, LiveRowsOutput]):
    """An AITER runner that computes nothing."""

    name: ClassVar[str] = "nothing"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (AiterSlotInput,)

    @override
    def run(self, runner_input: AiterSlotInput, /) -> LiveRowsOutput:
        return LiveRowsOutput(runner_input.payload.data)


def typed_layer(rows: Bf16Rows, routing: Routing[LocalIds, Settled]) -> Callable[[], Tensor]:
    """Return one call of the typed layer, its way through the table resolved once, as ``MoELayer`` does."""
    experts = connect(StandardDispatchOutput[Bf16Rows], NoRunner())
    combine = StandardDispatcher(bf16_as_is).combine
    return lambda: combine(experts(StandardDispatchOutput(rows, routing)))


def typed_mori_layer(rows: Bf16Rows, ids: Tensor, weights: Tensor, received: Tensor) -> Callable[[], Tensor]:
    """Return one call of the typed layer behind MoRI: the received routing, the dispatch output with its handle, and the combine input."""
    experts = connect(MoriEPNormalDispatchOutput[Bf16Rows], NoAiter())
    slots, settled, owner = 16, Settled(), object()
    residence = contiguous_residence(PhysicalIds, slots, 0, slots, ids.device)
    origin = Routing(ids, weights, PhysicalIds, slots, settled, True, ids.shape[0])

    def call() -> Tensor:
        routing = Routing(ids, weights, PhysicalIds, slots, settled, True, DeviceCount(received))
        handle = MoriEPNormalHandle(None, owner)
        combine_input: MoriEPNormalCombineInput = experts(MoriEPNormalDispatchOutput(rows, routing, residence, origin, torch.bfloat16, handle))
        combine_input.handle.consume(owner)
        return combine_input.hidden_states

    return call


# ---- timing --------------------------------------------------------------------------------------------------------------------------


def microseconds(call: Callable[[], object], calls: int) -> float:
    """Return the mean processor microseconds of a call; a busy machine does not count."""
    start = time.thread_time_ns()
    for _ in range(calls):
        call()
    return (time.thread_time_ns() - start) / calls / 1000


def measure(variants: dict[str, tuple[Callable[[], object], DebugLevel]], *, repeats: int, calls: int) -> dict[str, float]:
    """Return the median over interleaved repeats."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            for name, (call, level) in variants.items():
                with debug(level) if level else nullcontext():
                    call()
                    samples[name].append(microseconds(call, calls))
    finally:
        gc.enable()
    return {name: median(times) for name, times in samples.items()}


def variants() -> dict[str, tuple[Callable[[], object], DebugLevel]]:
    """Return what is timed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 16, generator=generator)
    data = torch.randn(8, 256, generator=generator, dtype=torch.bfloat16)
    rows = Bf16Rows(data)
    global_routing = SoftmaxTopK(4, renormalize=True).route(logits)
    routing = localize(global_routing, 0, 16)
    ids, weights, settled = routing.topk_ids, routing.topk_weights, Settled()
    topk = UntypedTopK(weights, ids, logits)
    config = UntypedConfig(routed_scaling_factor=None)
    typed = typed_layer(rows, routing)
    received = torch.tensor([8], dtype=torch.int32)
    typed_mori = typed_mori_layer(rows, ids, weights, received)
    untyped = UntypedRunner(Backend.AITER, AiterCore(), config)
    off, layout = DebugLevel.OFF, DebugLevel.LAYOUT
    return {
        "untyped layer (standard, triton)": (untyped_layer(UntypedRunner(Backend.TRITON, TritonCore(), config), rows, topk), off),
        "untyped layer (standard, aiter)": (untyped_layer(untyped, rows, topk), off),
        "untyped layer (MoRI, aiter)": (untyped_mori_layer(untyped, rows, ids, weights, received), off),
        "typed layer": (typed, off),
        "typed layer, debug layout": (typed, layout),
        "typed layer (MoRI, aiter)": (typed_mori, off),
        "typed layer (MoRI, aiter), debug layout": (typed_mori, layout),
        **{
            f"{name}, debug {level.name.lower()}": (build, level)
            for level in (off, layout)
            for name, build in {
                "Bf16Rows": lambda: Bf16Rows(data),
                "Routing": lambda: Routing(ids, weights, LocalIds, 16, settled, True, 8),
                "StandardDispatchOutput": lambda: StandardDispatchOutput(rows, routing),
                "FlatRowsInput": lambda: FlatRowsInput(rows, routing),
                "StandardCarry": lambda: StandardCarry(settled),
                "SummedRowsOutput": lambda: SummedRowsOutput(data),
                "StandardCombineInput": lambda: StandardCombineInput(data, settled),
            }.items()
        },
    }


RATIOS = (
    ("typed layer", "untyped layer (standard, triton)"),
    ("typed layer", "untyped layer (standard, aiter)"),
    ("typed layer (MoRI, aiter)", "untyped layer (MoRI, aiter)"),
)


def main() -> None:
    """Print the medians and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--calls", type=int, default=5000)
    arguments = parser.parse_args()
    times = measure(variants(), repeats=arguments.repeats, calls=arguments.calls)
    for name, us in times.items():
        print(f"{name:45s} {us:8.3f} us")
    for typed, untyped in RATIOS:
        print(f"{typed} / {untyped:40s} {times[typed] / times[untyped]:8.3f}")


if __name__ == "__main__":
    main()

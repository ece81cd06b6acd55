"""Host time of one layer call's bookkeeping: the typed transition against the untyped dict and string registries that it replaces.

Both sides are given rows and a routing, and do what stands between dispatch and combine with a runner that computes nothing: build the dispatch
output, find the way, pre, run, post, combine. No tensor is read or made, so that what is left is the bookkeeping itself. Repeats of all
variants are interleaved in one process, and medians are printed.

The untyped side follows SGLang's frame as it was in 0.5.23, pair (standard, triton):

* a dispatch output is a NamedTuple of four fields with a ``format`` property that returns an enum member; a top-k output is a NamedTuple of three;
* pre and post functions are registered under pairs of strings, and looked up in every forward through the enum members' ``value``; a pair
  that is absent is an assertion there;
* a fresh dict lives for one run; it is seeded with the two overlap arguments; pre writes the keys config, down_config, down_moe_use_tma and
  up_moe_use_tma, and the core reads them;
* runner inputs (six fields) and outputs (one) are plain dataclasses, the combine input is a NamedTuple of one;
* post applies the routed scaling factor where the layer's config has one; here it has none, as on the typed side.

The leanest pair, (standard, aiter), writes no key; it is timed too, with a runner input of three fields.

    python benchmarks/host_overhead.py [--repeats N] [--calls N]
"""

import argparse
import enum
import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import median
from typing import ClassVar, NamedTuple, cast

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import (
    Bf16Rows,
    DebugLevel,
    Routing,
    SoftmaxTopK,
    StandardCombineInput,
    StandardDispatcher,
    StandardDispatchOutput,
    bf16_as_is,
    debug,
    localize,
)
from moe_typed.routing import LocalIds, Settled
from moe_typed.runners import Runner
from moe_typed.stages import FlatRowsInput, RunnerInput, StandardCarry, SummedRowsOutput
from moe_typed.table import STANDARD_FLAT_ROWS

# ---- the untyped side --------------------------------------------------------------------------------------------------------------


class DispatchFormat(enum.Enum):
    """The tags of dispatch outputs."""

    STANDARD = "standard"
    DEEPEP_NORMAL = "deepep_normal"


class Backend(enum.Enum):
    """The names of runners."""

    TRITON = "triton"
    AITER = "aiter"


class UntypedTopK(NamedTuple):
    """What top-k selection returns."""

    topk_weights: Tensor
    topk_ids: Tensor
    router_logits: Tensor


class UntypedDispatchOutput(NamedTuple):
    """What dispatch returns."""

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_output: UntypedTopK
    hidden_states_pre_quant: Tensor | None = None

    @property
    def format(self) -> DispatchFormat:
        """Return the tag."""
        return DispatchFormat.STANDARD


class UntypedCombineInput(NamedTuple):
    """What combine takes."""

    hidden_states: Tensor


@dataclass
class UntypedConfig:
    """The part of a layer's config that is read here."""

    routed_scaling_factor: float | None


@dataclass
class TritonInput:
    """What the triton core takes."""

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor
    sorted_token_ids: Tensor
    expert_ids: Tensor
    num_tokens_post_padded: Tensor


@dataclass
class AiterInput:
    """What the aiter core takes."""

    hidden_states: Tensor
    topk_weights: Tensor
    topk_ids: Tensor


@dataclass
class UntypedRunnerOutput:
    """What a core returns."""

    hidden_states: Tensor


State = dict[str, object]
Pre = Callable[[UntypedDispatchOutput, UntypedConfig, State], object]
Post = Callable[[UntypedRunnerOutput, UntypedConfig, State], UntypedCombineInput]

PRE: dict[tuple[str, str], Pre] = {}
POST: dict[tuple[str, str], Post] = {}
KERNEL_CONFIG = {"BLOCK_SIZE_M": 16}
SORTED = torch.empty(0, dtype=torch.int32)  # what an alignment kernel would return


def get_pre(dispatched: DispatchFormat, backend: Backend) -> Pre:
    """Look a pre function up."""
    function = PRE.get((dispatched.value, backend.value))
    assert function is not None, f"no pre for {dispatched} and {backend}"
    return function


def get_post(backend: Backend, combined: DispatchFormat) -> Post:
    """Look a post function up."""
    function = POST.get((backend.value, combined.value))
    assert function is not None, f"no post for {backend} and {combined}"
    return function


def triton_pre(dispatched: UntypedDispatchOutput, _config: UntypedConfig, state: State) -> TritonInput:
    """Leave the kernel configs in the state."""
    hidden_states, topk_output = dispatched.hidden_states, dispatched.topk_output
    topk_weights, topk_ids, _ = topk_output
    state["config"] = KERNEL_CONFIG
    state["down_config"] = None
    state["down_moe_use_tma"] = False
    state["up_moe_use_tma"] = False
    return TritonInput(
        hidden_states=hidden_states,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        sorted_token_ids=SORTED,
        expert_ids=SORTED,
        num_tokens_post_padded=SORTED,
    )


def aiter_pre(dispatched: UntypedDispatchOutput, _config: UntypedConfig, _state: State) -> AiterInput:
    """Hand rows and routes over."""
    topk_weights, topk_ids, _ = dispatched.topk_output
    return AiterInput(hidden_states=dispatched.hidden_states, topk_weights=topk_weights, topk_ids=topk_ids)


def untyped_post(output: UntypedRunnerOutput, config: UntypedConfig, _state: State) -> UntypedCombineInput:
    """Scale, if the layer scales."""
    hidden_states = output.hidden_states
    if config.routed_scaling_factor is not None:
        hidden_states = hidden_states * config.routed_scaling_factor
    return UntypedCombineInput(hidden_states=hidden_states)


PRE[DispatchFormat.STANDARD.value, Backend.TRITON.value] = triton_pre
PRE[DispatchFormat.STANDARD.value, Backend.AITER.value] = aiter_pre
POST[Backend.TRITON.value, DispatchFormat.STANDARD.value] = untyped_post
POST[Backend.AITER.value, DispatchFormat.STANDARD.value] = untyped_post


class TritonCore:
    """A core that computes nothing, and reads from the state what the real one reads."""

    def run(self, runner_input: TritonInput, state: State) -> UntypedRunnerOutput:
        """Return the rows as they came."""
        _ = state["config"], state["down_config"], state["down_moe_use_tma"], state["up_moe_use_tma"]
        return UntypedRunnerOutput(hidden_states=runner_input.hidden_states)


class AiterCore:
    """A core that computes nothing."""

    def run(self, runner_input: AiterInput, _state: State) -> UntypedRunnerOutput:
        """Return the rows as they came."""
        return UntypedRunnerOutput(hidden_states=runner_input.hidden_states)


class UntypedRunner:
    """The frame: resolve by names, and hand the dict along."""

    def __init__(self, backend: Backend, core: TritonCore | AiterCore, config: UntypedConfig) -> None:
        self.backend = backend
        self.run_core = cast("Callable[[object, State], UntypedRunnerOutput]", core.run)
        self.config = config
        self.fused_func: Callable[..., UntypedCombineInput] | None = None
        self.down_gemm_overlap_args: object | None = None
        self.meta_overlap_args: object | None = None

    def run(self, dispatched: UntypedDispatchOutput) -> UntypedCombineInput:
        """Return the combine input of one dispatch output."""
        if self.fused_func is not None:
            return self.fused_func(dispatched, self.config)
        state: State = {}
        if self.down_gemm_overlap_args is not None:
            state["down_gemm_overlap_args"] = self.down_gemm_overlap_args
        if self.meta_overlap_args is not None:
            state["meta_overlap_args"] = self.meta_overlap_args
        tag = dispatched.format
        runner_input = get_pre(tag, self.backend)(dispatched, self.config, state)
        output = self.run_core(runner_input, state)
        return get_post(self.backend, tag)(output, self.config, state)


def untyped_layer(runner: UntypedRunner, rows: Bf16Rows, topk: UntypedTopK) -> Callable[[], Tensor]:
    """Return one call of the untyped layer."""
    hidden_states = rows.data

    def call() -> Tensor:
        (combined,) = runner.run(UntypedDispatchOutput(hidden_states=hidden_states, hidden_states_scale=None, topk_output=topk))
        return combined

    return call


# ---- the typed side ------------------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class NoRunner(Runner[FlatRowsInput, SummedRowsOutput]):
    """A runner that computes nothing."""

    name: ClassVar[str] = "nothing"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (FlatRowsInput,)

    @override
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput:
        return SummedRowsOutput(runner_input.payload.data)


def typed_layer(rows: Bf16Rows, routing: Routing[LocalIds, Settled]) -> Callable[[], Tensor]:
    """Return one call of the typed layer, its way through the table resolved once, as ``MoELayer`` does."""
    experts = STANDARD_FLAT_ROWS.using(NoRunner())
    combine = StandardDispatcher(bf16_as_is).combine
    return lambda: combine(experts(StandardDispatchOutput(rows, routing)))


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
    off, layout = DebugLevel.OFF, DebugLevel.LAYOUT
    return {
        "untyped layer (standard, triton)": (untyped_layer(UntypedRunner(Backend.TRITON, TritonCore(), config), rows, topk), off),
        "untyped layer (standard, aiter)": (untyped_layer(UntypedRunner(Backend.AITER, AiterCore(), config), rows, topk), off),
        "typed layer": (typed, off),
        "typed layer, debug layout": (typed, layout),
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


def main() -> None:
    """Print the medians and the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--calls", type=int, default=5000)
    arguments = parser.parse_args()
    times = measure(variants(), repeats=arguments.repeats, calls=arguments.calls)
    for name, us in times.items():
        print(f"{name:45s} {us:8.3f} us")
    typed = times["typed layer"]
    for name in ("untyped layer (standard, triton)", "untyped layer (standard, aiter)"):
        print(f"typed / {name:37s} {typed / times[name]:8.3f}")


if __name__ == "__main__":
    main()

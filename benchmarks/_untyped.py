"""The untyped frame that the typed stages replace, as it stands between dispatch and combine in SGLang 0.5.23: the host's part alone.

* a dispatch output is a NamedTuple with a ``format`` property that returns an enum member; a top-k output is a NamedTuple of three;
* pre and post functions are registered under pairs of strings, and looked up in every forward through the enum members' ``value``; a pair
  that is absent is an assertion there;
* a fresh dict lives for one run; it is seeded with the two overlap arguments; pre writes keys, and core and post read them;
* runner inputs and outputs are plain dataclasses, combine inputs are NamedTuples;
* post applies the routed scaling factor where the layer's config has one; here it has none, as on the typed side.

Pairs: (standard, triton) with its four keys, (standard, aiter) with none, and (deepep_normal, aiter) as MoRI's dispatch outputs take it: recognised
by an attribute, with three keys.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from moe_typed import Bf16Rows


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


class UntypedMoriDispatchOutput(NamedTuple):
    """What MoRI's dispatch returns; ``num_recv_tokens_per_expert`` is a total."""

    hidden_states: Tensor
    hidden_states_scale: Tensor | None
    topk_ids: Tensor
    topk_weights: Tensor
    num_recv_tokens_per_expert: Tensor
    origin_topk_ids: Tensor
    origin_topk_weights: Tensor
    out_dtype: torch.dtype
    expert_output: Tensor | None = None
    recv_cap: int = 0

    @property
    def format(self) -> DispatchFormat:
        """Return the tag: that of another library's."""
        return DispatchFormat.DEEPEP_NORMAL


class UntypedMoriCombineInput(NamedTuple):
    """What MoRI's combine takes."""

    hidden_states: Tensor
    topk_ids: Tensor
    topk_weights: Tensor


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
    quant_type: str = "none"
    a1_scale: Tensor | None = None
    num_local_tokens: Tensor | None = None
    output_dtype: torch.dtype | None = None
    output: Tensor | None = None


@dataclass
class UntypedRunnerOutput:
    """What a core returns."""

    hidden_states: Tensor


State = dict[str, object]
Pre = Callable[..., object]
Post = Callable[[UntypedRunnerOutput, UntypedConfig, State], UntypedCombineInput | UntypedMoriCombineInput]

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


def _mori_quant_type(weights: str, dispatched: UntypedMoriDispatchOutput) -> str:
    """Decide how AITER is to read the rows, from their dtype and from whether there are scales."""
    scale = dispatched.hidden_states_scale
    if scale is None:
        return weights
    if dispatched.hidden_states.dtype == torch.float4_e2m1fn_x2:
        return "per_1x32"
    return "per_1x32" if scale.dtype == torch.float8_e8m0fnu else "per_128x128"


def mori_pre(dispatched: UntypedMoriDispatchOutput, _config: UntypedConfig, state: State) -> AiterInput:
    """Recognise MoRI, cut what is beyond the cap, and leave in the state what combine needs."""
    is_mori = hasattr(dispatched, "origin_topk_ids")
    hidden_states, scale = dispatched.hidden_states, dispatched.hidden_states_scale
    topk_ids, topk_weights, output = dispatched.topk_ids, dispatched.topk_weights, dispatched.expert_output
    if dispatched.recv_cap:
        hidden_states, topk_ids, topk_weights = (part[: dispatched.recv_cap] for part in (hidden_states, topk_ids, topk_weights))
        scale = None if scale is None else scale[: dispatched.recv_cap]
        output = None if output is None else output[: dispatched.recv_cap]
    state["aiter_combine_topk_ids"] = dispatched.origin_topk_ids
    state["aiter_combine_topk_weights"] = dispatched.origin_topk_weights
    state["aiter_combine_is_mori"] = is_mori
    return AiterInput(
        hidden_states=hidden_states,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        quant_type=_mori_quant_type("none", dispatched),
        a1_scale=scale,
        num_local_tokens=dispatched.num_recv_tokens_per_expert,
        output_dtype=dispatched.out_dtype,
        output=output,
    )


def mori_post(output: UntypedRunnerOutput, _config: UntypedConfig, state: State) -> UntypedMoriCombineInput:
    """Take from the state what pre left there."""
    assert state["aiter_combine_is_mori"]
    return UntypedMoriCombineInput(
        hidden_states=output.hidden_states,
        topk_ids=cast("Tensor", state["aiter_combine_topk_ids"]),
        topk_weights=cast("Tensor", state["aiter_combine_topk_weights"]),
    )


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
PRE[DispatchFormat.DEEPEP_NORMAL.value, Backend.AITER.value] = mori_pre
POST[Backend.AITER.value, DispatchFormat.DEEPEP_NORMAL.value] = mori_post


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
        self.fused_func: Callable[..., UntypedCombineInput | UntypedMoriCombineInput] | None = None
        self.down_gemm_overlap_args: object | None = None
        self.meta_overlap_args: object | None = None

    def run(self, dispatched: UntypedDispatchOutput | UntypedMoriDispatchOutput) -> UntypedCombineInput | UntypedMoriCombineInput:
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
        return runner.run(UntypedDispatchOutput(hidden_states=hidden_states, hidden_states_scale=None, topk_output=topk))[0]

    return call


def untyped_mori_layer(runner: UntypedRunner, rows: Bf16Rows, ids: Tensor, weights: Tensor, received: Tensor) -> Callable[[], Tensor]:
    """Return one call of the untyped layer behind MoRI."""
    hidden_states = rows.data

    def call() -> Tensor:
        dispatched = UntypedMoriDispatchOutput(
            hidden_states=hidden_states,
            hidden_states_scale=None,
            topk_ids=ids,
            topk_weights=weights,
            num_recv_tokens_per_expert=received,
            origin_topk_ids=ids,
            origin_topk_weights=weights,
            out_dtype=torch.bfloat16,
        )
        return runner.run(dispatched)[0]

    return call

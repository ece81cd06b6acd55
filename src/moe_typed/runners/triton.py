"""The Triton runner: sort routes, gather and multiply, activate, multiply and scatter, sum. Five steps, none of which waits for the device.

Products accumulate in float32; what lies between the steps has the model's dtype. Over fp8 weights the rows between the products are quantised
for each 128 channels, as the payload was.
"""

from typing import ClassVar, TypeAlias, final, overload

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..boundary import boundary
from ..formats import (
    Bf16ExpertWeights,
    Bf16Rows,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    GateUpOrder,
    Interleaved,
    UpGate,
)
from ..ops.activation.spec import Gate, Split
from ..ops.align.reference import align
from ..ops.grouped_gemm.tiles import choose_block_m
from ..routing import Ids, Routing
from ..stages import FlatRowsInput, RunnerInput, SummedRowsOutput
from .activations import Activation, SiluAndMul, SwigluOai
from .base import PreparedWeights, Runner, UnsupportedError

try:
    from triton import knobs

    from ..ops.activation.triton import activate, activate_fp8
    from ..ops.grouped_gemm.triton import gather_gemm, scatter_gemm
    from ..ops.sum_routes.triton import sum_routes
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    raise ImportError("moe_typed.runners.triton needs Triton: pip install 'moe-typed[triton]'") from error

TritonExpertWeights: TypeAlias = (
    Bf16ExpertWeights[GateUpOrder] | Fp16ExpertWeights[GateUpOrder] | Fp32ExpertWeights[GateUpOrder] | Fp8Block128ExpertWeights[GateUpOrder]
)


@final
@attrs.frozen(eq=False)
class TritonRunner(Runner[FlatRowsInput, SummedRowsOutput]):
    """Run the experts as grouped GEMMs over rows that are sorted by expert."""

    name: ClassVar[str] = "triton"
    inputs: ClassVar[tuple[type[RunnerInput], ...]] = (FlatRowsInput,)
    weights: TritonExpertWeights
    split: Split
    gate: Gate
    out_dtype: torch.dtype

    @override
    def run(self, runner_input: FlatRowsInput, /) -> SummedRowsOutput:
        weights, payload, routing = self.weights, runner_input.payload, runner_input.routing
        rows, top_k = routing.topk_ids.shape
        live = _live_count(routing)
        block_m = choose_block_m(rows * top_k, weights.num_experts)
        slots, block_expert = align(routing.topk_ids, live, weights.num_experts, block_m)
        scale = payload.scale if isinstance(payload, Fp8Block128Rows) else None
        w13_scale, w2_scale = (weights.w13_scale, weights.w2_scale) if isinstance(weights, Fp8Block128ExpertWeights) else (None, None)

        joined = gather_gemm(payload.data, scale, weights.w13, w13_scale, weights.b13, slots, block_expert, top_k, self.out_dtype)
        if w2_scale is None:
            inner, inner_scale = activate(joined, block_expert, self.split, self.gate), None
        else:
            inner, inner_scale = activate_fp8(joined, block_expert, self.split, self.gate)
        results = scatter_gemm(inner, inner_scale, weights.w2, w2_scale, weights.b2, slots, block_expert, rows * top_k, self.out_dtype)
        total = sum_routes(results, routing.topk_ids, routing.topk_weights, live, weights.num_experts, self.out_dtype)
        return SummedRowsOutput(total)


@final
@boundary
class TritonBf16Weights(PreparedWeights[TritonRunner, Bf16Rows]):
    """Bfloat16 weights for the Triton runner."""

    weights: Bf16ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> TritonRunner:
        return _runner(self.weights, activation, torch.bfloat16)


@final
@boundary
class TritonFp16Weights(PreparedWeights[TritonRunner, Fp16Rows]):
    """Float16 weights for the Triton runner."""

    weights: Fp16ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> TritonRunner:
        return _runner(self.weights, activation, torch.float16)


@final
@boundary
class TritonFp32Weights(PreparedWeights[TritonRunner, Fp32Rows]):
    """Float32 weights for the Triton runner: exact products, without tensor cores."""

    weights: Fp32ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> TritonRunner:
        return _runner(self.weights, activation, torch.float32)


@final
@boundary
class TritonFp8Block128Weights(PreparedWeights[TritonRunner, Fp8Block128Rows]):
    """Block-128 fp8 weights for the Triton runner, with rows in fp8 too (W8A8)."""

    weights: Fp8Block128ExpertWeights[GateUpOrder]

    @override
    def runner(self, activation: Activation) -> TritonRunner:
        return _runner(self.weights, activation, torch.bfloat16)


@overload
def prepare_triton(weights: Bf16ExpertWeights[GateUpOrder]) -> TritonBf16Weights: ...
@overload
def prepare_triton(weights: Fp16ExpertWeights[GateUpOrder]) -> TritonFp16Weights: ...
@overload
def prepare_triton(weights: Fp32ExpertWeights[GateUpOrder]) -> TritonFp32Weights: ...
@overload
def prepare_triton(weights: Fp8Block128ExpertWeights[GateUpOrder]) -> TritonFp8Block128Weights: ...
def prepare_triton(
    weights: TritonExpertWeights,
) -> TritonBf16Weights | TritonFp16Weights | TritonFp32Weights | TritonFp8Block128Weights:
    """Return checkpoint-layout weights as the Triton runner takes them: in any gate/up order, without a copy.

    Raises: TypeError for anything else, weights that are prepared already among them. UnsupportedError where their device cannot multiply them.
    """
    match weights:
        case Bf16ExpertWeights():
            _require_device(weights)
            return TritonBf16Weights(weights)
        case Fp16ExpertWeights():
            _require_device(weights)
            return TritonFp16Weights(weights)
        case Fp32ExpertWeights():
            _require_device(weights)
            return TritonFp32Weights(weights)
        case Fp8Block128ExpertWeights():
            _require_device(weights)
            return TritonFp8Block128Weights(weights)
        case _:
            raise TypeError(f"prepare_triton takes bf16, fp16, fp32 or block-128 fp8 expert weights; got {type(weights).__qualname__}")


# The first device generation whose tensor cores multiply e4m3 (Ada).
_FP8_CAPABILITY = (8, 9)


def _require_device(weights: TritonExpertWeights) -> None:
    device, name = weights.w13.device, weights.format.name
    if device.type != "cuda":
        if not knobs.runtime.interpret:
            raise UnsupportedError(f"the weights are on {device}, and Triton runs on GPUs (on a CPU with TRITON_INTERPRET=1 alone)")
        if isinstance(weights, (Bf16ExpertWeights, Fp8Block128ExpertWeights)):
            raise UnsupportedError(f"Triton's CPU interpreter multiplies bf16 and rounds to fp8 wrongly, so that {name} weights need a GPU")
    elif isinstance(weights, Fp8Block128ExpertWeights):
        if torch.version.hip is not None:
            raise UnsupportedError(f"{name} weights are float8_e4m3fn, which the Triton runner multiplies on NVIDIA GPUs only")
        capability = torch.cuda.get_device_capability(device)
        if capability < _FP8_CAPABILITY:
            raise UnsupportedError(f"{name} weights need compute capability 8.9 or later; {device} has {capability[0]}.{capability[1]}")


def _runner(weights: TritonExpertWeights, activation: Activation, out_dtype: torch.dtype) -> TritonRunner:
    return TritonRunner(weights, _split(weights.order, weights.inter), _gate(activation), out_dtype)


def _split(order: type[GateUpOrder], inter: int) -> Split:
    splits = {GateUp: Split(0, inter, 1), UpGate: Split(inter, 0, 1), Interleaved: Split(0, 1, 2)}
    if order not in splits:
        raise UnsupportedError(f"the Triton runner does not know the gate/up order {order.__qualname__}")
    return splits[order]


def _gate(activation: Activation) -> Gate:
    match activation:
        case SiluAndMul():
            return Gate(alpha=1.0, limit=float("inf"), shift=0.0)
        case SwigluOai(alpha=alpha, limit=limit):
            return Gate(alpha, limit, shift=1.0)
        case _:
            raise UnsupportedError(f"the Triton runner does not know the activation {activation.name!r}")


def _live_count(routing: Routing[Ids]) -> Tensor | None:
    """Return the live rows as int32 (1,) on the device, or None where every row is live."""
    if not isinstance(routing.live, int):
        return routing.live.count
    ids = routing.topk_ids
    return None if routing.live == ids.shape[0] else torch.full((1,), routing.live, dtype=torch.int32, device=ids.device)

"""The Triton runner: sort routes, gather and multiply, activate, multiply and scatter, sum. Five steps, none of which waits for the device.

Products accumulate in float32; what lies between the steps has the model's dtype. Over fp8 weights the rows between the products are quantised
for each 128 channels, as the payload was.
"""

from typing import ClassVar, final

import attrs
import torch
from torch import Tensor
from triton import knobs
from typing_extensions import override

from ...formats import Bf16ExpertWeights, Fp8Block128ExpertWeights, Fp8Block128Rows, GateUp, GateUpOrder, Interleaved, UpGate
from ...ops.activation.spec import Gate, Split
from ...ops.activation.triton import activate, activate_fp8
from ...ops.align.reference import align
from ...ops.grouped_gemm.tiles import choose_block_m
from ...ops.grouped_gemm.triton import gather_gemm, scatter_gemm
from ...ops.sum_routes.triton import sum_routes
from ...routing import Ids, Routing
from ...stages import FlatRowsInput, RunnerInput, SummedRowsOutput
from ..activations import Activation, SiluAndMul, SwigluOai
from ..base import FlatRowsMeetWeights, Runner, UnsupportedError
from .weights import TritonExpertWeights


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
        FlatRowsMeetWeights(self.weights, runner_input)
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


# The first device generation whose tensor cores multiply e4m3 (Ada).
_FP8_CAPABILITY = (8, 9)


def require_device(weights: TritonExpertWeights) -> None:
    """Raise UnsupportedError where the device of the weights cannot multiply them."""
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


def make_runner(weights: TritonExpertWeights, activation: Activation, out_dtype: torch.dtype) -> TritonRunner:
    """Return the runner over prepared weights. Raises: UnsupportedError for an activation or an order that the kernels do not know."""
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

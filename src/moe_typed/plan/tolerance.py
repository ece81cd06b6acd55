"""How far a planned layer may be from the float32 reference: by the formats that its values pass through, not by what happens to come out."""

import math
from typing import Final

import torch
from torch import Tensor

from ..runners.acceptance import RunnerName
from .planner import find_route
from .report import PlanReport
from .ways import DENSE_MODELS

# The most that one rounding changes a value by, relative to it: half a unit in the last place, 2^-(explicit mantissa bits + 1).
_ROUNDOFF: Final = {
    torch.float32: 2.0**-24,
    torch.bfloat16: 2.0**-8,
    torch.float16: 2.0**-11,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e4m3fnuz: 2.0**-4,
    torch.float4_e2m1fn_x2: 2.0**-2,
    torch.int8: 5 / 254,  # half of amax / 127, where amax of a thousand normal values is below 5 of their standard deviations
}
# Gate and up both see the rounded rows, and the activation may be as steep as gate * sigmoid'(gate) adds to it (below 1.1): twice, rounded up.
_PASSES: Final = 2
# Float32 sums over hidden and inter, in whatever order: sqrt(8192) * 2^-24 is about 5e-6, a hundred times below a bfloat16 rounding.
_SUMMATION: Final = 1e-5


def tolerance(report: PlanReport) -> float:
    """Return the bound on the relative error (Frobenius norms) of the layer that the plan describes."""
    route, _ = find_route(report.problem, report.environment)
    wire = _ROUNDOFF[route.wire.arrives.format.data_dtype]
    model = _ROUNDOFF[DENSE_MODELS[report.problem.model].rows.format.data_dtype]
    # A runner rounds what lies between its GEMMs to the dtype of the payload that it took; AITER rounds it, and dense rows, to that of its kernels.
    inner = _ROUNDOFF[route.taken.format.data_dtype]
    if route.acceptance.runner is RunnerName.AITER:
        own = _ROUNDOFF[route.acceptance.payloads[-1].format.data_dtype]
        wire, inner = max(wire, own), max(inner, own)
    return _PASSES * wire + inner + model + _SUMMATION


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return |got - expected| / |expected| in Frobenius norms; 0 for empty tensors, infinity where exactly one of them is not finite."""
    difference = _norm(got.to(torch.float32) - expected.to(torch.float32))
    size = _norm(expected.to(torch.float32))
    if difference == 0.0:
        return 0.0
    ratio = difference / size if size else float("inf")
    return float("inf") if math.isnan(ratio) else ratio


def _norm(tensor: Tensor) -> float:
    return float(tensor.square().sum().sqrt())

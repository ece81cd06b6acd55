"""Layers to measure: random weights on the current CUDA device, and the tuned runner over them."""

from typing import TypeAlias

import torch
from torch import Tensor

from ..formats import Bf16ExpertWeights, Fp8Block128ExpertWeights, GateUp
from ..ops.activation.spec import GROUP
from ..ops.product_plans.files import LayerKey
from ..runners import SiluAndMul
from ..runners.triton import prepare_triton
from ..runners.triton.runner import TritonRunner

MeasuredWeights: TypeAlias = Bf16ExpertWeights[GateUp] | Fp8Block128ExpertWeights[GateUp]


def random_weights(layer: LayerKey) -> MeasuredWeights:
    """Return normal weights, scaled so that rows keep their size."""
    (w13, s13), (w2, s2) = (_matrices(layer, rows, columns) for rows, columns in ((2 * layer.inter, layer.hidden), (layer.hidden, layer.inter)))
    return Bf16ExpertWeights(w13, w2, GateUp) if s13 is None or s2 is None else Fp8Block128ExpertWeights(w13, w2, s13, s2, GateUp)


def tuned_runner(weights: MeasuredWeights) -> TritonRunner:
    """Return the runner that follows product plans, with silu."""
    runner = prepare_triton(weights).runner(SiluAndMul())
    if not isinstance(runner, TritonRunner):
        raise TypeError(f"silu is among the tuned runner's activations, but made {type(runner).__qualname__}")
    return runner


def _matrices(layer: LayerKey, rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
    is_fp8, std = layer.format == "fp8", columns**-0.5
    made = torch.empty(layer.experts, rows, columns, dtype=torch.float8_e4m3fn if is_fp8 else torch.bfloat16, device="cuda")
    for matrix in made:  # one at a time: normal numbers in bfloat16 before they are rounded
        matrix.copy_(torch.empty(rows, columns, dtype=torch.bfloat16, device="cuda").normal_(std=1.0 if is_fp8 else std))
    scale = (torch.rand(layer.experts, rows // GROUP, columns // GROUP, device="cuda") + 0.5) * std if is_fp8 else None
    return made, scale

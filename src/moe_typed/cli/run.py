"""``moe-typed run``: one MoE layer of a checkpoint, through the typed pipeline, against the float32 reference."""

from pathlib import Path
from typing import Final, TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from torch import Tensor

from ..capture import Trace, timed, trace
from ..checkpoints import Checkpoint, LayerWeights, open_checkpoint
from ..checkpoints import Progress as LoadProgress
from ..dispatchers import MoELayer
from ..formats import Bf16Rows, Fp16Rows, Fp32Rows, Payload
from ..plan import MoEProblem, PlanReport, build_layer, plan, probe_environment, relative_error, tolerance
from ..routing import LogicalIds, Routing, localize
from ..runners import reference_experts
from ..stages import StandardCombineInput
from .options import Request, RunOptions
from .render import print_crossings, print_plan, print_times

M = TypeVar("M", Bf16Rows, Fp16Rows, Fp32Rows)

_ROWS: Final[dict[torch.dtype, type[Bf16Rows] | type[Fp16Rows] | type[Fp32Rows]]] = {
    torch.bfloat16: Bf16Rows,
    torch.float16: Fp16Rows,
    torch.float32: Fp32Rows,
}


def load_layer(checkpoint: Checkpoint, layer: int | None, device: torch.device, console: Console) -> LayerWeights:
    """Load a layer under a progress bar; None is the first that is MoE. Raises: CheckpointError; ValueError when no layer is MoE."""
    if layer is None and not checkpoint.moe_layers:
        raise ValueError(f"{checkpoint.directory}: no layer of this checkpoint is MoE")
    number = checkpoint.moe_layers[0] if layer is None else layer
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(f"loading layer {number}", total=None)

        def show(step: LoadProgress) -> None:
            progress.update(task, completed=step.done, total=step.total)

        weights = checkpoint.load_layer(number, progress=show, device=device)
    # A path is no markup, and is not wrapped.
    console.print(f"{checkpoint.directory}: {checkpoint.family.name}, layer {number}", markup=False, emoji=False, soft_wrap=True)
    return weights


def problem_of(weights: LayerWeights, rows: int, request: Request) -> MoEProblem:
    """Return the planning problem of a loaded layer."""
    return MoEProblem(
        num_experts=weights.num_experts,
        top_k=weights.top_k,
        hidden=weights.hidden,
        inter=weights.inter,
        model=_ROWS[weights.model_dtype].format.name,
        weights=weights.experts.format.name,
        activation=weights.activation.name,
        rows=rows,
        wire=request.wire,
        runner=request.runner,
    )


def _reference(weights: LayerWeights, hidden_states: Tensor, routing: Routing[LogicalIds]) -> Tensor:
    local = localize(routing, 0, routing.num_experts)
    total = reference_experts(hidden_states.to(torch.float32), local.topk_ids, local.topk_weights, weights.experts, weights.activation)
    return routing.scaling.settle(total)


def _trace_layer(report: PlanReport, weights: LayerWeights, hidden_states: Tensor, routing: Routing[LogicalIds]) -> Trace:
    match _ROWS[weights.model_dtype](hidden_states):
        case Bf16Rows() as rows:
            return _trace_warm(build_layer(report, Bf16Rows, weights.experts, weights.activation), rows, routing)
        case Fp16Rows() as rows:
            return _trace_warm(build_layer(report, Fp16Rows, weights.experts, weights.activation), rows, routing)
        case Fp32Rows() as rows:
            return _trace_warm(build_layer(report, Fp32Rows, weights.experts, weights.activation), rows, routing)


def _trace_warm(layer: MoELayer[M, Payload, StandardCombineInput], rows: M, routing: Routing[LogicalIds]) -> Trace:
    """Trace the second call: the first compiles kernels and allocates."""
    layer(rows, routing)
    return trace(layer, rows, routing)


def run_layer(weights: LayerWeights, options: RunOptions, console: Console) -> bool:
    """Run a loaded layer on random hidden states, print what happened, and return whether the error is within the plan's tolerance.

    The hidden states are normal with variance 1, as an RMS norm leaves them.
    """
    device = options.request.device
    generator = torch.Generator().manual_seed(options.seed)
    hidden_states = torch.randn(options.tokens, weights.hidden, generator=generator).to(device=device, dtype=weights.model_dtype)

    report = plan(problem_of(weights, options.tokens, options.request), probe_environment(device))
    print_plan(console, report)

    weights.route(hidden_states)  # the first call allocates
    routing, seconds = timed(device, weights.route, hidden_states)
    times = [("route", seconds)]
    traced = _trace_layer(report, weights, hidden_states, routing)
    print_crossings(console, traced)
    times += [(item.stage, item.seconds) for item in traced.times]
    if weights.shared is not None:
        _, seconds = timed(device, weights.complete, traced.output, hidden_states)
        times.append(("shared expert", seconds))
    print_times(console, times)

    error = relative_error(traced.output, _reference(weights, hidden_states, routing))
    bound = tolerance(report)
    within = error <= bound
    verdict = "[green]within[/green]" if within else "[red]OUT OF[/red]"
    console.print(f"error against the float32 reference: {error:.2e} (relative, Frobenius norm), {verdict} the tolerance {bound:.2e}")
    return within


def run_checkpoint(folder: Path, options: RunOptions, console: Console) -> bool:
    """Run one layer of a checkpoint directory; as ``run_layer``. Raises: CheckpointError for a bad checkpoint; PlanError when no runner can do it."""
    return run_layer(load_layer(open_checkpoint(folder), options.layer, options.request.device, console), options, console)

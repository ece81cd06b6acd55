"""``moe-typed plan``: say which way a layer would take."""

import argparse
from pathlib import Path

import attrs
import torch
from rich.console import Console

from ..checkpoints import open_checkpoint
from ..plan import Backend, MoEProblem, plan, probe_environment, to_json
from .options import Request, request, whole
from .render import print_plan
from .run import load_layer, problem_of

_SIZES = ("experts", "top_k", "hidden", "inter")
_FORMATS = {"model": "bf16", "weights": "bf16", "activation": "silu"}


def add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which layer: a checkpoint, or the layer's sizes and formats, and over how many ranks it is spread."""
    parser.add_argument("checkpoint", type=Path, nargs="?", help="a layer of this checkpoint; else give the sizes")
    parser.add_argument("--layer", type=int, default=None, help="which layer of the checkpoint (default: the first that is MoE)")
    for name in _SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=whole(1))
    parser.add_argument("--weights", "--format", dest="weights", help="weight format, such as bf16, fp8-block128, mxfp8 (default: bf16)")
    backends = [backend.value for backend in Backend]
    parser.add_argument("--backend", choices=backends, default=Backend.STANDARD.value, help="how rows reach the ranks of their experts")
    parser.add_argument("--ranks", type=whole(1), default=1, help="over how many ranks the experts are spread (default: 1)")
    parser.set_defaults(model=None, activation=None, rows=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments: which layer, and what its plan depends on beside."""
    add_layer_arguments(parser)
    parser.add_argument("--model", help="dtype of the model's rows: bf16, fp16 or fp32 (default: bf16)")
    parser.add_argument("--activation", help="silu or swiglu-oai (default: silu)")
    parser.add_argument("--rows", type=whole(0), default=64, help="rows that the bytes are given for (default: 64)")


def _from_sizes(arguments: argparse.Namespace, asked: Request) -> MoEProblem:
    missing = [f"--{name.replace('_', '-')}" for name in _SIZES if getattr(arguments, name) is None]
    if missing:
        raise ValueError(f"give a checkpoint, or {', '.join(missing)} as well")
    return MoEProblem(
        num_experts=arguments.experts,
        top_k=arguments.top_k,
        hidden=arguments.hidden,
        inter=arguments.inter,
        model=arguments.model or _FORMATS["model"],
        weights=arguments.weights or _FORMATS["weights"],
        activation=arguments.activation or _FORMATS["activation"],
        rows=arguments.rows,
        wire=asked.wire,
        runner=asked.runner,
    )


def problem_of_arguments(arguments: argparse.Namespace, asked: Request, progress: Console) -> MoEProblem:
    """Return the problem of the layer that the arguments name. Raises: CheckpointError, ValueError."""
    if arguments.checkpoint is None:
        problem = _from_sizes(arguments, asked)
    else:
        given = [f"--{name.replace('_', '-')}" for name in (*_SIZES, *_FORMATS) if getattr(arguments, name) is not None]
        if given:
            raise ValueError(f"the checkpoint says what {', '.join(given)} would; give one or the other")
        weights = load_layer(open_checkpoint(arguments.checkpoint), arguments.layer, torch.device("cpu"), progress)
        problem = problem_of(weights, arguments.rows, asked)
    return attrs.evolve(problem, backend=Backend(arguments.backend), ranks=arguments.ranks)


def print_report(arguments: argparse.Namespace, console: Console) -> None:
    """Print the plan as tables, or as JSON. Raises: PlanError, CheckpointError, ValueError."""
    asked = request(arguments.runner, arguments.wire, arguments.device)
    # JSON goes to standard output alone, so that it can be piped.
    problem = problem_of_arguments(arguments, asked, Console(stderr=True) if arguments.json else console)
    report = plan(problem, probe_environment(asked.device))
    if arguments.json:
        print(to_json(report))
    else:
        print_plan(console, report)

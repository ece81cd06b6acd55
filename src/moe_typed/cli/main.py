"""The ``moe-typed`` command.

Exit codes: 0 good, 1 numerics out of tolerance, 2 bad input (with one message on standard error), 130 tuning was interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from rich.console import Console

from ..boundary import BoundaryError
from ..plan import RunnerRequest, Wire
from ..runners import UnsupportedError
from . import demo, plan, run, tune
from .options import RunOptions, request, whole
from .render import print_formats

GOOD: Final = 0
OUT_OF_TOLERANCE: Final = 1
BAD_INPUT: Final = 2
_PIPED_WIDTH: Final = 160  # columns, where there is no terminal to ask: class names stay whole


def _add_choices(parser: argparse.ArgumentParser, wire: str) -> None:
    parser.add_argument("--runner", choices=[item.value for item in RunnerRequest], default="auto", help="who runs the experts (default: auto)")
    parser.add_argument(
        "--wire", choices=[item.value for item in Wire], default=wire, help=f"the payload format that is dispatched (default: {wire})"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ... (default: cuda where there is one)")


def _add_run(parser: argparse.ArgumentParser, wire: str) -> None:
    _add_choices(parser, wire)
    parser.add_argument("--layer", type=int, default=None, help="which layer (default: the first that is MoE)")
    parser.add_argument("--tokens", type=whole(0), default=16, help="how many rows of hidden states (default: 16)")
    parser.add_argument("--seed", type=whole(0), default=0, help="seed of the random hidden states (default: 0)")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moe-typed", description="Run, plan and inspect typed MoE layers.")
    commands = parser.add_subparsers(dest="command", required=True)

    run_parser = commands.add_parser("run", help="run one MoE layer of a Hugging Face checkpoint and compare it with the float32 reference")
    run_parser.add_argument("checkpoint", type=Path, help="a folder with config.json and *.safetensors")
    _add_run(run_parser, "auto")

    demo_parser = commands.add_parser("demo", help="write a small checkpoint, run it, and show a mismatch being refused")
    demo_parser.add_argument("--keep", type=Path, default=None, metavar="FOLDER", help="write the checkpoint here and leave it there")
    _add_run(demo_parser, "mxfp8")

    commands.add_parser("formats", help="list every payload and weight format with its facts")

    plan_parser = commands.add_parser("plan", help="say which way a layer would take, and why")
    plan.add_arguments(plan_parser)
    _add_choices(plan_parser, "auto")
    plan_parser.add_argument("--json", action="store_true", help="print the report as JSON")

    tune_parser = commands.add_parser("tune", help="measure which kernels and tiles are fastest for a layer on this GPU")
    tune.add_arguments(tune_parser)
    return parser


def _run_options(arguments: argparse.Namespace) -> RunOptions:
    return RunOptions(
        layer=arguments.layer, tokens=arguments.tokens, seed=arguments.seed, request=request(arguments.runner, arguments.wire, arguments.device)
    )


def _execute(arguments: argparse.Namespace, console: Console) -> int:
    match arguments.command:
        case "plan":
            plan.print_report(arguments, console)
            return GOOD
        case "tune":
            return tune.run(arguments, console)
        case "formats":
            print_formats(console)
            return GOOD
        case "run":
            within = run.run_checkpoint(arguments.checkpoint, _run_options(arguments), console)
        case _:
            within = demo.run_demo(arguments.keep, _run_options(arguments), console)
    return GOOD if within else OUT_OF_TOLERANCE


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        return _execute(arguments, Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH))
    except (BoundaryError, UnsupportedError, ValueError, OSError) as error:
        return _refuse(str(error))
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        return _refuse(f"out of memory: {error}")


def _refuse(message: str) -> int:
    print(f"moe-typed: {message}", file=sys.stderr)
    return BAD_INPUT


def _is_out_of_memory(error: RuntimeError) -> bool:
    """Say whether an allocator of torch raised this: CUDA's has a class of its own, the CPU's only a message."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())

"""What the commands are told, parsed."""

import argparse
from typing import final

import attrs
import torch

from ..plan import RunnerRequest, Wire


@final
@attrs.frozen
class Request:
    """Which runner, which wire, which device."""

    runner: RunnerRequest
    wire: Wire
    device: torch.device


@final
@attrs.frozen
class RunOptions:
    """What ``run`` and ``demo`` share."""

    layer: int | None
    tokens: int
    seed: int
    request: Request


def positive(text: str) -> int:
    """Parse a count of rows: zero is a normal batch, less is not. Raises: ArgumentTypeError."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of rows (0 or more)")
    return value


def request(runner: str, wire: str, device: str) -> Request:
    """Parse the choices. Raises: ValueError for a device that torch does not know or that is not there."""
    return Request(RunnerRequest(runner), Wire(wire), _device(device))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"torch knows no device {name!r}") from None
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"there is no device {name} here; torch sees {torch.cuda.device_count()} CUDA devices")
    return device

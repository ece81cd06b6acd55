"""What the commands are told, parsed."""

import argparse
from collections.abc import Callable
from typing import Final, final

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


_MOST: Final = 2**31 - 1  # no count or size is larger, and torch takes all of them


def whole(minimum: int) -> Callable[[str], int]:
    """Return the parser of a whole number from ``minimum`` on. It raises: ArgumentTypeError."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = -1
        if not minimum <= value <= _MOST:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {minimum} to {_MOST}")
        return value

    return parse


def counts(text: str) -> tuple[int, ...]:
    """Parse whole numbers from 1 on, by commas, into ascending ones, each once. Raises: ArgumentTypeError."""
    return tuple(sorted({whole(1)(one) for one in text.split(",")}))


def request(runner: str, wire: str, device: str) -> Request:
    """Parse the choices. Raises: ValueError for a device that is neither the CPU nor a CUDA device that is there."""
    return Request(RunnerRequest(runner), Wire(wire), _device(device))


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"torch knows no device {name!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the device must be cpu or cuda; got {name!r}")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ValueError(f"there is no device {name} here; torch sees {torch.cuda.device_count()} CUDA devices")
    return device

"""Run a layer one stage at a time, and keep what crossed each boundary and how long each stage took."""

import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast, final

import attrs
import torch
from torch import Tensor

from ..boundary import fields_of, is_boundary
from ..dispatchers import MoELayer
from ..formats import Convert, Payload
from ..routing import LogicalIds, Routing
from ..stages import CombineInput
from ..table import find

Q = ParamSpec("Q")
M = TypeVar("M", bound=Payload)
C = TypeVar("C", bound=CombineInput)
T = TypeVar("T")


@final
@attrs.frozen
class Crossing:
    """One boundary object that passed from one stage to the next: its class, and each tensor in it by path."""

    stage: str
    boundary: str
    tensors: tuple[tuple[str, str], ...]


@final
@attrs.frozen
class StageTime:
    """Wall-clock seconds of one stage, the device's work included."""

    stage: str
    seconds: float


@final
@attrs.frozen(eq=False)
class Trace:
    """What one call of a layer did."""

    output: Tensor
    crossings: tuple[Crossing, ...]
    times: tuple[StageTime, ...]


def _short(tensor: Tensor) -> str:
    stride = "" if tensor.is_contiguous() else f" stride={tensor.stride()}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}{stride} {tensor.device}"


def _tensors(value: object, path: str = "") -> list[tuple[str, str]]:
    if isinstance(value, Tensor):
        return [(path, _short(value))]
    if not is_boundary(type(value)):
        return []
    found: list[tuple[str, str]] = []
    for field in fields_of(type(value)):
        found += _tensors(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    return found


def timed(device: torch.device, function: Callable[Q, T], *args: Q.args, **kwargs: Q.kwargs) -> tuple[T, float]:
    """Return what ``function`` returns and the seconds that it took, waiting for ``device`` before and after."""
    _wait(device)
    start = time.perf_counter()
    result = function(*args, **kwargs)
    _wait(device)
    return result, time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@final
class _Recorder:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.crossings: list[Crossing] = []
        self.times: list[StageTime] = []

    def timed(self, stage: str, function: Callable[Q, T], *args: Q.args, **kwargs: Q.kwargs) -> T:
        result, seconds = timed(self._device, function, *args, **kwargs)
        self.times.append(StageTime(stage, seconds))
        return result

    def crossed(self, stage: str, value: object) -> None:
        self.crossings.append(Crossing(stage, type(value).__qualname__, tuple(_tensors(value))))


def trace(layer: MoELayer[M, Payload, C], rows: M, routing: Routing[LogicalIds]) -> Trace:
    """Call a layer as it calls itself, stage by stage.

    The output is the layer's own; the times hold the host's work and the device's, each stage waiting for the one before, so their sum is above
    the time of a call.
    """
    recorder = _Recorder(rows.data.device)
    dispatcher, experts = layer.dispatcher, layer.experts
    row = find(dispatcher.variant, experts.runner)
    pre, post = row.functions

    recorder.crossed("model", rows)
    recorder.crossed("route", routing)
    dispatched = recorder.timed("dispatch", dispatcher.dispatch, rows, routing)
    recorder.crossed("dispatch", dispatched)
    for conversion in experts.conversions:
        convert = cast("Convert[Payload, Payload]", conversion.run)
        dispatched = dispatched.with_payload(recorder.timed(conversion.name, convert, dispatched.payload, dispatched.live_rows))
        recorder.crossed(conversion.name, dispatched)
    runner_input, carry = cast("tuple[object, object]", recorder.timed("pre", pre, dispatched))
    recorder.crossed("pre", runner_input)
    recorder.crossed("carry", carry)
    run = cast("Callable[[object], object]", experts.runner.run)
    runner_output = recorder.timed("run", run, runner_input)
    recorder.crossed("run", runner_output)
    combine_input = cast("C", recorder.timed("post", post, runner_output, carry))
    recorder.crossed("post", combine_input)
    output = recorder.timed("combine", dispatcher.combine, combine_input)
    return Trace(output, tuple(recorder.crossings), tuple(recorder.times))

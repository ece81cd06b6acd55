"""What a user asks of the integration."""

from typing import Final, Literal, TypeAlias, final

import attrs

from ...boundary import DebugLevel
from ...plan import RunnerRequest, Wire

NAME: Final = "moe_typed"
"""The name of the experts implementation."""

RunnerChoice: TypeAlias = RunnerRequest | Literal["auto", "triton", "aiter", "ascend", "reference"]
WireChoice: TypeAlias = Wire | Literal["auto", "bf16", "fp8-block128", "mxfp8", "mxfp4", "int8"]
DebugChoice: TypeAlias = DebugLevel | Literal["off", "layout", "values", "strict"]


def _runner(choice: RunnerChoice) -> RunnerRequest:
    return RunnerRequest(choice)


def _wire(choice: WireChoice) -> Wire:
    return Wire(choice)


def _debug(choice: DebugChoice | None) -> DebugLevel | None:
    if not isinstance(choice, str):
        return choice
    names = {level.name.lower(): level for level in DebugLevel}
    if choice not in names:
        raise ValueError(f"debug level must be one of {', '.join(names)}; got {choice!r}")
    return names[choice]


@final
@attrs.frozen(kw_only=True)
class Options:
    """How expert layers are run. Raises: ValueError for a name that there is not.

    ``runner``: ``auto`` takes the first that can run a layer on its device. ``wire``: what rows become on the way to the experts; ``auto`` leaves
    them as they are where the experts take them so. ``debug``: the level that holds while a layer runs; None for that of the process.
    ``relay``: whether a parameter that is stored transposed may be laid out anew in place, where a runner needs it so: the parameter keeps its
    shape, its values and its identity, and becomes a transposed view.
    """

    runner: RunnerRequest = attrs.field(default=RunnerRequest.AUTO, converter=_runner)
    wire: Wire = attrs.field(default=Wire.AUTO, converter=_wire)
    debug: DebugLevel | None = attrs.field(default=None, converter=_debug)
    relay: bool = True

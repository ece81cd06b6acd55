"""What is to be run, and where: frozen, serialisable, and nothing else."""

import enum
import platform
from importlib import metadata
from typing import final

import attrs
import torch

from ..runners.acceptance import RunnerName
from ..runners.aiter import gfx_of


@final
class Wire(enum.Enum):
    """Name the payload format that a configuration asks a dispatcher to send; ``auto`` is what the experts take at the least cost."""

    AUTO = "auto"
    BF16 = "bf16"
    FP8_BLOCK128 = "fp8-block128"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"


@final
class RunnerRequest(enum.Enum):
    """Name the runner that a configuration asks for."""

    AUTO = "auto"
    TRITON = "triton"
    AITER = "aiter"
    REFERENCE = "reference"

    def candidates(self) -> tuple[RunnerName, ...]:
        """Return the runners to try, in order."""
        return tuple(RunnerName) if self is RunnerRequest.AUTO else (RunnerName(self.value),)


@final
@attrs.frozen(kw_only=True)
class MoEProblem:
    """One MoE layer and what is asked of it. Raises: ValueError for sizes that no layer has.

    ``model`` and ``weights`` are format names ("bf16", "fp8-block128", ...); ``activation`` is an activation's name. ``rows`` sets the bytes in the
    report and nothing else.
    """

    num_experts: int
    top_k: int
    hidden: int
    inter: int
    model: str
    weights: str
    activation: str
    rows: int
    wire: Wire = Wire.AUTO
    runner: RunnerRequest = RunnerRequest.AUTO

    def __attrs_post_init__(self) -> None:
        for name, least in (("num_experts", 1), ("top_k", 1), ("hidden", 1), ("inter", 1), ("rows", 0)):
            value: int = getattr(self, name)
            if value < least:
                raise ValueError(f"{name} is {value}; it must be {least} or more")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, but there are {self.num_experts} experts")


@final
@attrs.frozen(kw_only=True)
class Environment:
    """The machine as far as a plan depends on it.

    ``device``: "cpu", "cuda", ... ``capability``: the CUDA compute capability, (0, 0) where there is none. ``libraries``: versions by the name of
    the distribution. ``gfx``: the architecture of an AMD GPU, such as "gfx950"; empty on any other device.
    """

    device: str
    device_name: str
    capability: tuple[int, int]
    libraries: dict[str, str]
    gfx: str = ""


_LIBRARIES = ("torch", "triton", "amd-aiter")


def probe_environment(device: torch.device) -> Environment:
    """Return the environment of a device of this machine; imports no library that it reports."""
    libraries: dict[str, str] = {}
    for name in _LIBRARIES:
        try:
            libraries[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda":
        return Environment(
            device="cuda",
            device_name=torch.cuda.get_device_name(device),
            capability=torch.cuda.get_device_capability(device),
            libraries=libraries,
            gfx=gfx_of(device) or "",
        )
    return Environment(device=device.type, device_name=platform.machine(), capability=(0, 0), libraries=libraries)

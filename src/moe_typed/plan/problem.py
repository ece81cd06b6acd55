"""What is to be run, and where: frozen, serialisable, and nothing else."""

import enum
import importlib.util
import os
import platform
from importlib import metadata
from typing import Final, final

import attrs
import torch

from ..ops.product_plans.files import VARIABLE
from ..runners.acceptance import RunnerName
from ..runners.aiter import AiterFacts, gfx_of, probe_installed_aiter
from .backends import Backend, Wire


@final
class RunnerRequest(enum.Enum):
    """Name the runner that a configuration asks for."""

    AUTO = "auto"
    TRITON = "triton"
    AITER = "aiter"
    ASCEND = "ascend"
    REFERENCE = "reference"

    def candidates(self) -> tuple[RunnerName, ...]:
        """Return the runners to try, in order."""
        return tuple(RunnerName) if self is RunnerRequest.AUTO else (RunnerName(self.value),)


@final
@attrs.frozen(kw_only=True)
class MoEProblem:
    """One MoE layer and what is asked of it. Raises: ValueError for sizes that no layer has.

    ``model`` and ``weights`` are format names ("bf16", "fp8-block128", ...); ``activation`` is an activation's name. ``rows`` sets the bytes in the
    report and nothing else. ``num_experts`` counts the slots of all ``ranks``, over which ``backend`` spreads them evenly.
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
    backend: Backend = Backend.STANDARD
    ranks: int = 1

    def __attrs_post_init__(self) -> None:
        for name, value, least in (
            ("num_experts", self.num_experts, 1),
            ("top_k", self.top_k, 1),
            ("hidden", self.hidden, 1),
            ("inter", self.inter, 1),
            ("rows", self.rows, 0),
            ("ranks", self.ranks, 1),
        ):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be {least} or more")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k is {self.top_k}, but there are {self.num_experts} experts")
        if self.num_experts % self.ranks:
            raise ValueError(f"{self.num_experts} experts cannot be spread evenly over {self.ranks} ranks")
        if not self.backend.sends and self.ranks > 1:
            raise ValueError(f"the {self.backend.value} backend sends nothing, so that all experts are on one rank; {self.ranks} ranks were given")

    @property
    def local_experts(self) -> int:
        """Return how many experts a rank holds."""
        return self.num_experts // self.ranks


@final
@attrs.frozen(kw_only=True)
class Environment:
    """The machine as far as a plan depends on it.

    ``device``: "cpu", "cuda", ... ``capability``: the CUDA compute capability, (0, 0) where there is none. ``libraries``: versions by the name of
    the distribution, those of all-to-all libraries by the name of the module. ``gfx``: the architecture of an AMD GPU, such as "gfx950"; empty on any
    other device. ``aiter``: what the installed AITER can do; None where there is none. ``tuned``: the directory of tuned plans that the environment
    variable MOE_TYPED_TUNED names; empty where it names none.
    """

    device: str
    device_name: str
    capability: tuple[int, int]
    libraries: dict[str, str]
    gfx: str = ""
    aiter: AiterFacts | None = None
    tuned: str = ""


_LIBRARIES: Final = ("torch", "triton", "amd-aiter")


def probe_environment(device: torch.device) -> Environment:
    """Return the environment of a device of this machine; imports no library that it reports."""
    libraries = {name: version for name in _LIBRARIES if (version := _version(name))}
    modules = dict.fromkeys(backend.module for backend in Backend if backend.module)
    tuned = os.environ.get(VARIABLE, "")
    libraries |= {module: _version(module) or "unknown" for module in modules if importlib.util.find_spec(module) is not None}
    if device.type == "cuda":
        return Environment(
            device="cuda",
            device_name=torch.cuda.get_device_name(device),
            capability=torch.cuda.get_device_capability(device),
            libraries=libraries,
            gfx=gfx_of(device) or "",
            aiter=probe_installed_aiter(),
            tuned=tuned,
        )
    return Environment(
        device=device.type,
        device_name=platform.machine(),
        capability=(0, 0),
        libraries=libraries,
        aiter=probe_installed_aiter(),
        tuned=tuned,
    )


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None

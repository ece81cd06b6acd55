"""Every experts class of the installed transformers that honours the experts interface, and a small instance of each.

For tests, and for the table in the documentation.
"""

import contextlib
import importlib
import importlib.util
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, cast, final

import attrs
import torch
from torch import nn

from ...runners import UnsupportedError
from .layers import hold
from .options import Options
from .reports import describe

_DECORATED: Final = re.compile(r"^@use_experts_implementation(?:\([^)]*\))?\nclass (\w+)\(", re.MULTILINE)
HIDDEN, INTER, EXPERTS = 64, 32, 8
# What configs call the sizes of an experts module.
_SIZES: Final = {
    "hidden_size": HIDDEN,
    "moe_hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "moe_intermediate_size": INTER,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
}


@final
@attrs.frozen
class ExpertsClass:
    """One class, by the module that defines it; nothing is imported before ``load``."""

    module: str
    name: str

    def load(self) -> type[nn.Module]:
        """Return the class."""
        return cast("type[nn.Module]", getattr(importlib.import_module(self.module), self.name))

    def small(self, dtype: torch.dtype) -> nn.Module:
        """Return a random instance on the CPU: ``EXPERTS`` experts of ``INTER`` in a model of ``HIDDEN``; else its model's own defaults hold.

        Raises: ValueError where no config of the model makes one.
        """
        make = cast("Callable[..., nn.Module]", self.load())
        sizes = {HIDDEN, INTER, 2 * INTER, EXPERTS}
        for config, width in itertools.product(self._configs(), ((), (INTER,))):  # some classes take their width beside the config
            try:
                module = make(config, *width)
            except (AttributeError, TypeError):  # the config of another part of the model
                continue
            if all(set(parameter.shape) <= sizes for parameter in module.parameters()):
                return _fill(module.to(dtype))
        raise ValueError(f"{self.module} has no config that {self.name} takes")

    def _configs(self) -> Iterator[object]:
        """Yield a config of every class that the module names, the likeliest first."""
        named = vars(importlib.import_module(self.module)).values()
        found = [value for value in named if isinstance(value, type) and value.__name__.endswith("Config") and value.__name__ != "PreTrainedConfig"]
        own = inspect.signature(self.load()).parameters["config"].annotation
        for cls in sorted(found, key=lambda cls: (cls is not own, -_shared(cls.__name__, self.name))):
            config: object = cast("Callable[[], object]", cls)()
            for name, value in _SIZES.items():
                with contextlib.suppress(Exception):  # a config that keeps a list here refuses with an error of its own
                    setattr(config, name, value)
            setattr(config, "_experts_implementation", "eager")  # noqa: B010  no stub has this name
            yield config


def _shared(first: str, second: str) -> int:
    """Return how many characters two names begin with alike."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def _fill(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    return module.eval()


def find_experts_classes() -> tuple[ExpertsClass, ...]:
    """Return the classes, found by their decorator in the modeling files of the installed package, in the order of their modules."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ImportError("transformers is not installed")
    files = sorted((Path(spec.origin).parent / "models").glob("*/modeling_*.py"))
    return tuple(
        ExpertsClass(f"transformers.models.{file.parent.name}.{file.stem}", name)
        for file in files
        for name in _DECORATED.findall(file.read_text(encoding="utf-8"))
    )


@final
@attrs.frozen
class Need:
    """What an experts class needs, as the documentation shows it. ``refusal``: why it is not run; empty where it is."""

    experts: str
    weights: str
    order: str
    activation: str
    refusal: str


def need_of(experts: ExpertsClass) -> Need:
    """Return what a class needs in a bfloat16 model."""
    try:
        held = hold(experts.small(torch.bfloat16), torch.bfloat16, 1, Options())
    except UnsupportedError as error:
        return Need(experts.name, "", "", "", str(error))
    weights = held.adapted.weights
    return Need(experts.name, type(weights).__qualname__, weights.order.title, describe(held.found.activation), "")

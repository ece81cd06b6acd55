"""Tuned plans on disk: each change replaces a whole file at once, and keeps what others wrote to it before."""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import final

import attrs

from ..ops.product_plans.files import CONVERTER, LayerKey, TunedFile, TunedLayer, TunedPlan, file_name, read_tuned

if sys.platform != "win32":
    import fcntl


@final
class Store:
    """The file of one device in a directory, which is made. Raises: ValueError for a file there that is not one of this device; OSError."""

    def __init__(self, directory: Path, device: str, capability: tuple[int, int]) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.path = directory, directory / file_name(device)
        self._empty = TunedFile(device, capability, ())
        self.read()

    def read(self) -> TunedFile:
        """Return what is in the file; nothing where there is none. Raises: ValueError for a file that is not one of this device."""
        if not self.path.exists():
            return self._empty
        found = read_tuned(self.path)
        if found.capability not in (None, self._empty.capability):
            raise ValueError(
                f"{self.path} is of compute capability {found.capability}, but {found.device} has {self._empty.capability} here; move it"
            )
        return attrs.evolve(found, capability=self._empty.capability)

    def plan_of(self, key: LayerKey, tokens: int) -> TunedPlan | None:
        """Return what the file says of a layer at exactly so many tokens."""
        plans = (plan for layer in self.read().layers if layer.key == key for plan in layer.plans)
        return next((plan for plan in plans if plan.tokens == tokens), None)

    def put(self, key: LayerKey, plan: TunedPlan) -> None:
        """Set the plan of a layer at a number of tokens. Other layers and numbers stay, those too that another process has written meanwhile."""
        self._change(key, lambda plans: {**plans, plan.tokens: plan})

    def forget(self, key: LayerKey, tokens: int) -> None:
        """Remove the plan of a layer at a number of tokens, if it is there."""
        if self.plan_of(key, tokens) is not None:
            self._change(key, lambda plans: {count: plan for count, plan in plans.items() if count != tokens})

    def _change(self, key: LayerKey, change: Callable[[dict[int, TunedPlan]], dict[int, TunedPlan]]) -> None:
        with _locked(self.directory):
            layers = {layer.key: layer.plans for layer in self.read().layers}
            plans = change({plan.tokens: plan for plan in layers.get(key, ())})
            layers[key] = tuple(plans[tokens] for tokens in sorted(plans))
            kept = tuple(_layer(one, layers[one]) for one in sorted(layers) if layers[one])
            replace(self.path, render(attrs.evolve(self._empty, layers=kept)))


def _layer(key: LayerKey, plans: tuple[TunedPlan, ...]) -> TunedLayer:
    return TunedLayer(key.format, key.experts, key.top_k, key.hidden, key.inter, plans)


@contextmanager
def _locked(directory: Path) -> Generator[None]:
    if sys.platform == "win32":  # which has no such locks, nor Triton
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def replace(path: Path, text: str) -> None:
    """Write a file so that whoever reads it finds the old text or the new one, whole."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.chmod(0o644)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def render(file: TunedFile) -> str:
    """Return the text of a file: JSON, a plan a line."""
    layers: list[str] = []
    for layer in file.layers:
        head = json.dumps(attrs.asdict(layer.key))[:-1]
        plans = ",\n".join(f"  {json.dumps(_unstructured(plan))}" for plan in layer.plans)
        layers.append(f'{head}, "plans": [\n{plans}\n ]}}')
    body = ",\n ".join(layers)
    return f'{{"device": {json.dumps(file.device)}, "capability": {json.dumps(file.capability)}, "layers": [\n {body}\n]}}\n'


def _unstructured(plan: TunedPlan) -> object:
    return CONVERTER.unstructure(plan)

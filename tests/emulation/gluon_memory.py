"""Memory, values and barriers of emulated gluon kernels. Layouts mean nothing here; loads and stores must be in range."""

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Final, TypeAlias, final

import torch
from torch import Tensor
from typing_extensions import override

Number: TypeAlias = "Tensor | int"

_SECONDS: Final = 60  # that a warpgroup waits for a barrier before it is taken for a deadlock


@final
class Values(Tensor):
    """Values in registers, whose type has a layout."""

    @property
    @override
    def type(self) -> SimpleNamespace:  # type: ignore[override]
        return SimpleNamespace(layout=None)


def values(data: Tensor | float) -> Values:
    return torch.as_tensor(data).as_subclass(Values)


@final
class Pointer:
    """Places in a tensor, counted in elements."""

    def __init__(self, base: Tensor, at: Number = 0) -> None:
        self.base = base
        self.at = at
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, by: Number) -> "Pointer":
        return Pointer(self.base, self.at + by)

    def places(self, mask: Tensor | bool) -> tuple[Tensor, Tensor]:
        at, kept = torch.as_tensor(self.at), torch.as_tensor(mask)
        at = at + torch.zeros_like(kept, dtype=torch.int64)  # as large as both
        kept = kept & torch.ones_like(at, dtype=torch.bool)
        if not bool(((at >= 0) & (at < self.base.numel()) | ~kept).all()):
            raise IndexError(f"a place that is not among {self.base.numel()}")
        return at, kept


def load(pointer: Pointer, mask: Tensor | bool = True, other: float = 0.0) -> Values:
    at, kept = pointer.places(mask)
    loaded = pointer.base[torch.where(kept, at, 0)]
    return values(loaded if bool(kept.all()) else torch.where(kept, loaded, torch.as_tensor(other, dtype=loaded.dtype)))


def store(pointer: Pointer, value: Tensor, mask: Tensor | bool = True) -> None:
    at, kept = pointer.places(mask)
    if value.dtype != pointer.base.dtype:
        raise TypeError(f"{value.dtype} stored to {pointer.base.dtype}")
    value = value.as_subclass(Tensor).expand(at.shape)
    raw = torch.uint8 if value.element_size() == 1 else value.dtype  # fp8 is not written by index
    pointer.base.view(raw)[at[kept]] = value.contiguous().view(raw)[kept]


@final
class Barrier:
    """A barrier whose phase ends when all have arrived, and all bytes that they expect."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = self._missing = self._bytes = self._phase = 0

    def start(self, count: int) -> None:
        self._count = self._missing = count

    def change(self, arrivals: int, expected: int) -> None:
        with self._changed:
            self._missing -= arrivals
            self._bytes += expected
            if self._missing < 0:
                raise RuntimeError("more arrived at a barrier than it counts")
            if not self._missing and not self._bytes:
                self._phase ^= 1
                self._missing = self._count
                self._changed.notify_all()

    def wait(self, phase: Number) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._phase != int(phase), _SECONDS):
                raise RuntimeError("a warpgroup waits for what does not happen")


@final
class Barriers:
    def __init__(self, count: int) -> None:
        self._all = [Barrier() for _ in range(count)]

    def index(self, which: Number) -> Barrier:
        return self._all[int(which)]


@final
class Memory:
    """Shared memory."""

    layout = None

    def __init__(self, data: Tensor) -> None:
        self.data = data
        self.shape = data.shape
        self.dtype = data.dtype

    def index(self, which: Number) -> "Memory":
        return Memory(self.data[int(which)])

    def slice(self, start: int, length: int) -> "Memory":
        return Memory(self.data[start : start + length])

    def permute(self, order: Sequence[int]) -> "Memory":
        return Memory(self.data.permute(*order))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: None) -> Values:
        return values(self.data.clone())

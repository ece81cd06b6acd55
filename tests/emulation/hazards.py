"""What the libraries leave undefined and cannot notice: poison, reads of raw memory, results that come late, and errors.

An emulation runs in one of two modes. *strict*: a call that the real library would take and then compute nonsense from raises ``EmulatedMisuse``.
*faithful*: the nonsense happens. What the real library notices raises the same built-in exception in both modes.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Final, Literal, TypeAlias, final

import torch
from torch import Tensor

Mode: TypeAlias = Literal["strict", "faithful"]

POISON_BYTE: Final = 0x7F  # repeated, it is a huge id, a huge count, and the NaN of float8_e4m3fn

_POISON_BYTES: Final = {
    torch.float8_e4m3fnuz: 0x80,
    torch.float8_e5m2fnuz: 0x80,
    torch.float8_e8m0fnu: 0xFF,
    torch.bool: 1,
}  # NaN, where there is one
_POISON_INTS: Final = {torch.int16: 0x7F7F, torch.int32: 0x7F7F7F7F, torch.int64: 0x7F7F7F7F7F7F7F7F}


@final
class Reason(enum.Enum):
    """Name a mistake that the real library takes without a word."""

    DTYPE = "the bytes are read as another dtype"
    LAYOUT = "the memory is read as if it were contiguous"
    CAPACITY = "more rows than the buffers hold"
    EXPERT_ID = "an expert id that the kernel does not guard against"
    DUPLICATE_EXPERT = "a row names an expert twice"
    TOP_K = "more routes per row than the kernel looks at"
    OTHER_IDS = "not the ids that were dispatched"
    SHORT_INPUT = "fewer rows than were received"
    FOREIGN_BUFFER = "not the registered buffer, whose old contents are sent"
    STALE_HANDLE = "the buffers of the handle's dispatch were used again"
    UNEQUAL_ACROSS_RANKS = "an argument that must be equal on all ranks"
    LAYOUT_DISAGREES = "the dispatch layout contradicts itself"
    HEALTH_MASK = "a health mask of another length is replaced by a temporary one"
    INFERRED_EXPERTS = "the number of experts is guessed from the ids"


@final
class EmulatedMisuse(Exception):  # noqa: N818 - the misuse is the caller's, the error is what would follow
    """Tell, in strict mode, what the real library would take without a word (tables of "what happens if wrong": SILENT and UB)."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}")
        self.reason = reason


@final
class EmulatedTrap(RuntimeError):  # noqa: N818 - named after what happens
    """Stand for a device assertion: torch raises RuntimeError at some later call, and the context is lost."""


def misuse(mode: Mode, reason: Reason, detail: str) -> None:
    """Raise EmulatedMisuse in strict mode."""
    if mode == "strict":
        raise EmulatedMisuse(reason, detail)


def host_check(condition: bool, what: str) -> None:
    """Raise what Python sees of a failed C++ assertion: RuntimeError."""
    if not condition:
        raise RuntimeError(f"host assertion failed: {what}")


def python_check(condition: bool, what: str) -> None:
    """Raise what a Python ``assert`` of the library raises: AssertionError."""
    if not condition:
        raise AssertionError(what)


# ---- poison ------------------------------------------------------------------------------------------------------------------------


def poison_(tensor: Tensor) -> Tensor:
    """Overwrite a tensor of any strides with NaN, or with 0x7F7F... where its dtype has no NaN, and return it."""
    if tensor.dtype.itemsize == 1:
        tensor.view(torch.uint8).fill_(_POISON_BYTES.get(tensor.dtype, POISON_BYTE))
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(_POISON_INTS[tensor.dtype])
    return tensor


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return fresh memory that nothing was written to."""
    return poison_(torch.empty(tuple(shape), dtype=dtype))


def poison_mask(tensor: Tensor) -> Tensor:
    """Return which elements hold what ``poison_`` writes, bool of the tensor's shape."""
    expected = poisoned((1,), tensor.dtype)
    if tensor.dtype.itemsize == 1:
        return tensor.view(torch.uint8) == expected.view(torch.uint8)
    return torch.isnan(tensor) if tensor.is_floating_point() else tensor == expected


# ---- bytes -------------------------------------------------------------------------------------------------------------------------


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of each row (rows, bytes of a row), uint8, of a contiguous matrix."""
    return tensor.contiguous().view(torch.uint8) if tensor.dim() == 2 else tensor.contiguous().reshape(tensor.size(0), -1).view(torch.uint8)


def read_memory(tensor: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return what a kernel reads that takes a tensor's address for contiguous memory of ``shape`` and ``dtype``.

    Strides and dtype of the tensor do not count. Where its memory ends, the kernel reads poison.
    """
    wanted = shape[0] * shape[1] * dtype.itemsize
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    start = tensor.storage_offset() * tensor.dtype.itemsize
    found = storage[start : start + wanted].clone()
    tail = torch.full((wanted - found.numel(),), POISON_BYTE, dtype=torch.uint8)
    return torch.cat((found, tail)).view(dtype).view(shape)


def copy_bits_(target: Tensor, source: Tensor) -> None:
    """Copy bit for bit between tensors of the same dtype and shape: NaN payloads, and dtypes that torch cannot copy, included."""
    if target.dtype.itemsize == 1:
        target.view(torch.uint8).copy_(source.view(torch.uint8))
    else:
        target.copy_(source)


# ---- results that come late, and results that do not stay --------------------------------------------------------------------------


class _Late:
    """Hold the true contents of results that are poisoned until ``__call__``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._held = [(tensor, tensor.clone(memory_format=torch.preserve_format)) for tensor in tensors]
        for tensor in tensors:
            poison_(tensor)

    def __call__(self) -> None:
        for tensor, contents in self._held:
            copy_bits_(tensor, contents)
        self._held = []


def late(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Poison results whose data has not arrived, and return the function that makes it arrive; a second call of it does nothing."""
    return _Late(tensors)


@final
class Ring:
    """A few arenas that results are views of, in turn: the result of ``size`` calls ago is overwritten."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arenas: list[dict[str, Tensor]] = [{} for _ in range(size)]
        self.calls = 0

    def advance(self) -> None:
        """Go on to the next arena and poison all that it holds."""
        self.calls += 1
        for memory in self._arenas[self.calls % self._size].values():
            poison_(memory)

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the poisoned tensor ``name`` of the current arena; a larger one than ever before moves it to fresh memory."""
        arena = self._arenas[self.calls % self._size]
        numel = 1
        for extent in shape:
            numel *= extent
        wanted = numel * dtype.itemsize
        memory = arena.get(name)
        if memory is None or memory.numel() < wanted:
            memory = arena[name] = torch.empty(wanted, dtype=torch.uint8)
        return poison_(memory[:wanted].view(dtype).view(tuple(shape)))

    def is_alive(self, call: int) -> bool:
        """Return whether the results of the call of that number were not overwritten yet."""
        return self.calls - call < self._size

"""Assemble stacked tensors from the pieces of a checkpoint: planned and checked by headers first, then read piece by piece into place."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias, final

import attrs
import torch
from torch import Tensor

from .errors import CheckpointError
from .tensors import DTYPES, TensorIndex, TensorReader


@final
@attrs.frozen
class Progress:
    """How far a load has come: ``tensor`` was read last; ``done`` of ``total`` bytes are in place."""

    tensor: str
    done: int
    total: int


ProgressCallback: TypeAlias = Callable[[Progress], None]


@final
@attrs.frozen
class Piece:
    """A tensor of the checkpoint, or its entry ``entry`` along dim 0, and the place that takes it: ``target[slot]``, from row ``first`` on.

    ``slot`` is None where the tensor is the whole target. ``transposed``: the last two dims of the tensor are swapped.
    """

    tensor: str
    slot: int | None = None
    first: int = 0
    entry: int | None = None
    transposed: bool = False


def _as_stored(tensor: Tensor) -> Tensor:
    return tensor


@final
@attrs.frozen(eq=False)
class Assembly:
    """A tensor to be made of pieces; ``hold`` turns what is stored into ``dtype``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    hold: Callable[[Tensor], Tensor] = _as_stored

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@final
class Planner:
    """Check tensors by their headers, and keep account of which have been asked for."""

    def __init__(self, index: TensorIndex, reader: TensorReader) -> None:
        self.index = index
        self._reader = reader
        self.asked: set[str] = set()

    def has(self, name: str) -> bool:
        """Say whether the checkpoint has a tensor of this name."""
        return name in self.index.files

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor, or that should list it."""
        return self.index.files.get(name, self.index.source)

    def expect(self, name: str, shape: tuple[int, ...], stored: tuple[str, ...], hint: str = "") -> torch.dtype:
        """Return the dtype of a tensor that must be there with this shape, in one of the ``stored`` dtypes. Raises: CheckpointError."""
        wanted = f"{' or '.join(str(DTYPES[dtype]).removeprefix('torch.') for dtype in stored)}{list(shape)}"
        if not self.has(name):
            raise CheckpointError("the tensor is missing", file=self.index.source, subject=name, expected=wanted, got="nothing", hint=hint)
        header = self._reader.header(name)
        if header.dtype not in stored or header.shape != shape:
            wrong = "shape" if header.dtype in stored else "dtype"
            raise CheckpointError(f"the {wrong} is wrong", file=self.file(name), subject=name, expected=wanted, got=str(header), hint=hint)
        self.asked.add(name)
        return DTYPES[header.dtype]

    def dtype(self, name: str, stored: tuple[str, ...]) -> torch.dtype:
        """Return the dtype of a tensor of any shape in one of the ``stored`` dtypes. Raises: CheckpointError."""
        return self.expect(name, self._reader.header(name).shape, stored)

    def whole(self, name: str, shape: tuple[int, ...], stored: tuple[str, ...], hint: str) -> Assembly:
        """Plan one tensor as it is stored. Raises: CheckpointError."""
        return Assembly(shape, self.expect(name, shape, stored, hint), (Piece(name),))


@final
class Assembler:
    """Read what was planned. Each target is allocated once, and each piece goes straight to its place."""

    def __init__(self, reader: TensorReader, device: torch.device, total: int, progress: ProgressCallback | None) -> None:
        self._reader = reader
        self._device = device
        self._total = total
        self._progress = progress
        self._done = 0

    def make(self, assembly: Assembly) -> Tensor:
        """Return the tensor of a plan, contiguous, on the device. Raises: CheckpointError for data that cannot be read."""
        target = torch.empty(assembly.shape, dtype=assembly.dtype, device=self._device)
        for piece in assembly.pieces:
            stored = assembly.hold(self._reader.read(piece.tensor, piece.entry))
            stored = stored.mT if piece.transposed else stored
            place = target if piece.slot is None else target[piece.slot]
            place = place if stored.dim() == 0 else place[piece.first : piece.first + stored.shape[0]]
            place.copy_(stored)
            self._done += stored.numel() * assembly.dtype.itemsize
            if self._progress is not None:
                self._progress(Progress(piece.tensor, self._done, self._total))
        return target

    def make_optional(self, assembly: Assembly | None) -> Tensor | None:
        """Return the tensor of a plan that may be absent."""
        return None if assembly is None else self.make(assembly)

"""Where the tensors of a checkpoint are, and how to read them: headers first, data when it is asked for."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Final, Self, final

import attrs
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from .documents import Section, read_object
from .errors import CheckpointError

if TYPE_CHECKING:
    from safetensors import PySafeSlice

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"

# The names that safetensors gives the dtypes this room takes.
DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E8M0": torch.float8_e8m0fnu,
        "U8": torch.uint8,
    }
)


def _open(file: Path) -> safe_open:
    """Open one safetensors file; its header is checked against its length. Raises: CheckpointError."""
    if not file.is_file():
        state = "is not a file" if file.exists() else "is missing"
        raise CheckpointError(state, file=file, expected="a safetensors file", hint="download or copy the checkpoint again")
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"is not a valid safetensors file: {error}", file=file, got=f"{file.stat().st_size} bytes", hint="download or copy the file again"
        ) from error


@final
@attrs.frozen
class Header:
    """What a safetensors header says of one tensor: dtype by its safetensors name, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @override
    def __str__(self) -> str:
        """Return dtype and shape as errors show them."""
        return describe(DTYPES[self.dtype], self.shape) if self.dtype in DTYPES else f"{self.dtype}{list(self.shape)}"


def describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Return dtype and shape as errors show them."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


@final
@attrs.frozen(eq=False)
class TensorIndex:
    """Which file holds which tensor. ``source`` is the file that says so."""

    source: Path
    files: Mapping[str, Path]


@final
class TensorReader:
    """Read tensors of an index, each file opened once. A context manager."""

    def __init__(self, index: TensorIndex) -> None:
        self._index = index
        self._files: dict[Path, safe_open] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /) -> None:
        self._files.clear()
        self._stack.close()

    def header(self, name: str) -> Header:
        """Return what the header says of a tensor. Raises: CheckpointError for a tensor that is not there."""
        part = self._slice(name)
        return Header(part.get_dtype(), tuple(part.get_shape()))

    def read(self, name: str, entry: int | None = None) -> Tensor:
        """Return a tensor, or one entry of its first dim. Raises: CheckpointError."""
        part = self._slice(name)
        try:
            return part[:] if entry is None else part[entry]
        except (SafetensorError, OSError, IndexError, RuntimeError) as error:
            raise CheckpointError(f"cannot be read: {error}", file=self._index.files[name], subject=name) from error

    def _slice(self, name: str) -> "PySafeSlice":
        file = self._index.files.get(name)
        if file is None:
            raise CheckpointError("the tensor is missing", file=self._index.source, subject=name)
        if file not in self._files:
            self._files[file] = self._stack.enter_context(_open(file))
        try:
            return self._files[file].get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(f"the tensor is missing: {error}", file=file, subject=name) from error


def read_index(directory: Path) -> TensorIndex:
    """Return which file of a checkpoint holds which tensor; reads headers alone.

    Takes ``model.safetensors``, or the shards that ``model.safetensors.index.json`` names.
    Raises: CheckpointError for files that are missing, damaged, outside of the directory, or contradict one another.
    """
    single, index = directory / SINGLE, directory / INDEX
    if index.exists() or index.is_symlink():
        placed = _read_weight_map(index)
        if single.exists() and SINGLE not in placed.values():
            raise CheckpointError(
                f"there is {SINGLE} beside it, which it does not name: either could be meant", file=index, hint="remove the one that is stale"
            )
        return TensorIndex(index, _locate(index, placed))
    if single.exists() or single.is_symlink():
        return TensorIndex(single, dict.fromkeys(_names(single), single))
    raise _nothing(directory)


def _read_weight_map(index: Path) -> Mapping[str, str]:
    placed = Section(index, read_object(index)).section("weight_map")
    if placed is None or not placed.values:
        raise CheckpointError("is missing or empty", file=index, subject="weight_map", expected="an object from tensor to file name")
    checked: dict[str, str] = {}
    for name, shard in placed.values.items():
        if not isinstance(shard, str) or not shard.endswith(".safetensors") or "\0" in shard:
            raise CheckpointError("has no usable file", file=index, subject=name, expected="the name of a .safetensors file", got=repr(shard))
        if any(path.is_absolute() or path.drive or ".." in path.parts for path in (PurePosixPath(shard), PureWindowsPath(shard))):
            raise CheckpointError(
                "points outside of the checkpoint", file=index, subject=name, expected="a path within the directory", got=repr(shard)
            )
        checked[name] = shard
    return checked


def _locate(index: Path, placed: Mapping[str, str]) -> Mapping[str, Path]:
    """Return the file of each tensor that the index lists, after a look into the header of each shard."""
    files = {shard: index.parent / shard for shard in sorted(set(placed.values()))}
    holders: dict[str, str] = {}
    for shard, file in files.items():
        for name in _names(file):
            if name in holders:
                raise CheckpointError(
                    "is in two shards", file=file, subject=name, expected="one shard for each tensor", got=f"{holders[name]} and {shard}"
                )
            holders[name] = shard
    for name, shard in placed.items():
        if holders.get(name) != shard:
            raise CheckpointError(
                f"is not in {shard}, where the index places it", file=index, subject=name, expected=shard, got=holders.get(name, "no shard")
            )
    return {name: files[shard] for name, shard in placed.items()}


def _names(file: Path) -> list[str]:
    with _open(file) as opened:
        names = list(opened.keys())
    if not names:
        raise CheckpointError("holds no tensors", file=file)
    return names


def _nothing(directory: Path) -> CheckpointError:
    """Return the error for a directory without the expected files, with what to do about what is there."""
    found = sorted(path.name for path in directory.iterdir())
    shards = [name for name in found if name.endswith(".safetensors")]
    pickles = [name for name in found if name.endswith((".bin", ".pt", ".pth"))]
    hint = ""
    if shards:
        hint = f"shards need the index file; a single file must be named {SINGLE}"
    elif pickles:
        hint = "PyTorch pickles are not read: load the model with transformers and save_pretrained() it, which writes safetensors"
    return CheckpointError(
        "holds no checkpoint in safetensors", file=directory, expected=f"{SINGLE} or {INDEX}", got=", ".join((shards or pickles)[:4]), hint=hint
    )

"""JSON files of a checkpoint, read with suspicion: every value is checked for its type and range when it is taken out."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast, final

import attrs

from .errors import CheckpointError

_LONGEST = 80
_MOST = 2**31 - 1  # no size of a model is larger, and arithmetic on sizes stays far from overflow


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object")
    return found


def read_object(file: Path) -> Mapping[str, object]:
    """Return the object that a JSON file holds. Raises: CheckpointError for a file that cannot be read, or holds anything else."""
    if file.exists() and not file.is_file():
        raise CheckpointError("is not a file", file=file, expected="a JSON file")
    try:
        value: object = json.loads(file.read_bytes(), object_pairs_hook=_unique)
    except FileNotFoundError:
        raise CheckpointError("there is no such file", file=file, expected="a checkpoint directory with config.json and safetensors") from None
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror or error}", file=file) from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"is not valid JSON: {error}", file=file) from error
    if not isinstance(value, dict):
        raise CheckpointError("is not a JSON object", file=file, expected="{...}", got=_describe(value))
    return cast("dict[str, object]", value)


def _describe(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= _LONGEST else text[: _LONGEST - 3] + '...'} ({type(value).__name__})"


@final
@attrs.frozen
class Section:
    """One object of config.json. An option that is null counts as absent, as it does in the files that transformers writes.

    Getters take several names where families or versions name one option differently; names that are all present must agree.
    """

    file: Path
    values: Mapping[str, object]
    place: str = ""

    def integer(self, *names: str, minimum: int = 1, default: int | None = None) -> int:
        """Return a whole number of at least ``minimum``. Raises: CheckpointError."""
        name, value = self._find(names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MOST:
            raise self.fault(name, f"a whole number from {minimum} to {_MOST}", value)
        return value

    def number(self, *names: str, default: float | None = None) -> float:
        """Return a finite number above zero. Raises: CheckpointError."""
        name, value = self._find(names)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:  # NaN is not, either
            raise self.fault(name, "a finite number above 0", value)
        return float(value)

    def boolean(self, *names: str) -> bool:
        """Return true or false. Raises: CheckpointError."""
        name, value = self._find(names)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false", value)
        return value

    def text(self, *names: str) -> str | None:
        """Return a string; None where there is none. Raises: CheckpointError."""
        name, value = self._find(names)
        if value is not None and not isinstance(value, str):
            raise self.fault(name, "a string", value)
        return value

    def texts(self, *names: str) -> tuple[str, ...]:
        """Return a list of strings; none where there is no list. Raises: CheckpointError."""
        name, value = self._find(names)
        items = self._items(name, value)
        if not all(isinstance(item, str) for item in items):
            raise self.fault(name, "a list of strings", value)
        return tuple(item for item in items if isinstance(item, str))

    def integers(self, *names: str) -> tuple[int, ...]:
        """Return a list of whole numbers; none where there is no list. Raises: CheckpointError."""
        name, value = self._find(names)
        items = self._items(name, value)
        if not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            raise self.fault(name, "a list of whole numbers from 0 on", value)
        return tuple(item for item in items if isinstance(item, int))

    def section(self, name: str) -> "Section | None":
        """Return a nested object; None where there is none. Raises: CheckpointError."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, "an object", value)
        return Section(self.file, cast("dict[str, object]", value), f"{self.place}{name}.")

    def demand(self, name: str, allowed: tuple[str | int, ...], *, required: bool = False) -> None:
        """Refuse an option that has a value whose mathematics is not implemented. Raises: CheckpointError."""
        value = self.values.get(name)
        if (value is None and required) or (value is not None and (isinstance(value, bool) or value not in allowed)):
            raise self.fault(name, " or ".join(map(repr, allowed)), value)

    def fault(self, name: str, expected: str, value: object) -> CheckpointError:
        """Return the error for one option."""
        missing = value is None
        reason = "is missing" if missing else "has a value that is not supported"
        return CheckpointError(
            reason, file=self.file, subject=f"{self.place}{name}", expected=expected, got="nothing" if missing else _describe(value)
        )

    def _items(self, name: str, value: object) -> list[object]:
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.fault(name, "a list", value)
        return cast("list[object]", value)

    def _find(self, names: tuple[str, ...]) -> tuple[str, object]:
        found = [(name, self.values[name]) for name in names if self.values.get(name) is not None]
        if not found:
            return " or ".join(names), None
        name, value = found[0]
        for other, contrary in found[1:]:
            if contrary != value:
                raise self.fault(other, f"the same as {name}, {_describe(value)}", contrary)
        return name, value

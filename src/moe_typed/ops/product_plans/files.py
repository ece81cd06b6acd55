"""Files of tuned plans, and which of them say something of a layer.

``NAME.json`` holds what was fastest on the device of that name (spaces as underscores), for some layers, each at some numbers of tokens. Files lie in
``tuned``, beside this one, and in the directory that the environment variable MOE_TYPED_TUNED names, where ``moe-typed tune`` writes. A layer is
looked up by its format, experts here, top-k and widths: first in the files of this very device, then in those of devices of the same compute
capability, the named directory before the shipped one each time.
"""

import enum
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeAlias, cast, final

import attrs
import cattrs
from cattrs.preconf.json import make_converter
from cattrs.v import format_exception
from typing_extensions import override

from .spec import How, Plan, Tile
from .takes import fault_of

VARIABLE: Final = "MOE_TYPED_TUNED"
SHIPPED: Final = Path(__file__).parent / "tuned"
_MOST: Final = 2**31 - 1  # that a size of a tile can be: kernels count in 32 bits
_LISTED: Final = {"NVIDIA_H200": (9, 0)}  # files that are a list of layers, and do not say their device's capability

Capability: TypeAlias = tuple[int, int]


@final
@attrs.frozen(order=True)
class LayerKey:
    """What a layer is looked up by. ``format``: "bf16" (fp16 takes the same time) or "fp8" in blocks of 128; ``experts``: those of this rank."""

    format: str
    experts: int
    top_k: int
    hidden: int
    inter: int

    @override
    def __str__(self) -> str:
        """Return it as a clause."""
        return f"{self.format}, {self.experts} experts here, top {self.top_k}, hidden {self.hidden}, inter {self.inter}"


@final
@attrs.frozen
class Conditions:
    """What a plan was measured with. ``kernels`` and ``candidates``: digests of the kernels' source, and of what was tried and how."""

    device: str
    torch: str
    triton: str
    moe_typed: str
    kernels: str
    load: str
    candidates: str


@final
@attrs.frozen
class TunedPlan:
    """The fastest plan at a number of tokens, and its time in microseconds."""

    tokens: int
    how: How
    up: Tile
    down: Tile
    us: float | None = None
    measured: Conditions | None = None

    @property
    def plan(self) -> Plan:
        """Return the plan."""
        return Plan(self.how, self.up, self.down)


@final
@attrs.frozen
class TunedLayer:
    """The plans of a layer, by ascending numbers of tokens."""

    format: str
    experts: int
    top_k: int
    hidden: int
    inter: int
    plans: tuple[TunedPlan, ...]

    def __attrs_post_init__(self) -> None:
        tokens = [plan.tokens for plan in self.plans]
        if not tokens or tokens != sorted(set(tokens)) or tokens[0] < 1:
            raise ValueError(f"{self.key}: numbers of tokens must ascend from 1 on; got {tokens}")
        for tuned in self.plans:
            fault = fault_of(tuned.plan, is_fp8=self.format == "fp8", hidden=self.hidden, inter=self.inter)
            if fault is not None:
                raise ValueError(f"{self.key}, at {tuned.tokens} tokens: {fault}")

    @property
    def key(self) -> LayerKey:
        """Return what it is looked up by."""
        return LayerKey(self.format, self.experts, self.top_k, self.hidden, self.inter)


@final
@attrs.frozen
class TunedFile:
    """What is in a file. ``capability``: None where the file does not say it."""

    device: str
    capability: Capability | None
    layers: tuple[TunedLayer, ...]

    def __attrs_post_init__(self) -> None:
        keys = [layer.key for layer in self.layers]
        if len(keys) != len(set(keys)):
            raise ValueError("a layer is in it twice")


def _structure_tile(value: object, _: type) -> Tile:
    sizes = cast("list[object]", value) if isinstance(value, list) else []
    numbers = [one for one in sizes if isinstance(one, int) and not isinstance(one, bool) and 0 < one <= _MOST]
    if len(numbers) != len(sizes) or len(sizes) not in (5, 6):
        raise ValueError(f"a tile is [rows, columns, depth, warps, stages, group], whole numbers from 1 on; got {value}")
    return Tile(*numbers)


def _make_converter() -> cattrs.Converter:
    converter = make_converter(forbid_extra_keys=True)
    converter.register_structure_hook(Tile, _structure_tile)
    converter.register_unstructure_hook(Tile, list)
    return converter


CONVERTER: Final = _make_converter()


def read_tuned(path: Path) -> TunedFile:
    """Read a file. Raises: ValueError, which says why, for one that is not a file of tuned plans, or is that of another device than its name says."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(parsed, list):
            found = TunedFile(path.stem.replace("_", " "), _LISTED.get(path.stem), CONVERTER.structure(parsed, tuple[TunedLayer, ...]))
        elif isinstance(parsed, dict):
            found = CONVERTER.structure(parsed, TunedFile)
        else:
            raise ValueError("the JSON is neither an object nor a list of layers")
    except cattrs.BaseValidationError as error:
        raise ValueError(f"{path} is not a file of tuned plans: {'; '.join(cattrs.transform_error(error, format_exception=_explain))}") from None
    except (ValueError, RecursionError) as error:  # also of the JSON and of its encoding
        raise ValueError(f"{path} is not a file of tuned plans: {error}") from None
    if file_name(found.device) != path.name:
        raise ValueError(f"{path} was measured on {found.device}, whose plans belong into {file_name(found.device)}; rename it, or remove it")
    return found


def _explain(error: BaseException, kind: type | None) -> str:
    return str(error) if isinstance(error, ValueError) else format_exception(error, kind)


def file_name(device: str) -> str:
    """Return the name of a device's file."""
    return f"{device.replace(' ', '_').replace('/', '_')}.json"


@final
class Origin(enum.Enum):
    """Say where the plans of a layer come from."""

    DEVICE = "tuned on this device"
    CAPABILITY = "tuned on another device of the same compute capability"
    RULE = "by rule"


@final
@attrs.frozen
class Source:
    """Where the plans of a layer come from. ``file``: empty for a rule; ``detail``: what they were measured on and at, or why there are none."""

    origin: Origin
    file: str
    detail: str

    @override
    def __str__(self) -> str:
        """Return it as a clause."""
        return f"{self.origin.value}, since {self.detail}" if self.origin is Origin.RULE else f"{self.origin.value}: {self.detail} ({self.file})"


@final
@attrs.frozen
class Place:
    """The device that plans are for, and the directory that comes before the shipped one; None for none."""

    device: str
    capability: Capability
    directory: Path | None = None


def named_directory() -> Path | None:
    """Return the directory that the environment names, None for none. Raises: ValueError where there is no such directory."""
    named = os.environ.get(VARIABLE, "")
    return existing_directory(named) if named else None


def existing_directory(named: str) -> Path:
    """Return a directory. Raises: ValueError where there is none."""
    if not Path(named).is_dir():
        raise ValueError(f"{VARIABLE} names {named}, which is no directory; let it name one that moe-typed tune wrote, or unset it")
    return Path(named)


def find_layers(place: Place, fmt: str, experts: int, hidden: int, inter: int) -> dict[int, tuple[TunedLayer, Source]]:
    """Return the plans of a layer by top-k, each from the first file that has them. Raises: ValueError as read_tuned."""
    found: dict[int, tuple[TunedLayer, Source]] = {}
    for path, file, origin in _files(place):
        for layer in file.layers:
            if layer.key == LayerKey(fmt, experts, layer.top_k, hidden, inter):
                found.setdefault(layer.top_k, (layer, Source(origin, str(path), _measured(file.device, layer.plans))))
    return found


def source_of(place: Place, key: LayerKey) -> Source:
    """Return where the plans of a layer come from. Raises: ValueError as read_tuned."""
    known = find_layers(place, key.format, key.experts, key.hidden, key.inter).get(key.top_k)
    return Source(Origin.RULE, "", why_missing(place, str(key))) if known is None else known[1]


def why_missing(place: Place, layer: str) -> str:
    """Say why no file has plans for a layer, as a clause."""
    read = ", ".join(str(path) for path, _, _ in _files(place))
    if read:
        return f"{read} has nothing of {layer}; moe-typed tune measures it"
    major, minor = place.capability
    return f"there is no file of {place.device} nor of another device of compute capability {major}.{minor}; moe-typed tune makes one"


def _measured(device: str, plans: Sequence[TunedPlan]) -> str:
    versions = {f"moe_typed {plan.measured.moe_typed}, Triton {plan.measured.triton}" for plan in plans if plan.measured is not None}
    by = f" by {' and '.join(sorted(versions))}" if versions else ""
    return f"{device}{by}, at {', '.join(str(plan.tokens) for plan in plans)} tokens"


def _files(place: Place) -> Iterator[tuple[Path, TunedFile, Origin]]:
    """Yield the files that may have plans for a device, in the order in which they are asked."""
    directories = [SHIPPED] if place.directory is None else [place.directory, SHIPPED]
    for directory in directories:
        own = directory / file_name(place.device)
        if own.exists():
            yield own, read_tuned(own), Origin.DEVICE
    for directory in directories:
        for path in sorted(directory.glob("*.json")):
            if path.name != file_name(place.device) and (file := read_tuned(path)).capability == place.capability:
                yield path, file, Origin.CAPABILITY

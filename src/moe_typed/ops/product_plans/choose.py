"""Choose a plan: as it was measured for the layer where it was, else by a rule.

``tuned/NAME.json`` holds what was fastest on the device of that name (spaces as underscores), for some layers, each at some numbers of tokens. A
layer is looked up by its format, experts here, top-k and widths. Where it is found, the plan of the nearest number of tokens is taken (nearest by
ratio). Where the device has no file, that of a device of the same compute capability is taken. Where the layer is not found, a rule counts rows an
expert.
"""

import json
import math
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias, cast

import torch

from ..activation.spec import GROUP
from .spec import MOST_WALKED, How, Plan, Tile

_TUNED: Final = Path(__file__).parent / "tuned"
_SAME_CAPABILITY: Final = {(9, 0): "NVIDIA_H200"}
_FORMATS: Final = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8"}  # bf16 and fp16 take the same time


class Layer(NamedTuple):
    """What a plan depends on besides the tokens: sizes of a layer, and whether gate and up come in turns."""

    dtype: torch.dtype
    experts: int
    top_k: int
    hidden: int
    inter: int
    interleaved: bool


_Key: TypeAlias = tuple[str, int, int, int, int]
_Plans: TypeAlias = tuple[tuple[int, Plan], ...]


def choose_plan(device: torch.device, layer: Layer, tokens: int) -> Plan:
    """Return the plan for ``tokens`` tokens on a device."""
    plans = _tuned(_device_name(device)).get((_FORMATS.get(layer.dtype, ""), layer.experts, layer.top_k, layer.hidden, layer.inter), ())
    if plans and tokens:
        plan = min(plans, key=lambda known: abs(math.log(known[0] / tokens)))[1]
        if _fits(plan, layer, tokens):
            return plan
    return _by_rule(layer, tokens, wide=_is_hopper(device))


def without_wide(layer: Layer, tokens: int) -> Plan:
    """Return a plan for rows that the wide kernel does not take."""
    return _by_rule(layer, tokens, wide=False)


@cache
def _device_name(device: torch.device) -> str:
    if device.type != "cuda" or torch.version.hip is not None:
        return ""
    name = torch.cuda.get_device_name(device).replace(" ", "_")
    return name if (_TUNED / f"{name}.json").exists() else _SAME_CAPABILITY.get(torch.cuda.get_device_capability(device), "")


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@cache
def _tuned(name: str) -> dict[_Key, _Plans]:
    path = _TUNED / f"{name}.json"
    if not path.exists():
        return {}
    found: dict[_Key, _Plans] = {}
    for entry in cast("list[dict[str, object]]", json.loads(path.read_text())):
        sizes = [cast("int", entry[key]) for key in ("experts", "top_k", "hidden", "inter")]
        plans = cast("list[dict[str, object]]", entry["plans"])
        found[cast("str", entry["format"]), sizes[0], sizes[1], sizes[2], sizes[3]] = tuple(_plan(plan) for plan in plans)
    return found


def _plan(known: dict[str, object]) -> tuple[int, Plan]:
    up, down = (Tile(*cast("list[int]", known[key])) for key in ("up", "down"))
    return cast("int", known["tokens"]), Plan(How(known["how"]), up, down)


def wide_takes(layer: Layer) -> bool:
    """Say whether the wide kernel can multiply a layer: whole steps along both depths; for fp8 whole tiles, and gate and up apart."""
    if layer.dtype == torch.float8_e4m3fn:
        return not layer.interleaved and layer.hidden % 256 == 0 and layer.inter % GROUP == 0
    return layer.dtype in (torch.bfloat16, torch.float16) and layer.hidden % 64 == 0 and layer.inter % 64 == 0


def _fits(plan: Plan, layer: Layer, tokens: int) -> bool:
    match plan.how:
        case How.WIDE:
            return wide_takes(layer)
        case How.WALK:
            return tokens * layer.top_k <= MOST_WALKED
        case _:
            return True


# Three stages or so of each take less than 100 KiB of shared memory, which every GPU since sm_80 that serves MoE has.
_HALF: Final = {
    16: (Tile(16, 32, 128, 4, 4), Tile(16, 64, 128, 4, 4)),
    32: (Tile(32, 64, 64, 4, 4), Tile(32, 128, 64, 4, 4)),
    64: (Tile(64, 64, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
    128: (Tile(128, 64, 64, 8, 3, 8), Tile(128, 128, 64, 8, 3, 8)),
}
_FP8: Final = {
    16: (Tile(16, 128, 128, 4, 2), Tile(16, 128, 128, 4, 3)),
    32: (Tile(32, 128, 128, 4, 2), Tile(32, 128, 128, 4, 3)),
    64: (Tile(64, 128, 128, 8, 2), Tile(64, 128, 128, 4, 3)),
    128: (Tile(64, 128, 128, 8, 2, 8), Tile(64, 128, 128, 4, 3, 8)),
}
_VECTOR: Final = (Tile(1, 8, 512, 4, 1), Tile(1, 8, 256, 4, 1))
_WIDE: Final = Tile(128, 128, 64, 8, 4, 8)
_VECTOR_TOKENS: Final = 2  # from there on tiles catch up
_WIDE_ROWS: Final = 96  # an expert; below, blocks of 128 rows are mostly padding


def _by_rule(layer: Layer, tokens: int, *, wide: bool) -> Plan:
    routes = tokens * layer.top_k
    if tokens <= _VECTOR_TOKENS:
        return Plan(How.VECTOR, *_VECTOR)
    if wide and routes >= _WIDE_ROWS * layer.experts and wide_takes(layer):
        return Plan(How.WIDE, _WIDE, _WIDE)
    rows = next((rows for rows in (16, 32, 64) if routes <= rows * layer.experts), 128)
    how = How.WALK if rows == 16 and routes <= MOST_WALKED // 4 else How.SORTED
    if layer.dtype == torch.float32:  # without tensor cores ("ieee"), registers are what runs short
        return Plan(how, Tile(rows, 32, 32, 4, 2), Tile(rows, 64, 32, 4, 2))
    return Plan(how, *(_FP8 if layer.dtype == torch.float8_e4m3fn else _HALF)[rows])

"""Choose a plan: as it was measured for the layer where it was, else by a rule.

Where files of tuned plans have the layer (see files), the plan of the nearest number of tokens is taken (nearest by ratio). Where they do not, a rule
counts rows an expert.
"""

from collections.abc import Mapping
from itertools import pairwise
from math import isqrt
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import torch

from ..activation.spec import GROUP
from .files import Capability, Origin, Place, Source, TunedLayer, find_layers, named_directory, why_missing
from .spec import MOST_WALKED, How, Plan, Tile

_FORMATS: Final = {torch.bfloat16: "bf16", torch.float16: "bf16", torch.float8_e4m3fn: "fp8"}  # bf16 and fp16 take the same time

_UpTo: TypeAlias = tuple[tuple[int, Plan], ...]  # up to so many tokens, this plan
_NO_SOURCES: Final[Mapping[int, Source]] = MappingProxyType({})


class Layer(NamedTuple):
    """What plans depend on besides tokens and top-k: sizes of a layer, and whether gate and up come in turns."""

    dtype: torch.dtype
    experts: int
    hidden: int
    inter: int
    interleaved: bool


class Plans(NamedTuple):
    """The plans of a layer on a device: by top-k where they were measured; ``wide`` says whether the wide kernel runs there, and takes the layer.

    ``sources`` says where the measured ones come from, and ``why`` why there are no others.
    """

    layer: Layer
    wide: bool
    tuned: dict[int, _UpTo]
    sources: Mapping[int, Source] = _NO_SOURCES
    why: str = "nothing was looked up"

    @property
    def streams(self) -> bool:
        """Say whether the streaming kernel runs there, and takes the layer: where the wide one does, unless gate and up come in turns."""
        return self.wide and not self.layer.interleaved

    def choose(self, tokens: int, top_k: int) -> Plan:
        """Return the plan for a number of tokens."""
        up_to = self.tuned.get(top_k, ())
        for most, plan in up_to:
            if tokens <= most:
                runs = self.streams if plan.how is How.STREAM else plan.how is not How.WALK or tokens * top_k <= MOST_WALKED
                return plan if runs else self.by_rule(tokens, top_k)
        return up_to[-1][1] if up_to and up_to[-1][1].how is How.WIDE else self.by_rule(tokens, top_k)

    def by_rule(self, tokens: int, top_k: int) -> Plan:
        """Return a plan that fits any layer."""
        routes, dtype = tokens * top_k, self.layer.dtype
        if tokens <= _VECTOR_TOKENS:
            return Plan(How.VECTOR, *_VECTOR)
        if self.streams and routes <= _STREAM_ROWS * self.layer.experts:
            return self._stream(tokens, routes)
        if self.wide and routes >= _WIDE_ROWS * self.layer.experts:
            return Plan(How.WIDE, _WIDE, _WIDE)
        rows = (
            16 if routes <= 16 * self.layer.experts else 32 if routes <= 32 * self.layer.experts else 64 if routes <= 64 * self.layer.experts else 128
        )
        how = How.WALK if rows == 16 and routes <= MOST_WALKED // 4 else How.SORTED
        if dtype == torch.float32:  # without tensor cores ("ieee"), registers are what runs short
            return Plan(how, Tile(rows, 32, 32, 4, 2), Tile(rows, 64, 32, 4, 2))
        return Plan(how, *(_FP8 if dtype == torch.float8_e4m3fn else _HALF)[rows])

    def by_tiles(self, tokens: int, top_k: int) -> Plan:
        """Return a plan that fits any layer, and by which the second product does not sum."""
        return self.without_wide().by_rule(max(_VECTOR_TOKENS + 1, tokens), top_k)

    def _stream(self, tokens: int, routes: int) -> Plan:
        rows = 8 if tokens <= 8 else 16 if routes <= 4 * self.layer.experts else 32
        stages = (_STREAM_FP8 if self.layer.dtype == torch.float8_e4m3fn else _STREAM_HALF)[rows]
        # Pieces that are short in depth are as many columns wide.
        columns = 512 if self.layer.inter <= 512 and not self.layer.hidden % 512 else 128
        return Plan(How.STREAM, Tile(rows, 64, 128, 4, stages), Tile(rows, columns, 128, 4, stages))

    def without_wide(self, why: str = "rows or weights lie where the copy engine cannot copy them") -> "Plans":
        """Return the plans where the wide and the streaming kernel cannot run: by rule alone."""
        return Plans(self.layer, False, {}, why=why)

    def source(self, top_k: int) -> Source:
        """Return where the plans for a number of routes a token come from."""
        why = f"the layer was measured for top {' and '.join(map(str, self.sources))} alone" if self.sources else self.why
        return self.sources.get(top_k, Source(Origin.RULE, "", why))


def plans_for(device: torch.device, layer: Layer) -> Plans:
    """Return the plans of a layer on a device. Raises: ValueError for a file of tuned plans that cannot be read."""
    if device.type != "cuda" or torch.version.hip is not None:
        return Plans(layer, False, {}, why="plans are measured on NVIDIA GPUs alone")
    place = Place(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device), named_directory())
    return plans_at(place, layer)


def plans_at(place: Place, layer: Layer) -> Plans:
    """Return the plans of a layer at a place, which need not be here. Raises: ValueError for a file of tuned plans that cannot be read."""
    wide = runs_wide(place.capability, layer)
    fmt = _FORMATS.get(layer.dtype)
    if fmt is None:
        return Plans(layer, wide, {}, why=f"plans for {layer.dtype} are not measured")
    found = find_layers(place, fmt, layer.experts, layer.hidden, layer.inter)
    tuned = {top_k: plans for top_k, (known, _) in found.items() if (plans := _up_to(known, wide=wide))}
    sources = {top_k: source for top_k, (_, source) in found.items() if top_k in tuned}
    why = "" if sources else why_missing(place, f"{fmt}, {layer.experts} experts here, hidden {layer.hidden}, inter {layer.inter}")
    return Plans(layer, wide, tuned, sources, why)


def _up_to(known: TunedLayer, *, wide: bool) -> _UpTo:
    kept = [(tuned.tokens, tuned.plan) for tuned in known.plans if wide or tuned.how is not How.WIDE]
    ends = [isqrt(tokens * following) for (tokens, _), (following, _) in pairwise(kept)]
    return tuple((most, plan) for (_, plan), most in zip(kept, [*ends, *(tokens for tokens, _ in kept[-1:])], strict=True))


def runs_wide(capability: Capability, layer: Layer) -> bool:
    """Say whether the wide kernel multiplies a layer on a device: it is written in Hopper's instructions."""
    return capability[0] == _HOPPER and wide_takes(layer)


def wide_takes(layer: Layer) -> bool:
    """Say whether the wide kernel can multiply a layer: whole steps along both depths; for fp8 whole tiles, and gate and up apart."""
    if layer.dtype == torch.float8_e4m3fn:
        return not layer.interleaved and layer.hidden % 256 == 0 and layer.inter % GROUP == 0
    return layer.dtype in (torch.bfloat16, torch.float16) and layer.hidden % 64 == 0 and layer.inter % 64 == 0


_HOPPER: Final = 9  # the generation that has them; no other does
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
_STREAM_ROWS: Final = 16  # an expert on average, so that most have no more than a block of 32
_STREAM_HALF: Final = {8: 11, 16: 11, 32: 10}  # stages by rows: 228 KiB of shared memory, which compute capability 9.0 has, hold so many
_STREAM_FP8: Final = {8: 11, 16: 10, 32: 8}
_WIDE_ROWS: Final = 96  # an expert; below, blocks of 128 rows are mostly padding

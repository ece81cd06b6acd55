"""Which plans are tried for a layer at a number of tokens.

Plans come in families, one for each way of multiplying and height of a tile; within a family the tiles of the two products are tried one product at
a time, since the two take their time one after the other. Left out is what a kernel cannot do or a device cannot hold: shared memory for the stages
of a tile, registers for its sums, widths that a tile of fp8 would cut. Whatever else does not compile or launch is found out when it is tried.
"""

from collections.abc import Iterator
from itertools import product
from typing import Final, NamedTuple, final

import attrs
import torch

from ..ops.activation.spec import GROUP
from ..ops.product_plans.choose import Layer, Plans, wide_takes
from ..ops.product_plans.files import LayerKey
from ..ops.product_plans.spec import MOST_WALKED, WIDE_ROWS, How, Plan, Tile

DTYPES: Final = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_SUMS: Final = 160  # of 32 bits in a thread; it has 255 registers, and a tile's pieces and addresses want theirs
_VECTOR_TOKENS: Final = 16  # beyond, weights that several routes share are read too often
_VECTOR_SUMS: Final = 128
_WIDE_ROUTES: Final = 24  # an expert; below, blocks of 128 rows are padding for the most part
_STREAM_SPANS: Final = (128, 512, 256)  # columns of a piece of the second product
_STREAM_BESIDES: Final = 6 * 1024  # shared memory beside the stages: barriers, what sums and stores go through, and a KiB of the system's
_GROUPS: Final = (1, 2, 4, 8, 16)  # blocks of rows side by side


@final
@attrs.frozen
class Cell:
    """What is tuned at once: a layer at a number of tokens. ``routed``: experts on all ranks; ``load``: how routes are drawn, "uniform" or "zipf".

    ``by_expert``: rows come sorted by expert, which no plan makes use of that walks through routes or multiplies each by itself.
    """

    layer: LayerKey
    routed: int
    tokens: int
    load: str
    by_expert: bool = False

    def takes(self, how: How) -> bool:
        """Say whether a plan of a kind is of use here."""
        return not self.by_expert or how in (How.SORTED, How.WIDE)

    @property
    def routes(self) -> int:
        """Return the routes of all tokens, to whatever rank."""
        return self.tokens * self.layer.top_k


@final
@attrs.frozen
class Limits:
    """What a device holds. ``shared``: bytes of shared memory for one program; ``capability``: its compute capability."""

    shared: int
    capability: tuple[int, int]


@final
@attrs.frozen
class Family:
    """Plans that differ in the tile of one product or of the other; the first tiles are tried first."""

    how: How
    ups: tuple[Tile, ...]
    downs: tuple[Tile, ...]

    def plans(self) -> tuple[Plan, ...]:
        """Return plans with each tile in at least one."""
        over_ups = (Plan(self.how, up, self.downs[0]) for up in self.ups)
        return (*over_ups, *(Plan(self.how, self.ups[0], down) for down in self.downs[1:]))


class Sizes(NamedTuple):
    """What is tried of tiles of one height, in this order; columns of the first product are pairs."""

    ups: tuple[int, ...]
    downs: tuple[int, ...]
    depths: tuple[int, ...]
    stages: tuple[int, ...]
    warps: tuple[int, ...]
    groups: tuple[int, ...]


TILES: Final = {
    ("bf16", 16): Sizes((64, 32, 128), (128, 64, 32), (128, 64, 256), (3, 4, 5), (4,), (1,)),
    ("bf16", 32): Sizes((64, 128), (128, 64), (64, 128), (4, 3), (4, 8), (1,)),
    ("bf16", 64): Sizes((128, 64), (128, 256), (64,), (4, 3), (4, 8), (1, 8)),
    ("bf16", 128): Sizes((64, 128), (128, 256), (64,), (3, 4), (8, 4), (8, 1)),
    ("fp8", 16): Sizes((32, 64, 128), (128, 64, 32, 256), (GROUP,), (3, 4, 5, 2), (4, 8), (1,)),
    ("fp8", 32): Sizes((64, 128), (128, 64, 256), (GROUP,), (3, 4, 2), (4, 8), (1,)),
    ("fp8", 64): Sizes((128, 64), (128, 256), (GROUP,), (4, 3, 2), (8, 4), (1, 8)),
    ("fp8", 128): Sizes((64,), (128, 64), (GROUP,), (3, 4, 2), (8,), (8, 1)),
}
# For how many routes an expert blocks of so many rows are tried with the streaming kernel: on average, above the first and up to the second.
STREAMED: Final = {8: (0, 4), 16: (0.5, 12), 32: (4, 40), 64: (16, 80)}
# For how many routes an expert a height is tried: on average, above the first and up to the second.
ROUTES: Final = {16: (0, 24), 32: (6, 96), 64: (12, 512), 128: (32, 2**31)}


def families(cell: Cell, limits: Limits) -> tuple[Family, ...]:
    """Return what is tried, pruned by what the kernels take and the device holds; families without a tile are left out."""
    found = [*_vectors(cell), *_tiled(cell, limits), *_streamed(cell, limits), *_wide(cell, limits)]
    return tuple(family for family in found if family.ups and family.downs and cell.takes(family.how))


def _vectors(cell: Cell) -> Iterator[Family]:
    if cell.tokens > _VECTOR_TOKENS:
        return
    is_fp8 = cell.layer.format == "fp8"
    stages = (1,) if is_fp8 else (1, 3, 4)  # asynchronous copies of fp8 are far slower than plain loads there

    def tiles(columns: tuple[int, ...], depths: tuple[int, ...], sums: int) -> tuple[Tile, ...]:
        tried = product(columns, depths, stages)
        return tuple(Tile(1, width, depth, 4, stage) for width, depth, stage in tried if sums * width * depth <= _VECTOR_SUMS * 4 * 32)

    yield Family(How.VECTOR, tiles((8, 4, 16), (512, 256, 1024), 2), tiles((8, 4, 16), (256, 512), 1))


def _tiled(cell: Cell, limits: Limits) -> Iterator[Family]:
    fmt, an_expert = cell.layer.format, cell.routes / cell.routed
    for rows, (least, most) in ROUTES.items():
        if not least < an_expert <= most:
            continue
        ups = _tiles(cell, limits, rows, first=True)
        downs = _tiles(cell, limits, rows, first=False)
        # What a first product of whole groups makes is quantised, and the second then is another kernel.
        kinds = [ups] if fmt == "bf16" else [[up for up in ups if (up.columns == GROUP) is quantised] for quantised in (False, True)]
        for kind in kinds:
            if rows == 16 and cell.routes <= MOST_WALKED:
                yield Family(How.WALK, tuple(kind), tuple(downs))
            yield Family(How.SORTED, tuple(kind), tuple(downs))


def _tiles(cell: Cell, limits: Limits, rows: int, *, first: bool) -> list[Tile]:
    tried, is_fp8 = TILES[cell.layer.format, rows], cell.layer.format == "fp8"
    size, width = (1 if is_fp8 else 2), (cell.layer.inter if first else cell.layer.hidden)
    found: list[Tile] = []
    for columns, depth, stages, warps, group in product(tried.ups if first else tried.downs, tried.depths, tried.stages, tried.warps, tried.groups):
        both = 2 * columns if first else columns  # gate and up
        piece = (rows + both) * depth * size
        # Beside the sums of an fp8 tile are those of one step: of gate or up, or of the second product.
        sums = rows * (both + (columns if is_fp8 else 0)) // (32 * warps)
        fits = stages * piece <= limits.shared and sums <= _SUMS and both >= 16 * warps
        if fits and not (is_fp8 and width % columns):
            found.append(Tile(rows, columns, depth, warps, stages, group))
    return found


def _streamed(cell: Cell, limits: Limits) -> Iterator[Family]:
    layer = _layer(cell)
    if limits.capability[0] != 9 or not Plans(layer, wide_takes(layer), {}).streams:
        return
    is_fp8, hidden = cell.layer.format == "fp8", cell.layer.hidden
    for rows, (least, most) in STREAMED.items():
        if not least < cell.routes / cell.routed <= most or (is_fp8 and rows == 64):  # whose sums do not fit registers
            continue
        piece = 128 * 128 + rows * (2 * 128 + 16 if is_fp8 else 128)  # weights, rows (for fp8 twice, and scales)
        programs = (1, 2) if rows <= 16 else (1,)
        found = [(group, (limits.shared // group - _STREAM_BESIDES) // piece) for group in programs]
        ups = tuple(Tile(rows, 64, 128, 4, stages, group) for group, stages in found if stages > 1)
        downs = (
            tuple(Tile(rows, columns, 128, 4, ups[0].stages) for columns in _STREAM_SPANS if columns == 128 or not hidden % columns) if ups else ()
        )
        yield Family(How.STREAM, ups, downs)


def _wide(cell: Cell, limits: Limits) -> Iterator[Family]:
    layer = _layer(cell)
    if limits.capability[0] == 9 and wide_takes(layer) and cell.routes > _WIDE_ROUTES * cell.routed:
        tiles = tuple(Tile(WIDE_ROWS, 128, 64, 8, 4, group) for group in _GROUPS)
        yield Family(How.WIDE, tiles, tiles)


def _layer(cell: Cell) -> Layer:
    return Layer(DTYPES[cell.layer.format], cell.layer.experts, cell.layer.hidden, cell.layer.inter, interleaved=False)

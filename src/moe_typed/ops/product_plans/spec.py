"""What a plan says."""

from enum import Enum
from typing import Final, NamedTuple


class How(Enum):
    """How the two products are made.

    VECTOR: for a few tokens: each route by itself, without matrix instructions; the second product sums the routes of a row. Between the products
    nothing is quantised. STREAM: for few rows an expert: sorted routes, and both products and the sum in one launch, for compute capability 9.x.
    WALK: for some tokens: tiles, but nothing is sorted; every program looks through all routes for those of its expert. SORTED: tiles over sorted
    routes. WIDE: the same, by a persistent kernel for compute capability 9.x.
    """

    VECTOR = "vector"
    STREAM = "stream"
    WALK = "walk"
    SORTED = "sorted"
    WIDE = "wide"


class Tile(NamedTuple):
    """Describe the piece of a product that one program makes, and how.

    ``columns`` of the first product are pairs of gate and up. ``group``: this many blocks of rows go through the columns side by side. A vector
    kernel has one row, and a wide one 128 rows and its own columns, depth, warps and stages. A streaming kernel has 8, 16, 32 or 64 rows, a depth of
    128 bytes, 64 columns of the first product and of the second a multiple of 128, which must divide them unless it is 128; ``stages`` are as many as
    fit, and ``group`` is how many programs a multiprocessor has, 1 or 2.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 1


class Plan(NamedTuple):
    """Say how both products are made."""

    how: How
    up: Tile
    down: Tile


WIDE_ROWS: Final = 128  # of a block of the wide kernel: two warpgroups of 64
MOST_WALKED: Final = 512  # routes; beyond, looking through all takes longer than sorting
STREAM_ROWS: Final = (8, 16, 32, 64)  # of a block of the streaming kernel: what its matrix instructions have on the side of the payload
STREAM_COLUMNS: Final = 128  # of the second product that it multiplies at a time
STREAM_PROGRAMS: Final = (1, 2)  # of a multiprocessor

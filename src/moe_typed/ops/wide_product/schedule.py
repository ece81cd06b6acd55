"""Which tile a program of the wide kernel makes next.

A tile is what one block of rows makes of one piece of the weights. ``group`` blocks go through the pieces side by side, so that a piece that several
of them need is in L2. Programs take tiles in turns, each time one place further: the number of blocks may divide that of the programs, and no program
shall have the same block every time, since one that is half empty takes half the time. Where at most half of the programs would have something to do
in the last turn, its tiles are cut in halves of 64 rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def share(used: gl.tensor, TILES: gl.constexpr) -> tuple[gl.tensor, gl.tensor, gl.tensor]:
    """Return how many turns this program has, how many every program has, and whether the one after those is of halves."""
    programs = gl.num_programs(0)
    rounds = used * TILES // programs
    rest = used * TILES % programs
    halved = rest * 2 <= programs
    place = (gl.program_id(0) + rounds) % programs
    has_more = place < gl.where(halved, rest * 2, rest)
    return rounds + has_more.to(gl.int32), rounds, halved


@gluon.jit
def locate(
    turn: gl.tensor, place: gl.tensor, rounds: gl.tensor, halved: gl.tensor, used: gl.tensor, group: gl.tensor, TILES: gl.constexpr
) -> tuple[gl.tensor, gl.tensor, gl.tensor, gl.tensor]:
    """Return the block and the tile of a turn, which half of the rows it is of (-1: both), and the place of the next turn.

    ``place``: this program's among all in this turn; its number in the first.
    """
    programs = gl.num_programs(0)
    is_half = (turn >= rounds) & halved
    number = turn * programs + gl.where(is_half, place // 2, place)
    first = number // (group * TILES) * group
    size = gl.minimum(used - first, group)
    inside = number - first * TILES
    following = gl.where(place + 1 == programs, 0, place + 1)
    return first + inside % size, inside // size, gl.where(is_half, place % 2, -1), following

"""What the kernels take of a plan for a layer: whatever else a file says would be a wrong result, or a fault of the device, when rows come.

What only takes long, does not fit a device, or is for a kernel that does not run there, is no fault: the compiler says the former, and ``choose``
takes a rule for the latter.
"""

from typing import Final

from ..activation.spec import GROUP
from .spec import STREAM_COLUMNS, STREAM_PROGRAMS, STREAM_ROWS, How, Plan, Tile

_SMALLEST: Final = 16  # rows, columns and depth of a matrix instruction
_MOST_WARPS: Final = 32  # of a program: 1024 threads


def fault_of(plan: Plan, *, is_fp8: bool, hidden: int, inter: int) -> str | None:
    """Return why the kernels cannot multiply a layer by a plan, as a clause; None where they can."""
    if plan.how is How.WIDE:
        return None  # which has its own tiles, and takes any number of blocks side by side
    if plan.how is How.STREAM:
        return stream_fault(plan.up, plan.down, hidden)
    least = 1 if plan.how is How.VECTOR else _SMALLEST
    for name, tile in (("first", plan.up), ("second", plan.down)):
        sizes = (tile.columns, tile.depth) if plan.how is How.VECTOR else (tile.rows, tile.columns, tile.depth)
        if any(size < least or size & (size - 1) for size in sizes):
            return f"rows, columns and depth of the {name} product are powers of two from {least} on; got {list(tile)}"
        if tile.warps & (tile.warps - 1) or tile.warps > _MOST_WARPS:
            return f"warps of the {name} product are a power of two up to {_MOST_WARPS}; got {tile.warps}"
    if plan.how is How.SORTED and plan.up.rows != plan.down.rows:
        return f"both products go through the same sorted blocks; got {plan.up.rows} rows and {plan.down.rows}"
    return _fault_of_groups(plan, hidden, inter) if is_fp8 else None


def stream_fault(up: Tile, down: Tile, hidden: int) -> str | None:
    """Return why the streaming kernel cannot multiply by a pair of tiles, as a clause; None where it can."""
    if up.rows not in STREAM_ROWS or up.group not in STREAM_PROGRAMS:
        return f"a streaming kernel has rows of {STREAM_ROWS} and programs of {STREAM_PROGRAMS}; got {up.rows} and {up.group}"
    columns = down.columns
    if columns % STREAM_COLUMNS or (columns != STREAM_COLUMNS and hidden % columns):
        return f"pieces of {columns} columns are no multiple of {STREAM_COLUMNS} that divides hidden = {hidden}"
    return None


def _fault_of_groups(plan: Plan, hidden: int, inter: int) -> str | None:
    """Say which tile cuts groups of scales, or goes beyond the weights, where fp8 weights are read without a mask."""
    if plan.how is How.VECTOR:
        if 2 * plan.up.columns > GROUP or plan.down.columns > GROUP:
            return f"columns of fp8 have one scale: at most {GROUP // 2} pairs and {GROUP}; got {plan.up.columns} and {plan.down.columns}"
        return None
    if plan.up.depth != GROUP or plan.down.depth != GROUP:
        return f"the depth of fp8 is the group of scales, {GROUP}; got {plan.up.depth} and {plan.down.depth}"
    if plan.up.columns > GROUP:
        return f"a tile of fp8 has at most {GROUP} pairs; got {plan.up.columns}"
    if inter % plan.up.columns or hidden % plan.down.columns:
        return f"columns of fp8 must divide inter = {inter} and hidden = {hidden}; got {plan.up.columns} and {plan.down.columns}"
    return None

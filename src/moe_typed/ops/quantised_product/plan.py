"""Choose a tile by a rule: rows an expert, how weights are held, and groups of scales that must not be cut."""

from typing import Final

import torch

from ..product_plans.spec import Tile
from .spec import Code, Matrix, Rows, scales_codes

_SMALLEST_DEPTH: Final = 16  # of a matrix instruction, but for eight bits
_SMALLEST_DEPTH_8: Final = 32  # also of weights in fewer than 16 bits: Triton 3.6 makes wrong pieces of 16 of them (H200)
_SUPERBLOCK: Final = 8  # blocks side by side where an expert has more than one


def choose_tile(rows: Rows, matrix: Matrix, routes: int, *, paired: bool) -> Tile:
    """Return the tile. ``paired``: a program holds as many columns of gate and of up.

    Raises: ValueError for groups of scales that no matrix instruction fits into: of a size that 32 does not divide.
    """
    height = next((rows_ for rows_ in (16, 32, 64) if routes <= rows_ * matrix.data.shape[0]), 128)
    if rows.data.dtype == torch.float32:  # without tensor cores ("ieee"), registers are what runs short
        return Tile(height, 32, fitting_depth(rows, matrix, 32), 4, 2)
    is_wide = rows.data.dtype.itemsize > 1 and (height >= 64 or matrix.code is Code.DENSE)  # pieces of at most 128 bytes a row
    depth = fitting_depth(rows, matrix, 64 if is_wide else 128)
    warps = 8 if height == 128 else 4
    columns = 64 if paired or height <= 32 else 128
    return Tile(height, columns, depth, warps, 3, _SUPERBLOCK if height == 128 else 1)


def fitting_depth(rows: Rows, matrix: Matrix, most: int) -> int:
    """Return the largest power of two up to ``most`` that divides every group of scales which multiply sums.

    Raises: ValueError if that is too small for a matrix instruction.
    """
    groups = [rows.group] if rows.scale is not None and rows.scale.dtype == torch.float32 else []
    if not scales_codes(rows.data.dtype, matrix):
        groups.append(matrix.group)
    # Once for the whole depth is no group.
    depth = min([most, *(group & -group for group in groups if group < matrix.depth)])
    smallest = _SMALLEST_DEPTH if matrix.code is Code.DENSE else _SMALLEST_DEPTH_8
    if depth < smallest:
        raise ValueError(f"scales are for groups of {matrix.group} along the depth; the Triton kernels take multiples of {smallest}")
    return depth

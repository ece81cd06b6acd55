"""Choose how, and a tile, by a rule: rows an expert, how weights are held, and groups of scales that must not be cut."""

from typing import Final

import torch

from ..product_plans.spec import How, Tile
from .spec import E8M0, Code, Matrix, Rows, scales_codes

_SMALLEST_DEPTH: Final = 16  # of a matrix instruction, but for eight bits
_SMALLEST_DEPTH_8: Final = 32  # also of weights in fewer than 16 bits: Triton 3.6 makes wrong pieces of 16 of them (H200)
_SUPERBLOCK: Final = 8  # blocks side by side where an expert has more than one

# Rows an expert, on average, up to which a tile has that height; beyond, 128. With scales that multiply codes, decoding takes so long that a second
# block of rows for an expert costs more than half of a block that is empty.
_HEIGHTS: Final = (16, 32, 64)
_HEIGHTS_BY_CODE: Final = (16, 64)
_HIGHEST: Final = 128

# Measured on an H200, for 128 experts of 2048 x 768, rows in bfloat16.
_MOST_WALKED: Final = 64  # routes; at 512, walking takes 1.2 to 1.5 (first product) and 1.2 to 3 times (second) as long
# Rows an expert from which on decoding its weights once, for the wide kernel, takes less. What each takes is proportional to the weights, whatever
# their sizes. In microseconds for those 604 million: decoding 455, the wide kernel 198 + 1.87 a row, tiles that decode int8 4.0 a row. Those that
# multiply codes by scales took 1.2 times that at 32 rows.
_DECODED_ROWS: Final = 288
_DECODED_ROWS_BY_CODE: Final = 224
# Whole layers over int4: by tiles 357 at 32 rows an expert and 1760 at 256, of these weights, and 2365 at 128 of Mixtral's; decoding (394, 920) and
# the layer in bf16 (337 to 681, 899) take less from between 100 and 128 on.
_DECODED_ROWS_INT4: Final = 128


def choose_how(rows: Rows, matrix: Matrix, routes: int, *, wide: bool) -> How:
    """Return WALK for so few routes that nothing is sorted; WIDE where weights are decoded once, and multiplied by the wide kernel; else SORTED.

    ``wide``: whether that kernel takes the layer.
    """
    experts = matrix.data.shape[0]
    decoded_rows = _DECODED_ROWS_BY_CODE if _has_e8m0(matrix) else _DECODED_ROWS_INT4 if matrix.code is Code.INT4 else _DECODED_ROWS
    if wide and _is_bf16(rows) and matrix.code is not Code.DENSE and routes >= decoded_rows * experts:
        return How.WIDE
    return How.WALK if routes <= min(_MOST_WALKED, _HEIGHTS[0] * experts) else How.SORTED


def _has_e8m0(matrix: Matrix) -> bool:
    return matrix.scale is not None and matrix.scale.dtype == E8M0


def _is_bf16(rows: Rows) -> bool:
    """Say whether rows are multiplied as bfloat16, so that weights may be decoded to that."""
    return rows.data.dtype == torch.bfloat16 or (rows.scale is not None and rows.scale.dtype == E8M0)


def choose_tile(rows: Rows, matrix: Matrix, routes: int, *, paired: bool) -> Tile:
    """Return the tile. ``paired``: a program holds as many columns of gate and of up.

    Raises: ValueError for groups of scales that no matrix instruction fits into: of a size that 32 does not divide.
    """
    heights = _HEIGHTS_BY_CODE if _has_e8m0(matrix) else _HEIGHTS
    height = next((rows_ for rows_ in heights if routes <= rows_ * matrix.data.shape[0]), _HIGHEST)
    if rows.data.dtype == torch.float32:  # without tensor cores ("ieee"), registers run short: at 128 rows 4 warps spill 4 KiB a thread
        return Tile(height, 32, fitting_depth(rows, matrix, 32), 8 if height == _HIGHEST else 4, 2)
    is_wide = rows.data.dtype.itemsize > 1 and (height >= 64 or matrix.code is Code.DENSE)  # pieces of at most 128 bytes a row
    depth = fitting_depth(rows, matrix, 64 if is_wide else 128)
    if height == _HIGHEST:
        return Tile(height, 64 if paired else 128, depth, 8, 3, _SUPERBLOCK)
    if height > _HEIGHTS[0]:
        # Of 64 x 128 x 32 Triton 3.6 makes no code where a byte holds two codes.
        return Tile(height, 64 if paired or depth == _SMALLEST_DEPTH_8 else 128, depth, 4, 3)
    return Tile(height, 32 if paired and routes > _MOST_WALKED and not _has_e8m0(matrix) else 64, depth, 4, 4)


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

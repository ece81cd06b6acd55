"""Tile sizes of the grouped GEMM. Correct for every shape; not tuned for any."""

from typing import Final, NamedTuple

import torch

SCALE_BLOCK: Final = 128  # fp8: one scale for 128 x 128 of a weight, and for 128 channels of a row


class Tile(NamedTuple):
    """Describe the piece of the product that one program makes, and how."""

    block_n: int
    block_k: int
    warps: int
    stages: int


def choose_block_m(routes: int, num_experts: int) -> int:
    """Return the rows of a block: about what an expert gets, between 16 (the fewest that tl.dot takes) and 128 (the most that fits with 8 warps)."""
    for block_m in (16, 32, 64):
        if routes <= block_m * num_experts:
            return block_m
    return 128


def choose_tile(dtype: torch.dtype, block_m: int) -> Tile:
    """Return the tile for rows and weights of ``dtype``: three stages of 128 x 128 take 96 KiB, which fits every GPU since sm_80 that serves MoE."""
    warps = 4 if block_m <= 32 else 8  # 64 accumulators a thread at most
    if dtype == torch.float8_e4m3fn:
        return Tile(SCALE_BLOCK, SCALE_BLOCK, warps, 3)  # a step along k, and the tile's columns, lie within one scale block
    if dtype == torch.float32:
        return Tile(64, 32, warps, 2)  # without tensor cores ("ieee"), registers are what runs short
    return Tile(128, 64, warps, 3)

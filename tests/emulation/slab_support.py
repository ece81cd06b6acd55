"""Slabs of the low-latency exchanges: their experts, and where their rows came from."""

import torch
from torch import Tensor

from tests.emulation.comm_support import LOCAL, expert
from tests.ops.support import ints


def run_experts(x: Tensor, rank: int) -> Tensor:
    """Return the slabs of a rank (local experts, rows, hidden) through its experts, poison included, bf16."""
    return torch.stack([expert(x[index], rank * LOCAL + index) for index in range(x.size(0))]).to(torch.bfloat16)


def positions(src_info: Tensor, layout_range: Tensor, local: int) -> dict[tuple[int, int], int]:
    """Return the row of each (source rank, token) in the slab of a local expert."""
    found: dict[tuple[int, int], int] = {}
    for source, packed in enumerate(ints(layout_range[local])):
        for row in range(packed >> 32, (packed >> 32) + (packed & 0xFFFFFFFF)):
            found[source, int(src_info[local, row])] = row
    return found

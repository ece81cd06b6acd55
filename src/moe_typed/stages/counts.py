"""How many rows arrived, as libraries say it. No two of these mean the same, although most are int32 tensors on the device.

The total over all experts is ``routing.DeviceCount``; the classes here are per local expert.
"""

from typing import Annotated, final

import torch
from jaxtyping import Int32
from torch import Tensor

from ..boundary import Layout, boundary, value_error

_CONTIGUOUS = Layout(contiguous=True)


def _check_alignment(counts: object, alignment: int) -> None:
    if alignment < 1:
        raise value_error(counts, "alignment", f"is {alignment}", "1 says that nothing is padded")


@final
@boundary
class ReceivedPerExpert:
    """Rows that arrived for each local expert. ``counts``: int32 (local_experts,) on the device."""

    counts: Annotated[Int32[Tensor, " local_experts"], _CONTIGUOUS]

    def experts_of_slab(self, capacity: int) -> Tensor:
        """Return the local expert of each row of slabs of ``capacity`` rows, -1 for a stale one: int32 (rows,); no host sync."""
        counts = self.counts
        expert = torch.arange(counts.shape[0], dtype=torch.int32, device=counts.device).unsqueeze(1)
        position = torch.arange(capacity, dtype=torch.int32, device=counts.device)
        return torch.where(position < counts.unsqueeze(1), expert, -1).view(-1)


@final
@boundary
class PaddedReceivedPerExpert:
    """Routes that arrived for each local expert, each rounded up to a multiple of ``alignment``, on the host: sizes of segments, not live counts."""

    counts: tuple[int, ...]
    alignment: int

    def check_values(self) -> None:
        """Raise BoundaryError for a count that is no multiple."""
        _check_alignment(self, self.alignment)
        for count in self.counts:
            if count < 0 or count % self.alignment:
                raise value_error(self, "counts", f"holds {count}, which is no multiple of the alignment {self.alignment}")


@final
@boundary
class PaddedPrefixSum:
    """The inclusive prefix sum of the padded counts of the local experts; live counts cannot be had from it. ``ends``: int32 (local_experts,)."""

    ends: Annotated[Int32[Tensor, " local_experts"], _CONTIGUOUS]
    alignment: int

    def check_values(self) -> None:
        """Raise BoundaryError for ends that fall, and for one that is no multiple of the alignment."""
        _check_alignment(self, self.alignment)
        counts = torch.diff(self.ends, prepend=self.ends.new_zeros(1))
        if bool(((counts < 0) | (counts % self.alignment != 0)).any()):
            raise value_error(self, "ends", f"is no prefix sum of multiples of {self.alignment}", "the ends of live rows are SegmentEnds")


@final
@boundary
class SegmentEnds:
    """Where the live rows of each local expert end. ``ends``: int32 (local_experts,), on the device.

    Segments begin at multiples of ``alignment``, each at the first one that is not before the end of the segment before it (DeepGEMM's psum layout).
    """

    ends: Annotated[Int32[Tensor, " local_experts"], _CONTIGUOUS]
    alignment: int

    def check_values(self) -> None:
        """Raise BoundaryError for a segment that ends before it begins."""
        _check_alignment(self, self.alignment)
        if bool((self.ends < self.starts()).any()):
            raise value_error(self, "ends", "holds a segment that ends before it begins", "a plain prefix sum of padded counts is a PaddedPrefixSum")

    def starts(self) -> Tensor:
        """Return where each segment begins: int32 (local_experts,); no host sync."""
        before = torch.nn.functional.pad(self.ends[:-1], (1, 0))
        return -(-before // self.alignment) * self.alignment

    def experts_of_rows(self, rows: int) -> Tensor:
        """Return the local expert of each of ``rows`` rows, -1 for gaps and for what follows the last segment: int32 (rows,); no host sync."""
        row = torch.arange(rows, dtype=torch.int32, device=self.ends.device)
        expert = torch.searchsorted(self.ends, row, right=True, out_int32=True)
        starts = torch.nn.functional.pad(self.starts(), (0, 1), value=rows)  # one more for the rows after the last segment
        return torch.where(row >= starts[expert], expert, -1)

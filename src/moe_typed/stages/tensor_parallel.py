"""The ranks among which experts are cut, and what one rank's result is: its part of a sum that is still to come, or the whole."""

from abc import ABC, abstractmethod
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..boundary import Floating, boundary


class TensorParallel(ABC):
    """The base of groups of ranks that hold the same tokens and parts of every expert."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Return which rank this is."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Return how many ranks there are."""

    @abstractmethod
    def all_reduce(self, part: Tensor) -> Tensor:
        """Return the sum of the ranks' parts."""

    @abstractmethod
    def all_gather(self, columns: Tensor) -> Tensor:
        """Return the ranks' columns (rows, n) side by side, (rows, size * n)."""


@final
class OneRank(TensorParallel):
    """A group of one."""

    @property
    @override
    def rank(self) -> int:
        return 0

    @property
    @override
    def size(self) -> int:
        return 1

    @override
    def all_reduce(self, part: Tensor) -> Tensor:
        return part

    @override
    def all_gather(self, columns: Tensor) -> Tensor:
        return columns


@final
class ProcessGroupRanks(TensorParallel):
    """The ranks of a process group of ``torch.distributed`` (on the NPU: of its HCCL backend)."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    @property
    @override
    def rank(self) -> int:
        return self._group.rank()

    @property
    @override
    def size(self) -> int:
        return self._group.size()

    @override
    def all_reduce(self, part: Tensor) -> Tensor:
        total = part.clone()
        self._group.allreduce([total]).wait()
        return total

    @override
    def all_gather(self, columns: Tensor) -> Tensor:
        parts = [torch.empty_like(columns) for _ in range(self.size)]
        self._group.allgather([parts], [columns.contiguous()]).wait()
        return torch.cat(parts, -1)


class RankResult(ABC):
    """The base of what combine returns where experts are cut among ranks."""

    hidden_states: Tensor

    @abstractmethod
    def completed(self, ranks: TensorParallel) -> Tensor:
        """Return the layer's output. A sum that is owed is paid here, and one that is not is never paid twice."""


@final
@boundary
class PartialResult(RankResult):
    """This rank's summand of the layer's output: the sum over the ranks is still owed. ``hidden_states``: (rows, hidden)."""

    hidden_states: Floating[Tensor, "rows hidden"]

    @override
    def completed(self, ranks: TensorParallel) -> Tensor:
        return ranks.all_reduce(self.hidden_states)


@final
@boundary
class CompleteResult(RankResult):
    """The layer's output, on each rank the same. ``hidden_states``: (rows, hidden)."""

    hidden_states: Floating[Tensor, "rows hidden"]

    @override
    def completed(self, ranks: TensorParallel) -> Tensor:
        return self.hidden_states

"""Simulated loads: routings for benchmarks and tests, from a seed and not from a model."""

from abc import ABC, abstractmethod
from typing import final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from .ids import LogicalIds
from .routing import Routing, from_topk
from .scaling import Settled


class Load(ABC):
    """The base of all loads."""

    @abstractmethod
    def choose(self, rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
        """Return int64 (rows, top_k): distinct experts for each row, on the CPU."""

    def route(self, rows: int, top_k: int, num_experts: int, *, device: torch.device, seed: int = 0) -> Routing[LogicalIds, Settled]:
        """Return a routing with this load and random weights that sum to 1; the same for the same arguments, on any device.

        Raises: ValueError when a row cannot go to ``top_k`` distinct experts.
        """
        if not 0 < top_k <= num_experts:
            raise ValueError(f"a row cannot go to {top_k} distinct experts of {num_experts}")
        generator = torch.Generator().manual_seed(seed)
        ids = self.choose(rows, top_k, num_experts, generator)
        weights = torch.softmax(torch.randn(rows, top_k, generator=generator), dim=1)
        return from_topk(ids.to(device=device, dtype=torch.int32), weights.to(device), num_experts)


def _gumbel_top(log_odds: Tensor, rows: int, top_k: int, generator: torch.Generator) -> Tensor:
    """Return draws without replacement by odds: the top k of log odds plus Gumbel noise (Kool et al., 2019)."""
    uniform = torch.rand(rows, log_odds.numel(), generator=generator).clamp(min=torch.finfo(torch.float32).tiny)
    return (log_odds - torch.log(-torch.log(uniform))).topk(top_k, dim=1).indices


@final
@attrs.frozen
class UniformLoad(Load):
    """Every expert is as likely as any other: a router at the start of training, and the usual benchmark."""

    @override
    def choose(self, rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
        return _gumbel_top(torch.zeros(num_experts), rows, top_k, generator)


@final
@attrs.frozen
class ZipfLoad(Load):
    """Expert e is drawn with odds (e + 1)^-exponent: a few experts are hot."""

    exponent: float = 1.0

    @override
    def choose(self, rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
        ranks = torch.arange(1, num_experts + 1, dtype=torch.float32)
        return _gumbel_top(-self.exponent * ranks.log(), rows, top_k, generator)


@final
@attrs.frozen
class OneHotLoad(Load):
    """Every row goes to the same experts, from ``first`` on: the worst case of every balanced design."""

    first: int = 0

    @override
    def choose(self, rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
        return ((torch.arange(top_k) + self.first) % num_experts).expand(rows, top_k)


@final
@attrs.frozen
class RoundRobinLoad(Load):
    """Routes take the experts in turn: the best case, with loads that differ by one at most."""

    @override
    def choose(self, rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
        return (torch.arange(rows * top_k) % num_experts).view(rows, top_k)


@final
@attrs.frozen(eq=False)
class RecordedLoad(Load):
    """The ids that a router chose, repeated or cut to the number of rows. ``topk_ids``: integer (recorded rows, k)."""

    topk_ids: Tensor

    @override
    def choose(self, rows: int, top_k: int, num_experts: int, generator: torch.Generator) -> Tensor:
        if self.topk_ids.dim() != 2:
            raise ValueError(f"the record must be (recorded rows, k); got {list(self.topk_ids.shape)}")
        recorded, k = self.topk_ids.shape
        if k != top_k or recorded == 0 or int(self.topk_ids.min()) < 0 or int(self.topk_ids.max()) >= num_experts:
            raise ValueError(f"the record has {recorded} rows of {k} ids; {top_k} ids below {num_experts} are needed in each")
        if bool((self.topk_ids.sort(1).values.diff(dim=1) == 0).any()):
            raise ValueError("the record has a row that goes to one expert twice; a row's experts are distinct")
        return self.topk_ids.cpu().to(torch.int64)[torch.arange(rows) % recorded]

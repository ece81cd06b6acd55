"""Selection rules: from router logits (rows, experts) to a Routing. All arithmetic is float32; ties go to the lowest id."""

from abc import ABC, abstractmethod
from typing import Generic, final

import torch
from jaxtyping import Float32
from torch import Tensor
from typing_extensions import TypeVar, override

from ..boundary import boundary
from .ids import LogicalIds
from .routing import DeviceCount, Routing
from .scaling import Pending, RoutedScaling, Settled

S_co = TypeVar("S_co", bound=RoutedScaling, covariant=True, default=RoutedScaling)

# Added to the sum before dividing by it, as DeepSeek-V3's router does, so that a row of zeros does not divide by zero.
_EPSILON = 1e-20


def stable_topk(scores: Tensor, k: int) -> Tensor:
    """Return int64 (rows, k): the columns of the k largest scores, largest first, the lower column first among equals."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]


class Selection(ABC, Generic[S_co]):
    """The base of all selection rules. A rule is frozen data; the type says where it leaves the routed scaling factor."""

    top_k: int

    @abstractmethod
    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return (ids int64, weights float32), both (rows, top_k), for float32 logits."""

    @abstractmethod
    def _scaling(self) -> S_co:
        """Return who applies the routed scaling factor."""

    @property
    @abstractmethod
    def renormalizes(self) -> bool:
        """Say whether the weights of a row are divided by their sum."""

    def route(self, logits: Tensor, live: int | DeviceCount | None = None) -> Routing[LogicalIds, S_co]:
        """Return the routing of a batch.

        ``logits``: floating (rows, experts). ``live``: how many leading rows are real (default: all).
        Raises: ValueError when there are fewer experts than ``top_k``, or logits are not a floating matrix.
        """
        if logits.dim() != 2 or not logits.is_floating_point():
            raise ValueError(f"router logits must be a floating matrix (rows, experts); got {logits.dtype} {list(logits.shape)}")
        rows, experts = logits.shape
        if not 0 < self.top_k <= experts:
            raise ValueError(f"top_k is {self.top_k}, but the router logits have {experts} experts")
        ids, weights = self._choose(logits.to(torch.float32))
        return Routing(ids.to(torch.int32), weights, LogicalIds, experts, self._scaling(), self.renormalizes, rows if live is None else live)


@final
@boundary
class SoftmaxTopK(Selection[Settled]):
    """Softmax over all experts, then the k largest; divided by their sum if ``renormalize`` (Mixtral, Qwen-MoE, OLMoE)."""

    top_k: int
    renormalize: bool

    @override
    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = torch.softmax(logits, dim=-1)
        ids = stable_topk(probabilities, self.top_k)
        weights = probabilities.gather(1, ids)
        return ids, weights / weights.sum(1, keepdim=True) if self.renormalize else weights

    @override
    def _scaling(self) -> Settled:
        return Settled()

    @property
    @override
    def renormalizes(self) -> bool:
        return self.renormalize


@final
@boundary
class TopKSoftmax(Selection[Settled]):
    """The k largest logits, then a softmax over those alone (gpt-oss). Equal to a renormalised SoftmaxTopK but for rounding."""

    top_k: int

    @override
    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        ids = stable_topk(logits, self.top_k)
        return ids, torch.softmax(logits.gather(1, ids), dim=-1)

    @override
    def _scaling(self) -> Settled:
        return Settled()

    @property
    @override
    def renormalizes(self) -> bool:
        return True


@final
@boundary
class GroupedSigmoidTopK(Selection[Pending]):
    """Sigmoid scores with a correction bias, restricted to the best groups (DeepSeek-V3).

    ``bias`` float32 (experts,) chooses and never weighs. A group's score is the sum of its two largest biased scores; experts outside the
    ``topk_group`` best of ``num_groups`` groups are out. The routed scaling factor stays pending.
    """

    top_k: int
    num_groups: int
    topk_group: int
    renormalize: bool
    routed_scaling_factor: float
    bias: Float32[Tensor, " experts"]

    @override
    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, experts = logits.shape
        if experts % self.num_groups or not 0 < self.topk_group <= self.num_groups or self.bias.shape != (experts,):
            raise ValueError(
                f"{experts} experts do not fit {self.num_groups} groups of which {self.topk_group} are taken, "
                f"with a bias of shape {list(self.bias.shape)}"
            )
        per_group = experts // self.num_groups
        if self.topk_group * per_group < self.top_k:
            raise ValueError(f"{self.topk_group} groups of {per_group} experts hold fewer than top_k = {self.top_k}")
        scores = torch.sigmoid(logits)
        biased = scores + self.bias.to(torch.float32)
        best_two = biased.view(rows, self.num_groups, per_group).topk(min(2, per_group), dim=-1).values
        groups = stable_topk(best_two.sum(-1), self.topk_group)
        allowed = torch.zeros(rows, self.num_groups, dtype=torch.bool, device=logits.device).scatter(1, groups, True)
        ids = stable_topk(biased.masked_fill(~allowed.repeat_interleave(per_group, dim=1), float("-inf")), self.top_k)
        weights = scores.gather(1, ids)
        return ids, weights / (weights.sum(1, keepdim=True) + _EPSILON) if self.renormalize else weights

    @override
    def _scaling(self) -> Pending:
        return Pending(self.routed_scaling_factor)

    @property
    @override
    def renormalizes(self) -> bool:
        return self.renormalize

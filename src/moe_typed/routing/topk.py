"""Selection rules: from router logits (rows, experts) to a Routing. All arithmetic is float32; among equals the lowest id goes first.

A rule is frozen data, and its ``route`` is the reference, in torch operations on any device.
``fused.FusedRouter(rule)`` is the same router in one kernel.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Literal, NamedTuple, TypeAlias, final

import torch
from jaxtyping import Float32, Int32
from torch import Tensor
from typing_extensions import TypeVar, override

from ..boundary import boundary
from ..ops.hash_gate.reference import hash_gate
from ..ops.scores import Score
from ..ops.topk_gate.reference import topk_gate
from ..ops.topk_gate.spec import GateRule
from .ids import LogicalIds
from .routing import DeviceCount, Routing, live_tensor
from .scaling import RoutedScaling, Settled

S = TypeVar("S", bound=RoutedScaling)
S_co = TypeVar("S_co", bound=RoutedScaling, covariant=True, default=RoutedScaling)

GroupScore: TypeAlias = Literal["max", "top2_sum"]
TopKGate: TypeAlias = Callable[[Tensor, GateRule, Tensor | None, Tensor | None], tuple[Tensor, Tensor]]
HashGate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Score, bool, float, Tensor | None], tuple[Tensor, Tensor]]


class Router(ABC, Generic[S_co]):
    """The base of everything that routes by logits; the type says where it leaves the routed scaling factor."""

    @abstractmethod
    def route(self, logits: Tensor, live: int | DeviceCount | None = None) -> Routing[LogicalIds, S_co]:
        """Return the routing of a batch.

        ``logits``: floating (rows, experts). ``live``: how many leading rows are real (default: all); the others get ids -1 and weights 0.
        Raises: ValueError when the logits are no floating matrix, or do not fit the rule.
        """


class Gate(NamedTuple, Generic[S_co]):
    """What a selection rule comes to: the rule that kernels are told, who applies the factor, and the bias that chooses and never weighs."""

    rule: GateRule
    scaling: S_co
    bias: Tensor | None


class Selection(Router[S_co]):
    """The base of all rules that choose by the logits alone."""

    top_k: int

    @property
    @abstractmethod
    def gate(self) -> Gate[S_co]:
        """Return what the rule comes to."""

    @override
    def route(self, logits: Tensor, live: int | DeviceCount | None = None) -> Routing[LogicalIds, S_co]:
        return apply_gate(topk_gate, self.gate, logits, live)


@final
@boundary
class SoftmaxTopK(Selection[Settled]):
    """Softmax over all experts, then the k largest; divided by their sum if ``renormalize`` (Mixtral, Qwen-MoE, OLMoE)."""

    top_k: int
    renormalize: bool

    @property
    @override
    def gate(self) -> Gate[Settled]:
        return Gate(GateRule(self.top_k, "softmax", self.renormalize), Settled(), None)


@final
@boundary
class TopKSoftmax(Selection[Settled]):
    """The k largest logits, then a softmax over those alone (gpt-oss). Equal to a renormalised SoftmaxTopK but for rounding."""

    top_k: int

    @property
    @override
    def gate(self) -> Gate[Settled]:
        return Gate(GateRule(self.top_k, "selected_softmax"), Settled(), None)


@final
@boundary
class ScoredTopK(Selection[S_co]):
    """The k largest scores, weighed by the score: "softmax", "sigmoid", or "sqrt_softplus" of the logit.

    ``bias`` (a correction bias) is added to the scores for the choice alone. Llama 4's rule is sigmoid without renormalisation; its weight goes on
    the input: see ``weigh_input``.
    """

    top_k: int
    score: Score
    renormalize: bool
    scaling: S_co
    bias: Float32[Tensor, " experts"] | None = None

    @property
    @override
    def gate(self) -> Gate[S_co]:
        return Gate(GateRule(self.top_k, self.score, self.renormalize, self.scaling.folded), self.scaling, self.bias)


@final
@boundary
class GroupedTopK(Selection[S_co]):
    """As ScoredTopK, among the experts of the ``topk_group`` best of ``num_groups`` groups alone (DeepSeek-V2, DeepSeek-V3).

    ``group_score``: a group is as good as its largest biased score ("max"), or the sum of its two largest ("top2_sum").
    """

    top_k: int
    score: Score
    num_groups: int
    topk_group: int
    group_score: GroupScore
    renormalize: bool
    scaling: S_co
    bias: Float32[Tensor, " experts"] | None = None

    @property
    @override
    def gate(self) -> Gate[S_co]:
        groups = (self.num_groups, self.topk_group, self.group_score)
        return Gate(GateRule(self.top_k, self.score, self.renormalize, self.scaling.folded, *groups), self.scaling, self.bias)


@final
@boundary
class HashTopK(Generic[S_co]):
    """Experts by token: row t goes to ``table[token_ids[t]]``, whatever its logits, and is weighed by their score.

    ``table``: int32 (vocabulary, k).
    """

    table: Int32[Tensor, "vocabulary k"]
    score: Score
    renormalize: bool
    scaling: S_co

    def route(self, logits: Tensor, token_ids: Tensor, live: int | DeviceCount | None = None) -> Routing[LogicalIds, S_co]:
        """Return the routing of a batch.

        ``logits``: floating (rows, experts). ``token_ids``: int32 or int64 (rows,). Raises: ValueError for anything else.
        """
        return apply_hash(hash_gate, self, logits, token_ids, live)


def apply_gate(function: TopKGate, gate: Gate[S], logits: Tensor, live: int | DeviceCount | None) -> Routing[LogicalIds, S]:
    """Return the routing that an implementation of the gate chooses. Raises: ValueError as ``Router.route``."""
    _check_logits(logits)
    if gate.bias is not None and gate.bias.shape != logits.shape[1:]:
        raise ValueError(f"the correction bias is over {list(gate.bias.shape)} experts, but the router logits have {logits.shape[1]}")
    ids, weights = function(logits, gate.rule, gate.bias, live_tensor(live, logits))
    rule = gate.rule
    return _routed(ids, weights, logits, gate.scaling, rule.renormalize or rule.score == "selected_softmax", live)


def apply_hash(function: HashGate, rule: "HashTopK[S]", logits: Tensor, token_ids: Tensor, live: int | DeviceCount | None) -> Routing[LogicalIds, S]:
    """Return the routing that an implementation of the hash gate chooses. Raises: ValueError as ``HashTopK.route``."""
    _check_logits(logits)
    if token_ids.shape != logits.shape[:1] or token_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"token ids must be int32 or int64 ({logits.shape[0]},); got {token_ids.dtype} {list(token_ids.shape)}")
    ids, weights = function(logits, rule.table, token_ids, rule.score, rule.renormalize, rule.scaling.folded, live_tensor(live, logits))
    return _routed(ids, weights, logits, rule.scaling, rule.renormalize, live)


def _check_logits(logits: Tensor) -> None:
    if logits.dim() != 2 or not logits.is_floating_point():
        raise ValueError(f"router logits must be a floating matrix (rows, experts); got {logits.dtype} {list(logits.shape)}")


def _routed(ids: Tensor, weights: Tensor, logits: Tensor, scaling: S, renormalized: bool, live: int | DeviceCount | None) -> Routing[LogicalIds, S]:
    rows, experts = logits.shape
    return Routing(ids, weights, LogicalIds, experts, scaling, renormalized, rows if live is None else live)

"""One MoE layer as a checkpoint holds it: experts, router, and the shared expert."""

from typing import Annotated, final

import torch
from torch import Tensor

from ..boundary import Floating, Rename, boundary
from ..formats import AnyExpertWeights, GateUp, GateUpOrder
from ..routing import DeviceCount, LogicalIds, RoutedScaling, Routing, Selection, Settled
from ..runners import Activation, reference_experts


def _demand_rows(hidden_states: Tensor, hidden: int) -> None:
    if hidden_states.dim() != 2 or hidden_states.shape[1] != hidden or not hidden_states.is_floating_point():
        raise ValueError(f"hidden states must be floating (rows, {hidden}); got {hidden_states.dtype} {list(hidden_states.shape)}")


@final
@boundary
class SharedExpert:
    """The expert that every row goes to: weights of one expert, in the classes that routed experts have.

    ``gate`` (1, hidden): the row's weight is sigmoid(gate . row) (Qwen2-MoE); None: it is 1 (DeepSeek-V3).
    Its weights may be prepared for any runner, and the layer over them be called with ``route(hidden_states)``.
    """

    weights: AnyExpertWeights[GateUp]
    activation: Activation
    gate: Floating[Tensor, "1 hidden"] | None = None

    def route(self, hidden_states: Tensor) -> Routing[LogicalIds, Settled]:
        """Return the routing of every row to this one expert, with its gate as the weight. ``hidden_states``: floating (rows, hidden)."""
        _demand_rows(hidden_states, self.weights.hidden)
        rows = hidden_states.shape[0]
        if self.gate is None:
            weights = torch.ones(rows, 1, dtype=torch.float32, device=hidden_states.device)
        else:
            weights = torch.sigmoid(hidden_states @ self.gate.to(hidden_states.dtype).T).to(torch.float32)
        ids = torch.zeros(rows, 1, dtype=torch.int32, device=hidden_states.device)
        return Routing(ids, weights, LogicalIds, 1, Settled(), renormalized=False, live=rows)

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """Return the shared part of the block's output (rows, hidden) by the reference arithmetic, in the dtype of ``hidden_states``."""
        routing = self.route(hidden_states)
        total = reference_experts(hidden_states.to(torch.float32), routing.topk_ids, routing.topk_weights, self.weights, self.activation)
        return total.to(hidden_states.dtype)


@final
@boundary
class LayerWeights:
    """One MoE layer in checkpoint layout, with the rule that its router follows.

    ``router_weight`` (experts, hidden) and ``router_bias`` (experts,) give the logits; ``router_fp32`` says that the family computes them in
    float32. ``model_dtype`` is the dtype of the model's hidden states. The block's output is

        ``complete(layer(rows, route(hidden_states)), hidden_states)``

    where ``layer`` is a MoELayer over ``experts`` and ``activation``.
    """

    experts: AnyExpertWeights[GateUpOrder]
    activation: Activation
    selection: Selection[RoutedScaling]
    router_weight: Floating[Tensor, "experts hidden"]
    router_bias: Floating[Tensor, " experts"] | None
    router_fp32: bool
    shared: Annotated[SharedExpert | None, Rename({"experts": "shared_experts", "inter": "shared_inter"})]
    model_dtype: torch.dtype

    @property
    def num_experts(self) -> int:
        """Return how many experts there are."""
        return self.experts.num_experts

    @property
    def hidden(self) -> int:
        """Return the width of the model."""
        return self.experts.hidden

    @property
    def inter(self) -> int:
        """Return the width of one expert."""
        return self.experts.inter

    @property
    def top_k(self) -> int:
        """Return how many experts a row goes to."""
        return self.selection.top_k

    def route(self, hidden_states: Tensor, live: int | DeviceCount | None = None) -> Routing[LogicalIds]:
        """Return the routing of a batch.

        ``hidden_states``: floating (rows, hidden). ``live``: how many leading rows are real (default: all).
        Raises: ValueError for any other shape or dtype.
        """
        _demand_rows(hidden_states, self.hidden)
        dtype = torch.float32 if self.router_fp32 else hidden_states.dtype
        bias = None if self.router_bias is None else self.router_bias.to(dtype)
        logits = torch.nn.functional.linear(hidden_states.to(dtype), self.router_weight.to(dtype), bias)
        return self.selection.route(logits, live)

    def complete(self, routed: Tensor, hidden_states: Tensor) -> Tensor:
        """Return the block's output: the routed output and the shared expert's. Both tensors are (rows, hidden)."""
        return routed if self.shared is None else routed + self.shared(hidden_states)

"""An experts module of transformers, read once: what its class declares, and the tensors that it holds."""

from collections.abc import Callable
from typing import Final, Protocol, cast, final

import attrs
import torch
from torch import Tensor, nn

from ...formats import GateUp, GateUpOrder, Interleaved, Ungated
from ...runners import OpaqueActivation, ThenNorm, UnsupportedError
from ...runners.activations import Activation
from .gates import recognise
from .watch import GATE, Fact, UnwatchableError, Watch, facts_of, gate_of, stand_in

_DENSE: Final = (torch.bfloat16, torch.float16, torch.float32)
_NORM: Final = "post_expert_norm"
_ROLES: Final = ("", "_bias", "_scale_inv", "_activation_scale", "_blocks", "_scales")


class ExpertsModule(Protocol):
    """What the decorator of transformers promises of a module, beside its parameters."""

    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    is_concatenated: bool
    training: bool
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]


@final
@attrs.frozen(eq=False)
class Stored:
    """The tensors of a module by the name of their attribute, and what its class declares of them.

    ``first`` and ``second`` are the names of the two projections; biases and scales have them with an ending.
    """

    tensors: dict[str, Tensor]
    first: str
    second: str
    order: type[GateUpOrder]
    transposed: bool
    num_experts: int

    @property
    def dtype(self) -> torch.dtype | None:
        """Return the dtype of the projections; None where they are not one tensor each."""
        return self.tensors[self.first].dtype if self.first in self.tensors else None

    def get(self, name: str, role: str = "") -> Tensor | None:
        """Return the tensor of a projection in a role, None where the module has none."""
        return self.tensors.get(name + role)

    def need(self, name: str, role: str = "") -> Tensor:
        """Return the same. Raises: UnsupportedError where the module has none."""
        found = self.get(name, role)
        if found is None:
            raise UnsupportedError(f"the module has no tensor {name + role!r}")
        return found


def read_stored(module: nn.Module) -> Stored:
    """Return what a module holds. Raises: UnsupportedError for a tensor that is not a plain one, or is not there yet."""
    experts = cast("ExpertsModule", module)
    first, second = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
    tensors: dict[str, Tensor] = {}
    for name in (first, second):
        for role in _ROLES:
            value: object = getattr(module, name + role, None)
            if role == "_bias" and value is None and experts.has_bias:
                raise UnsupportedError(f"its class declares biases, and there is no {name + role!r}")
            if value is None or (role == "_bias" and not experts.has_bias):
                continue
            if type(value) not in (Tensor, nn.Parameter):
                raise UnsupportedError(f"{name + role} is a {type(value).__qualname__}, and the layer is made of plain tensors")
            tensor = cast("Tensor", value)
            if tensor.is_meta:
                raise UnsupportedError(f"{name + role} is on the meta device: weights are prepared when they are loaded")
            tensors[name + role] = tensor
    return Stored(tensors, first, second, GateUp, experts.is_transposed, experts.num_experts)


@final
@attrs.frozen(eq=False)
class Between:
    """What a module does between its products, the order of the rows that this takes, and what must stay as it is for it to be so."""

    activation: Activation
    order: type[GateUpOrder]
    watch: Watch


def read_activation(module: nn.Module, dtype: torch.dtype) -> Between:
    """Return what a module does between its products.

    A function whose formula is not known, or which reads what cannot be watched, is called as it is, on rows in ``dtype``, in the order that the
    class declares.
    """
    experts = cast("ExpertsModule", module)
    between = _recognised(module, experts) or _opaque(module, experts, dtype)
    if not experts.has_post_expert_norm:
        return between
    norm = Watch(between.watch.gate, between.watch.owner, (*between.watch.facts, Fact(None, _NORM, experts.post_expert_norm)))
    return Between(ThenNorm(between.activation, experts.post_expert_norm, dtype), between.order, norm)


def _recognised(module: nn.Module, experts: ExpertsModule) -> Between | None:
    gate = gate_of(module)
    if not experts.has_gate:
        function, names = experts.act_fn, {"act_fn"}
    elif GATE in vars(module):
        return None  # it was given to this module from outside, and may read anything
    else:
        twin, names = stand_in(module)
        function = _gate(twin)
    known = recognise(function, gated=experts.has_gate)
    if known is None:
        return None
    try:
        return Between(*known, Watch(gate, None, facts_of(module, names)))
    except UnwatchableError:
        return None


def _gate(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return cast("Callable[[Tensor], Tensor]", getattr(module, GATE))


def _opaque(module: nn.Module, experts: ExpertsModule, dtype: torch.dtype) -> Between:
    kind, gate = type(module).__qualname__, gate_of(module)
    if not experts.has_gate:
        activation = OpaqueActivation(lambda rows: experts.act_fn(rows), Ungated, dtype, f"{kind}.act_fn")
        return Between(activation, Ungated, Watch(gate, id(module), ()))
    order = GateUp if experts.is_concatenated else Interleaved
    return Between(OpaqueActivation(_gate(module), order, dtype, f"{kind}.{GATE}"), order, Watch(gate, id(module), ()))


def model_dtype(stored: Stored, rows: torch.dtype) -> torch.dtype:
    """Return the dtype that a layer computes in: that of its weights, where they are not quantised; else that of the rows."""
    found = stored.dtype if stored.dtype in _DENSE else rows
    if found not in _DENSE:
        raise UnsupportedError(f"rows are {found}; layers compute in bfloat16, float16 or float32")
    return found

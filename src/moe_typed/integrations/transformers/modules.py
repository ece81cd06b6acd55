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

_DENSE: Final = (torch.bfloat16, torch.float16, torch.float32)
_GATE: Final = "_apply_gate"  # what the decorator of transformers gives every class that has none of its own
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
            if value is None or (role == "_bias" and not experts.has_bias):
                continue
            if type(value) not in (Tensor, nn.Parameter):
                raise UnsupportedError(f"{name + role} is a {type(value).__qualname__}, and the layer is made of plain tensors")
            tensor = cast("Tensor", value)
            if tensor.is_meta:
                raise UnsupportedError(f"{name + role} is on the meta device: weights are prepared when they are loaded")
            tensors[name + role] = tensor
    return Stored(tensors, first, second, GateUp, experts.is_transposed, experts.num_experts)


def read_activation(module: nn.Module, dtype: torch.dtype) -> tuple[Activation, type[GateUpOrder]]:
    """Return what a module does between its products, and the order of the rows that this takes.

    A function whose formula is not known is called as it is, on rows in ``dtype``, in the order that the class declares.
    """
    experts = cast("ExpertsModule", module)
    known = recognise(_gate(module) if experts.has_gate else experts.act_fn, gated=experts.has_gate)
    activation, order = known or _opaque(module, experts, dtype)
    return (ThenNorm(activation, experts.post_expert_norm, dtype) if experts.has_post_expert_norm else activation), order


def _gate(module: nn.Module) -> Callable[[Tensor], Tensor]:
    return cast("Callable[[Tensor], Tensor]", getattr(module, _GATE))


def _opaque(module: nn.Module, experts: ExpertsModule, dtype: torch.dtype) -> tuple[Activation, type[GateUpOrder]]:
    if not experts.has_gate:
        return OpaqueActivation(experts.act_fn, Ungated, dtype, f"{type(module).__qualname__}.act_fn"), Ungated
    order = GateUp if experts.is_concatenated else Interleaved
    return OpaqueActivation(_gate(module), order, dtype, f"{type(module).__qualname__}.{_GATE}"), order


def model_dtype(stored: Stored, rows: torch.dtype) -> torch.dtype:
    """Return the dtype that a layer computes in: that of its weights, where they are not quantised; else that of the rows."""
    found = stored.dtype if stored.dtype in _DENSE else rows
    if found not in _DENSE:
        raise UnsupportedError(f"rows are {found}; layers compute in bfloat16, float16 or float32")
    return found

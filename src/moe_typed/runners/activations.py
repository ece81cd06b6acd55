"""What happens between the two grouped GEMMs, as frozen values with their parameters.

A runner does an activation by its class or refuses it: a class that it does not name is refused, never taken for another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..formats import GateUpOrder, Ungated


class Activation(ABC):
    """The base of all activations: from the rows of the first GEMM to those of the second."""

    name: ClassVar[str]

    @abstractmethod
    def takes(self, order: type[GateUpOrder]) -> bool:
        """Say whether this activation is of rows in ``order``."""

    @abstractmethod
    def activate(self, joined: Tensor, order: type[GateUpOrder]) -> Tensor:
        """Return the activated rows (rows, inter) of ``joined``, which lies as ``order`` says; the meaning that every kernel is held to."""

    def finish(self, result: Tensor) -> Tensor:
        """Return what becomes of an expert's result (rows, hidden) before the router's weight: nothing, unless the class says otherwise."""
        return result


class GatedActivation(Activation):
    """The base of all activations over a (gate, up) pair, which may lie in any order."""

    @override
    def takes(self, order: type[GateUpOrder]) -> bool:
        return order is not Ungated

    @override
    def activate(self, joined: Tensor, order: type[GateUpOrder]) -> Tensor:
        return self.apply(*order.split(joined, -1))

    @abstractmethod
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activated rows, shaped as ``gate``."""


@final
@attrs.frozen
class SiluAndMul(GatedActivation):
    """silu(gate) * up."""

    name: ClassVar[str] = "silu"

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up


@final
@attrs.frozen
class SwigluOai(GatedActivation):
    """gpt-oss: gate' * sigmoid(alpha * gate') * (up' + 1), with gate' = min(gate, limit) and up' = clamp(up, -limit, limit).

    The defaults are gpt-oss' own (``swiglu_limit`` of its config; alpha is fixed in its model code).
    """

    name: ClassVar[str] = "swiglu-oai"
    alpha: float = 1.702
    limit: float = 7.0

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        up = up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + 1)


@final
@attrs.frozen
class SwigluStep(GatedActivation):
    """min(silu(gate), limit) * clamp(up, -limit, limit): clamped after silu, where gpt-oss clamps before it."""

    name: ClassVar[str] = "swiglu-step"
    limit: float

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@final
@attrs.frozen
class GeluAndMul(GatedActivation):
    """gelu(gate) * up, with the exact gelu."""

    name: ClassVar[str] = "gelu"

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate) * up


@final
@attrs.frozen
class GeluTanhAndMul(GatedActivation):
    """gelu(gate) * up, with the gelu that is approximated by tanh (Gemma)."""

    name: ClassVar[str] = "gelu-tanh"

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate, approximate="tanh") * up


@final
@attrs.frozen
class SwigluClamped(GatedActivation):
    """silu(min(gate, limit)) * clamp(up, -limit, limit): clamped before silu, and nothing added to up (DeepSeek-V4)."""

    name: ClassVar[str] = "swiglu-clamped"
    limit: float

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


@final
@attrs.frozen
class Relu2(Activation):
    """relu(x) squared, of experts that have no gate (Nemotron-H)."""

    name: ClassVar[str] = "relu2"

    @override
    def takes(self, order: type[GateUpOrder]) -> bool:
        return order is Ungated

    @override
    def activate(self, joined: Tensor, order: type[GateUpOrder]) -> Tensor:
        return torch.nn.functional.relu(joined).square()


@final
@attrs.frozen
class OpaqueActivation(Activation):
    """A function that is called as it is, because nobody here knows what it computes.

    ``function``: from rows (rows, width) of ``dtype``, whose columns lie as ``order`` says, to (rows, inter). ``title``: what reports call it.
    """

    name: ClassVar[str] = "opaque"
    function: Callable[[Tensor], Tensor]
    order: type[GateUpOrder]
    dtype: torch.dtype
    title: str

    @override
    def takes(self, order: type[GateUpOrder]) -> bool:
        return order is self.order

    @override
    def activate(self, joined: Tensor, order: type[GateUpOrder]) -> Tensor:
        made = self.function(joined.to(self.dtype))
        if made.ndim != joined.ndim or made.shape[:-1] != joined.shape[:-1]:  # kernels would read beyond its end
            raise ValueError(f"the activation {self.title!r} made {list(made.shape)} of rows {list(joined.shape)}; it must make a row of each row")
        return made.to(joined.dtype)


@final
@attrs.frozen
class ThenNorm(Activation):
    """Another activation, and a norm of each expert's result before the router's weight. ``norm``: of rows (rows, hidden) of ``dtype``."""

    name: ClassVar[str] = "then-norm"
    inner: Activation
    norm: Callable[[Tensor], Tensor]
    dtype: torch.dtype

    @override
    def takes(self, order: type[GateUpOrder]) -> bool:
        return self.inner.takes(order)

    @override
    def activate(self, joined: Tensor, order: type[GateUpOrder]) -> Tensor:
        return self.inner.activate(joined, order)

    @override
    def finish(self, result: Tensor) -> Tensor:
        normed = self.norm(self.inner.finish(result).to(self.dtype))
        if normed.shape != result.shape:  # kernels would read beyond its end
            raise ValueError(f"the norm behind {self.inner.name!r} made {list(normed.shape)} of rows {list(result.shape)}; it must keep their shape")
        return normed.to(result.dtype)


ACTIVATIONS: Final = (SiluAndMul.name, SwigluOai.name)
"""The names of the activations that every runner does."""

ALL_ACTIVATIONS: Final = (
    *ACTIVATIONS,
    SwigluStep.name,
    SwigluClamped.name,
    GeluAndMul.name,
    GeluTanhAndMul.name,
    Relu2.name,
    OpaqueActivation.name,
    ThenNorm.name,
)
"""The names of all activations: the reference and the Triton runner do them."""

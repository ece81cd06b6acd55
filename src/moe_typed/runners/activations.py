"""What happens between the two grouped GEMMs, as frozen values with their parameters."""

from abc import ABC, abstractmethod
from typing import ClassVar, Final, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override


class Activation(ABC):
    """The base of all activations over a (gate, up) pair."""

    name: ClassVar[str]

    @abstractmethod
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return the activated rows, shaped as ``gate``; the meaning that every kernel is held to."""


@final
@attrs.frozen
class SiluAndMul(Activation):
    """silu(gate) * up."""

    name: ClassVar[str] = "silu"

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate) * up


@final
@attrs.frozen
class SwigluOai(Activation):
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
class SwigluStep(Activation):
    """min(silu(gate), limit) * clamp(up, -limit, limit): clamped after silu, where gpt-oss clamps before it."""

    name: ClassVar[str] = "swiglu-step"
    limit: float

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@final
@attrs.frozen
class GeluAndMul(Activation):
    """gelu(gate) * up, with the exact gelu."""

    name: ClassVar[str] = "gelu"

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.nn.functional.gelu(gate) * up


ACTIVATIONS: Final = (SiluAndMul.name, SwigluOai.name)
"""The names of the activations that every runner does."""

"""The order of the gate and up rows in w13, as classes: [gate; up] and [up; gate] have one shape and two meanings."""

from abc import ABC, abstractmethod
from typing import ClassVar, Never, final

import torch
from torch import Tensor
from typing_extensions import override


class GateUpOrder(ABC):
    """The base of all orders; its subclasses are never instantiated."""

    title: ClassVar[str]

    @staticmethod
    @abstractmethod
    def split(joined: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return (gate, up), each with half the entries along ``dim``; views."""

    @staticmethod
    @abstractmethod
    def join(gate: Tensor, up: Tensor, dim: int) -> Tensor:
        """Return gate and up as one contiguous tensor in this order along ``dim``."""

    @classmethod
    def part(cls, joined: Tensor, dim: int, rank: int, size: int) -> Tensor:
        """Return the part of one of ``size`` ranks: the same entries of gate and of up, in this order. ``size`` divides half the dim."""
        gate, up = cls.split(joined, dim)
        per = gate.shape[dim] // size
        return cls.join(gate.narrow(dim, rank * per, per), up.narrow(dim, rank * per, per), dim)


@final
class GateUp(GateUpOrder):
    """All gate rows, then all up rows: what checkpoints of the Llama and Qwen line mean by w13."""

    title = "gate, then up"

    @staticmethod
    @override
    def split(joined: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        gate, up = joined.chunk(2, dim)
        return gate, up

    @staticmethod
    @override
    def join(gate: Tensor, up: Tensor, dim: int) -> Tensor:
        return torch.cat((gate, up), dim)


@final
class UpGate(GateUpOrder):
    """All up rows, then all gate rows: what some kernels read (w3, w1)."""

    title = "up, then gate"

    @staticmethod
    @override
    def split(joined: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        up, gate = joined.chunk(2, dim)
        return gate, up

    @staticmethod
    @override
    def join(gate: Tensor, up: Tensor, dim: int) -> Tensor:
        return torch.cat((up, gate), dim)


@final
class Interleaved(GateUpOrder):
    """Gate and up rows alternate, gate first: gpt-oss."""

    title = "interleaved, gate first"

    @staticmethod
    @override
    def split(joined: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        axis = dim if dim >= 0 else joined.dim() + dim
        pairs = joined.view(*joined.shape[:axis], joined.shape[axis] // 2, 2, *joined.shape[axis + 1 :])
        return pairs.select(axis + 1, 0), pairs.select(axis + 1, 1)

    @staticmethod
    @override
    def join(gate: Tensor, up: Tensor, dim: int) -> Tensor:
        axis = dim if dim >= 0 else gate.dim() + dim
        return torch.stack((gate, up), axis + 1).flatten(axis, axis + 1)


@final
class Ungated(GateUpOrder):
    """No gate: w13 is one projection of ``inter`` rows, the activation is of its rows alone (Nemotron-H)."""

    title = "no gate"

    @staticmethod
    @override
    def split(joined: Tensor, dim: int) -> Never:
        raise TypeError("these experts have no gate, and there is nothing to split")

    @staticmethod
    @override
    def join(gate: Tensor, up: Tensor, dim: int) -> Never:
        raise TypeError("these experts have no gate, and there is nothing to join")

    @classmethod
    @override
    def part(cls, joined: Tensor, dim: int, rank: int, size: int) -> Tensor:
        per = joined.shape[dim] // size
        return joined.narrow(dim, rank * per, per).contiguous()

"""Expert weights in checkpoint layout: what a file holds, before any runner has prepared it.

Every class holds ``w13`` (experts, 2 * inter, hidden) and ``w2`` (experts, hidden, inter), rows contiguous, and says in its type in which order
the gate and up rows of ``w13`` lie. Biases, where a model has them, are ``b13`` (experts, 2 * inter) in the same order and ``b2`` (experts, hidden).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Generic, TypeVar, final

import attrs
import torch
from torch import Tensor
from typing_extensions import override

from ..gate_up import GateUpOrder
from ..spec import Format

O_co = TypeVar("O_co", bound=GateUpOrder, covariant=True)


@final
@attrs.frozen
class Shard:
    """Say how tensor parallelism cuts a field: along ``dim``, where one entry stands for ``unit`` of the expert's width.

    ``joined``: gate and up share the dim, in the order of the class.
    """

    dim: int
    unit: int
    joined: bool = False


class ExpertWeights(ABC, Generic[O_co]):
    """The base of all checkpoint-layout weights."""

    format: ClassVar[Format]
    sharded: ClassVar[Mapping[str, Shard]]
    w13: Tensor
    w2: Tensor
    order: type[O_co]
    b13: Tensor | None
    b2: Tensor | None

    @abstractmethod
    def dequantize_w13(self, expert: int) -> Tensor:
        """Return one expert's first projection as float32 (2 * inter, hidden), rows in the order of the class."""

    @abstractmethod
    def dequantize_w2(self, expert: int) -> Tensor:
        """Return one expert's second projection as float32 (hidden, inter)."""

    @property
    def shards(self) -> Mapping[str, Shard]:
        """Return how tensor parallelism cuts each field; fields that are not named are whole on every rank."""
        return self.sharded

    @property
    def num_experts(self) -> int:
        """Return how many experts there are."""
        return self.w13.shape[0]

    @property
    def hidden(self) -> int:
        """Return the width of the model."""
        return self.w2.shape[1]

    @property
    def inter(self) -> int:
        """Return the width of one expert."""
        return self.w2.shape[2]


class DenseExpertWeights(ExpertWeights[O_co]):
    """The base of weights without scales."""

    @override
    def dequantize_w13(self, expert: int) -> Tensor:
        return self.w13[expert].to(torch.float32)

    @override
    def dequantize_w2(self, expert: int) -> Tensor:
        return self.w2[expert].to(torch.float32)


class ScaledExpertWeights(ExpertWeights[O_co]):
    """The base of weights with scales: value = data * scale."""

    w13_scale: Tensor
    w2_scale: Tensor


def apply_blocks(data: Tensor, scale: Tensor, block_rows: int, block_columns: int) -> Tensor:
    """Return data (rows, columns) times the scale of each block, as float32."""
    rows, columns = data.shape
    blocks = data.to(torch.float32).view(rows // block_rows, block_rows, columns // block_columns, block_columns)
    return (blocks * scale[:, None, :, None]).view(rows, columns)

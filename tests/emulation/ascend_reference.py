"""The goldens of the NPU's operators as plain loops over Python numbers: slow, and nothing in common with the emulation."""

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Row: TypeAlias = list[float]
Matrix: TypeAlias = list[Row]


def numbers(tensor: Tensor) -> Row:
    """Return the elements of a tensor, flat."""
    return [float(value) for value in tensor.detach().float().flatten()]


def integers(tensor: Tensor) -> list[int]:
    """Return the elements of an integer tensor, flat."""
    return [int(value) for value in tensor.flatten()]


def matrix(tensor: Tensor) -> Matrix:
    """Return the rows of a matrix."""
    return [numbers(row) for row in tensor]


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_ints(seed: int, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Return integers from ``low`` to ``high`` - 1."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_routes(seed: int, tokens: int, k: int, experts: int) -> Tensor:
    """Return distinct ids of each token, int32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(experts, generator=generator)[:k] for _ in range(tokens)]).int()


def stable_order(ids: Sequence[int]) -> list[int]:
    """Return the places of the ids in ascending order, the first of equal ones first."""
    return sorted(range(len(ids)), key=lambda place: ids[place])


def counted(ids: Sequence[int], experts: int) -> list[int]:
    """Return how often each id is there."""
    return [sum(1 for other in ids if other == expert) for expert in range(experts)]


def accumulated(counts: Sequence[int]) -> list[int]:
    """Return inclusive cumulative counts."""
    return [sum(counts[: place + 1]) for place in range(len(counts))]


def group_of(row: int, counts: Sequence[int]) -> int | None:
    """Return the group of a row by counts; None after the last."""
    return next((group for group, end in enumerate(accumulated(counts)) if row < end), None)


def half_even(value: float) -> int:
    """Return the nearest integer, of two the even one: what Python's round does."""
    return round(value)


def half_up(value: float) -> int:
    """Return the nearest integer, of two the upper one."""
    return math.floor(value + 0.5)


def quantized(row: Row, limit: int, rounded: Callable[[float], int] = half_even) -> tuple[list[int], float]:
    """Return a row as integers and its scale, amax / limit."""
    scale = max(abs(value) for value in row) / limit
    return [rounded(value / scale) if scale else 0 for value in row], scale


def product(row: Row, weight: Tensor) -> Row:
    """Return a row times a matrix [K, N]."""
    columns = [numbers(column) for column in weight.T]
    return [math.fsum(a * b for a, b in zip(row, column, strict=True)) for column in columns]


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def silu(value: float) -> float:
    return value * sigmoid(value)


def silu_halves(row: Row) -> Row:
    half = len(row) // 2
    return [silu(a) * b for a, b in zip(row[:half], row[half:], strict=True)]


def clamped(gate: float, up: float, alpha: float, limit: float, bias: float) -> float:
    """Return the clamped formula of one element."""
    gate = min(gate, limit)
    return gate * sigmoid(alpha * gate) * (max(-limit, min(up, limit)) + bias)


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """Return the norm of the difference over the norm of what is wanted."""
    return float(((found.double() - wanted.double()).square().sum() / wanted.double().square().sum()).sqrt())

"""Rows, routes and experts for the tests of the communication libraries, and the layer that they should make, in float32."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

worlds = pytest.mark.parametrize("ranks", [1, 2, 4])

LOCAL = 3  # experts of a rank


def rows(rank: int, tokens: int, hidden: int) -> Tensor:
    """Return rows of one rank, bf16."""
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(100 + rank)).to(torch.bfloat16)


def routes(rank: int, tokens: int, topk: int, experts: int, dtype: torch.dtype = torch.int64, *, dropped: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return distinct ids (tokens, topk), of which some are -1, and float32 weights."""
    generator = torch.Generator().manual_seed(200 + rank)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :topk].to(dtype).contiguous()
    ids[torch.rand(tokens, topk, generator=generator) < dropped] = -1
    return ids, torch.rand(tokens, topk, generator=generator) + 0.1


def idle(rank: int) -> int:
    """Return how many tokens a rank has when every second one idles."""
    return 0 if rank % 2 else 5


def expert(x: Tensor, index: int) -> Tensor:
    """Return what an expert makes of rows, float32: a scale and a rotation of the columns that no other expert has."""
    return x.float().roll(index + 1, -1) * (0.5 + 0.25 * index)


def layer(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the experts of each token (tokens, hidden), float32."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for token in range(x.size(0)):
        for slot in range(ids.size(1)):
            if int(ids[token, slot]) >= 0:
                total[token] += weights[token, slot] * expert(x[token], int(ids[token, slot]))
    return total


def assert_layer(found: Tensor, x: Tensor, ids: Tensor, weights: Tensor, roundings: int = 2) -> None:
    """Assert that bf16 rows are the layer, up to so many roundings to bf16 of whatever is summed.

    A rounding errs by 2^-8 of its value, and no value is above the sum of magnitudes (the experts of this module have positive factors).
    """
    bound = roundings * 2**-8 * 1.01 * layer(x.abs(), ids, weights)
    assert bool(((found.float() - layer(x, ids, weights)).abs() <= bound).all())


def local_layer(x: Tensor, ids: Tensor, weights: Tensor, first: int, local: int = LOCAL) -> Tensor:
    """Return what a rank makes of received rows: weighted and summed over its own experts. Ids are local; the first expert is ``first``."""
    total = torch.zeros(x.shape, dtype=torch.float32)
    for index in range(local):
        share = torch.where(ids == index, weights, 0.0).sum(1, keepdim=True)
        total += torch.where(share != 0, share * expert(x, first + index), 0.0)
    return total


def ranks_of(ids: Tensor, local: int) -> Tensor:
    """Return to how many distinct ranks each token goes (tokens,), where negative ids go nowhere."""
    return torch.tensor([len({int(value) // local for value in row.unbind() if int(value) >= 0}) for row in ids.unbind()])


def assert_bits(found: Tensor, expected: Tensor) -> None:
    """Assert that two tensors agree in dtype, shape and every bit."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def same_rows(found: Tensor, expected: Tensor) -> bool:
    """Return whether two matrices have the same rows bit for bit, in any order."""

    def keys(matrix: Tensor) -> Sequence[bytes]:
        return sorted(bytes(row.contiguous().view(torch.uint8).numpy()) for row in matrix.unbind())

    return keys(found) == keys(expected)

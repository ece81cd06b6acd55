"""Rows that go to the ranks of their experts and come back, for every kind of dispatch on the NPU."""

from collections.abc import Sequence
from typing import final

import attrs
import torch
from torch import Tensor

from tests.emulation.hazards import poisoned
from tests.emulation.world import Group

from .numerics import INT8_MAX, quantize_rows


@final
@attrs.frozen(eq=False)
class Sent:
    """What a rank brings: rows [T, H], ids int64 [T, K] of which others than 0 to ``experts`` - 1 are not sent, weights [T, K], smooth scales."""

    rows: Tensor
    ids: Tensor
    weights: Tensor | None
    smooth: Tensor | None
    arguments: tuple[object, ...]


@final
@attrs.frozen
class Route:
    """A row that was received: for which local expert, from which token and slot of which rank."""

    expert: int
    rank: int
    token: int
    slot: int


@final
@attrs.frozen(eq=False)
class Arrived:
    """What a rank received, sorted by local expert, rank, token and slot; and what all ranks brought."""

    routes: Sequence[Route]
    sent: Sequence[Sent]
    experts: int

    def counts(self) -> Tensor:
        """Return the rows of each local expert, int64."""
        return torch.bincount(torch.tensor([route.expert for route in self.routes], dtype=torch.int64), minlength=self.experts)

    def prefix(self, ranks: int) -> Tensor:
        """Return the inclusive cumulative rows by (local expert, rank), int32."""
        places = torch.tensor([route.expert * ranks + route.rank for route in self.routes], dtype=torch.int64)
        return torch.bincount(places, minlength=self.experts * ranks).cumsum(0).int()

    def rows(self, first_expert: int) -> Tensor:
        """Return the rows, smoothed for their experts where the sender smooths."""
        found = [self._row(route, first_expert) for route in self.routes]
        return torch.stack(found) if found else self.sent[0].rows[:0]

    def _row(self, route: Route, first_expert: int) -> Tensor:
        sent = self.sent[route.rank]
        row = sent.rows[route.token]
        return row if sent.smooth is None else row.float() * sent.smooth[first_expert + route.expert]

    def weights(self) -> Tensor:
        """Return the weight of each row, float32; NaN where its rank sent none."""
        found = [self.sent[route.rank].weights for route in self.routes]
        values = [
            torch.nan if weights is None else float(weights[route.token, route.slot]) for weights, route in zip(found, self.routes, strict=True)
        ]
        return torch.tensor(values, dtype=torch.float32)


def send(group: Group, name: str, sent: Sent, experts: int) -> Arrived:
    """Meet all ranks and return what arrives here. ``experts``: of all ranks, in equal parts."""
    brought = group.exchange(name, sent)
    local = experts // group.size()
    first = local * group.rank()
    routes = [
        Route(expert, rank, int(token), int(slot))
        for expert in range(local)
        for rank, other in enumerate(brought)
        for token, slot in (other.ids == first + expert).nonzero()
    ]
    return Arrived(routes, brought, local)


@final
@attrs.frozen(eq=False)
class Returned:
    """Rows [A, H] that go back by their routes, from a rank whose local experts begin with ``first_expert``."""

    rows: Tensor
    routes: Sequence[Route]
    first_expert: int


def come_back(group: Group, name: str, returned: Returned, tokens: int, slots: int) -> tuple[Tensor, Tensor]:
    """Meet all ranks and return the rows of each route float32 [T, K, H], and the expert it is from, int64 [T, K]: -1 where none came."""
    brought = group.exchange(name, returned)
    found = poisoned((tokens, slots, returned.rows.shape[1]), torch.float32)
    experts = torch.full((tokens, slots), -1, dtype=torch.int64)
    for other in brought:
        for row, route in zip(other.rows, other.routes, strict=True):
            if route.rank == group.rank() and route.token < tokens and route.slot < slots:
                found[route.token, route.slot] = row.float()
                experts[route.token, route.slot] = other.first_expert + route.expert
    return found, experts


def weighted_sum(rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over routes that came back, float32 [T, H]."""
    return torch.where((experts >= 0)[..., None], rows * weights.float()[..., None], 0.0).sum(1)


def quantize_sent(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 rows and their scales amax / 127, as a dispatch quantises them."""
    values, scales = quantize_rows(rows.float(), INT8_MAX)
    return values.to(torch.int8), scales


def fill(live: Tensor, bound: int) -> Tensor:
    """Return ``bound`` rows of which the first are these and the others poison."""
    result = poisoned((bound, *live.shape[1:]), live.dtype)
    if live.dtype.itemsize == 1:
        result.view(torch.uint8)[: len(live)] = live.view(torch.uint8)
    else:
        result[: len(live)] = live
    return result

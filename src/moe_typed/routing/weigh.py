"""The router weight on the input (Llama 4): rows are multiplied before the experts see them, and the weight is spent."""

from typing import TypeVar

import torch

from ..formats import Bf16Rows, Fp16Rows, Fp32Rows
from .ids import Ids
from .routing import Routing, live_mask
from .scaling import RoutedScaling

I = TypeVar("I", bound=Ids)  # noqa: E741  the id space, as everywhere
S = TypeVar("S", bound=RoutedScaling)
R = TypeVar("R", Bf16Rows, Fp16Rows, Fp32Rows)


def weigh_input(rows: R, routing: Routing[I, S]) -> tuple[R, Routing[I, S]]:
    """Return rows multiplied by the weight of their one route, and the routing with that weight spent: 1, or 0 where the row goes nowhere.

    The product is float32, rounded once. Rows that go nowhere become zero, whatever is in them.
    Raises: ValueError for more than one route a row, since a row has one input, and for a routing of another number of rows.
    """
    if routing.topk_ids.shape[1] != 1:
        raise ValueError(f"the router weight goes on the input of rows with one route; these have {routing.topk_ids.shape[1]}")
    if routing.topk_ids.shape[0] != rows.data.shape[0]:
        raise ValueError(f"the routing is of {routing.topk_ids.shape[0]} rows, but there are {rows.data.shape[0]}")
    goes = (routing.topk_ids >= 0) & (routing.topk_ids < routing.num_experts) & live_mask(routing)  # no sentinel, the sink among them
    weighed = torch.where(goes, rows.data.to(torch.float32) * routing.topk_weights, 0.0).to(rows.data.dtype)
    spent = Routing(
        routing.topk_ids,
        goes.to(torch.float32),
        routing.space,
        routing.num_experts,
        routing.scaling,
        routing.renormalized,
        routing.live,
        routing.num_shared,
        routing.first_shared,
    )
    return type(rows)(weighed), spent

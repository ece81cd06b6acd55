from types import ModuleType

import pytest
import torch
from torch import Tensor

from moe_typed.ops.local_ids import reference
from moe_typed.ops.local_ids import triton as fast
from tests.ops.support import devices, floats, in_one_graph, int_rows, on_cuda

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "triton"])


def routes(rows: int, k: int, device: str, dtype: torch.dtype = torch.int32, weight: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Return ids that go beyond -1..63 on both sides, and weights that are NaN where an id is none of 16..31."""
    generator = torch.Generator().manual_seed(rows * k)
    ids = torch.randint(-8, 72, (rows, k), generator=generator)
    weights = torch.rand(rows, k, generator=generator).masked_fill((ids < 16) | (ids > 31), float("nan"))
    return ids.to(device=device, dtype=dtype), weights.to(device=device, dtype=weight)


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("weight", [torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "k", "live"), [(0, 2, None), (1, 8, 0), (1, 8, 1), (5, 3, 2), (65, 8, None), (700, 2, 3), (7, 1, 100)])
def test_routes_elsewhere_and_of_padding_rows_are_none(
    device: str, implementation: ModuleType, dtype: torch.dtype, weight: torch.dtype, rows: int, k: int, live: int | None
) -> None:
    ids, weights = routes(rows, k, device, dtype, weight)
    counted = None if live is None else torch.tensor([live], dtype=torch.int32, device=device)
    got_ids, got_weights = implementation.local_ids(ids, weights, 16, 16, counted)
    assert (got_ids.dtype, got_weights.dtype) == (torch.int32, torch.float32)
    for row in range(rows):
        for column in range(k):
            expert = int(ids[row, column]) - 16
            here = 0 <= expert < 16 and (live is None or row < live)
            assert int(got_ids[row, column]) == (expert if here else -1)
            assert float(got_weights[row, column]) == (float(weights[row, column]) if here else 0.0)


@devices
@IMPLEMENTATIONS
def test_views_are_read_where_they_lie(device: str, implementation: ModuleType) -> None:
    ids, weights = routes(8, 6, device)
    expected = implementation.local_ids(ids[::2, 1:5:2].contiguous(), weights[:4, ::3].contiguous(), 16, 16)
    for got, same in zip(implementation.local_ids(ids[::2, 1:5:2], weights[:4, ::3], 16, 16), expected, strict=True):
        assert torch.equal(got, same)


@devices
def test_compiles_as_one_graph(device: str) -> None:
    ids, weights = routes(9, 4, device)
    for got, expected in zip(in_one_graph(fast.local_ids)(ids, weights, 16, 16), reference.local_ids(ids, weights, 16, 16), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
def test_one_graph_serves_every_count(device: str) -> None:
    ids, weights = routes(64, 4, device)
    live = torch.tensor([64], dtype=torch.int32, device=device)
    fast.local_ids(ids, weights, 16, 16, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fast.local_ids(ids, weights, 16, 16, live)
    for count in (0, 5, 64):
        live.fill_(count)
        graph.replay()
        for got, expected in zip(captured, reference.local_ids(ids, weights, 16, 16, live), strict=True):
            assert torch.equal(got, expected)


@devices
@IMPLEMENTATIONS
def test_ids_that_32_bits_do_not_hold_are_none(device: str, implementation: ModuleType) -> None:
    ids = torch.tensor([[2**32 + 17, 17, 16 - 2**32, -(2**63)]], device=device)
    got, weights = implementation.local_ids(ids, torch.ones(1, 4, device=device), 16, 16, None)
    assert int_rows(got) == [[-1, 1, -1, -1]]
    assert floats(weights[0]) == [0.0, 1.0, 0.0, 0.0]

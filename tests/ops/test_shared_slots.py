from collections.abc import Callable
from types import ModuleType
from typing import TypeAlias, cast

import pytest
import torch
from torch import Tensor

from moe_typed.ops.shared_slots import reference
from moe_typed.ops.shared_slots import triton as fast
from tests.ops.support import devices, floats, in_one_graph, int_rows, ints, on_cuda

# (rows, k, experts, ep_size, ep_rank, num_shared)
CASES = [(1, 8, 256, 8, 0, 1), (4, 8, 256, 8, 7, 1), (17, 8, 264, 8, 3, 1), (128, 16, 128, 4, 2, 2), (9, 6, 64, 4, 1, 3), (33, 1, 8, 8, 7, 1)]
Append: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "triton"])


def routing(rows: int, k: int, experts: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * k)
    ids = torch.randint(-1, experts, (rows, k), generator=generator, dtype=torch.int32)
    return ids.to(device), torch.rand(rows, k, generator=generator).to(device)


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("live_rows", [None, 0, 1, 1000])
@pytest.mark.parametrize(("rows", "k", "experts", "ep_size", "ep_rank", "num_shared"), CASES)
def test_each_routed_id_moves_and_each_shared_id_is_this_ranks_own(
    device: str, implementation: ModuleType, live_rows: int | None, rows: int, k: int, experts: int, ep_size: int, ep_rank: int, num_shared: int
) -> None:
    ids, weights = routing(rows, k, experts, device)
    local = experts // ep_size
    live = None if live_rows is None else torch.tensor([live_rows], dtype=torch.int32, device=device)
    out_ids, out_weights = implementation.append_shared_interleaved(ids, weights, num_shared, local, ep_rank, 0.4, live)

    assert (out_ids.dtype, out_weights.dtype) == (torch.int32, torch.float32)
    first_shared = ep_rank * (local + num_shared) + local
    for row in range(rows):
        if live_rows is not None and row >= live_rows:
            assert ints(out_ids[row]) == [-1] * (k + num_shared)
            assert floats(out_weights[row]) == [0.0] * (k + num_shared)
        else:
            moved = [e if e < 0 else e + e // local * num_shared for e in ints(ids[row])]
            assert ints(out_ids[row]) == [*moved, *range(first_shared, first_shared + num_shared)]
            assert torch.equal(out_weights[row], torch.cat((weights[row], torch.full((num_shared,), 0.4, device=device))))


@devices
@IMPLEMENTATIONS
def test_without_a_remap_the_routed_columns_stay(device: str, implementation: ModuleType) -> None:
    ids, weights = routing(5, 3, 16, device)
    live = torch.tensor([4], dtype=torch.int32, device=device)
    out_ids, out_weights = implementation.append_shared(ids, weights, 2, 16, 1.0, live)
    assert torch.equal(out_ids[:4, :3], ids[:4])
    assert torch.equal(out_weights[:4, :3], weights[:4])
    assert int_rows(out_ids[:4, 3:]) == [[16, 17]] * 4
    assert bool((out_weights[:4, 3:] == 1.0).all())
    assert ints(out_ids[4]) == [-1] * 5
    assert floats(out_weights[4]) == [0.0] * 5


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("num_shared", [0, -1])
def test_without_shared_experts_the_inputs_come_back(device: str, implementation: ModuleType, num_shared: int) -> None:
    ids, weights = routing(5, 3, 16, device)
    for out in (
        implementation.append_shared(ids, weights, num_shared, 16, 1.0),
        implementation.append_shared_interleaved(ids, weights, num_shared, 4, 1, 1.0),
    ):
        assert out[0] is ids
        assert out[1] is weights


@devices
def test_inputs_may_have_strides(device: str) -> None:
    ids, weights = routing(12, 10, 64, device)
    for view in (slice(0, 6), slice(1, 10, 2)):
        arguments = (ids[::2, view], weights[1::2, view], 1, 8, 3, 0.5)
        for got, expected in zip(fast.append_shared_interleaved(*arguments), reference.append_shared_interleaved(*arguments), strict=True):
            assert torch.equal(got, expected)


def test_without_rows_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_append_kernel", None)
    ids, weights = fast.append_shared(torch.empty(0, 4, dtype=torch.int32), torch.empty(0, 4), 2, 16, 1.0)
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 6), torch.int32, (0, 6), torch.float32)


@devices
@IMPLEMENTATIONS
def test_both_trace_into_one_graph(device: str, implementation: ModuleType) -> None:
    ids, weights = routing(9, 4, 32, device)
    live = torch.tensor([5], dtype=torch.int32, device=device)
    traced = in_one_graph(cast("Append", implementation.append_shared_interleaved))
    expected_pair = reference.append_shared_interleaved(ids, weights, 1, 8, 2, 0.5, live)
    for got, expected in zip(traced(ids, weights, 1, 8, 2, 0.5, live), expected_pair, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("rows", [1, 512, 16384])
def test_a_captured_graph_follows_the_live_count(device: str, rows: int) -> None:
    ids, weights = routing(rows, 8, 256, device)
    live = torch.tensor([rows], dtype=torch.int32, device=device)
    fast.append_shared_interleaved(ids, weights, 1, 32, 3, 0.4, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fast.append_shared_interleaved(ids, weights, 1, 32, 3, 0.4, live)
    for count in (rows, 0, rows // 3):
        live.fill_(count)
        graph.replay()
        for got, expected in zip(out, reference.append_shared_interleaved(ids, weights, 1, 32, 3, 0.4, live), strict=True):
            assert torch.equal(got, expected)

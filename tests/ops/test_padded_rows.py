import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import cast

import pytest
import torch
from torch import Tensor

from moe_typed.ops.padded_rows import reference
from moe_typed.ops.padded_rows import triton as fast
from tests.ops.support import devices, in_one_graph, on_cuda

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "triton"])


def routing(rows: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * k)
    return torch.randint(0, 256, (rows, k), generator=generator, dtype=torch.int32).to(device), torch.rand(rows, k, generator=generator).to(device)


@devices
@IMPLEMENTATIONS
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fill", [-1, 32])
@pytest.mark.parametrize(("rows", "k", "live"), [(1, 8, 0), (1, 8, 1), (5, 3, 2), (65, 8, 64), (700, 2, 3), (7, 1, 100)])
def test_rows_from_the_count_on_are_filled(
    device: str, implementation: ModuleType, dtype: torch.dtype, fill: int, rows: int, k: int, live: int
) -> None:
    ids, weights = routing(rows, k, device)
    before = ids.clone(), weights.clone()
    for count in (torch.tensor([live], dtype=dtype, device=device), torch.tensor(live, dtype=dtype, device=device)):
        out_ids, out_weights = implementation.fill_padded_rows(ids, weights, count, fill)
        assert torch.equal(ids, before[0])
        assert torch.equal(weights, before[1])
        assert (out_ids.dtype, out_weights.dtype) == (torch.int32, torch.float32)
        assert torch.equal(out_ids[:live], ids[:live])
        assert torch.equal(out_weights[:live], weights[:live])
        assert bool((out_ids[live:] == fill).all())
        assert bool((out_weights[live:] == 0).all())
        in_place = ids.clone(), weights.clone()
        implementation.fill_padded_rows_(*in_place, count, fill)
        assert torch.equal(in_place[0], out_ids)
        assert torch.equal(in_place[1], out_weights)


@devices
@IMPLEMENTATIONS
def test_views_are_filled_and_nothing_beside_them(device: str, implementation: ModuleType) -> None:
    ids, weights = routing(8, 6, device)
    count = torch.tensor([2], dtype=torch.int32, device=device)
    expected_ids, expected_weights = ids.clone(), weights.clone()
    expected_ids[4:8:2, 1:5:2], expected_weights[6:, :2] = -1, 0.0
    implementation.fill_padded_rows_(ids[::2, 1:5:2], weights[4:, :2], count)
    assert torch.equal(ids, expected_ids)
    assert torch.equal(weights, expected_weights)


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("count", "error", "part"),
    [
        (3, TypeError, "must be a tensor of one integer on cpu; got int"),
        (None, TypeError, "got NoneType"),
        (torch.tensor([1.0]), TypeError, "torch.float32"),
        (torch.tensor([True]), TypeError, "torch.bool"),
        (torch.tensor([1], dtype=torch.int16), TypeError, "torch.int16"),
        (torch.tensor([1, 2]), ValueError, "one element; got [2]"),
        (torch.empty(0, dtype=torch.int32), ValueError, "one element; got [0]"),
        (torch.empty(1, dtype=torch.int32, device="meta"), ValueError, "is on meta, but the ids are on cpu"),
    ],
)
@pytest.mark.parametrize("name", ["fill_padded_rows", "fill_padded_rows_"])
def test_any_other_count_is_refused(implementation: ModuleType, name: str, count: object, error: type[Exception], part: str) -> None:
    ids, weights = routing(4, 2, "cpu")
    before = ids.clone()
    with pytest.raises(error) as raised:
        getattr(implementation, name)(ids, weights, count)
    assert part in str(raised.value)
    assert torch.equal(ids, before)


def test_the_checks_survive_python_without_assertions() -> None:
    program = (
        "import torch; from moe_typed.ops.padded_rows.reference import check_count\n"
        "try: check_count(torch.tensor([1.0]), torch.zeros(1))\n"
        "except TypeError: print('refused')"
    )
    assert subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True).stdout == "refused\n"


@pytest.mark.parametrize("name", ["fill_padded_rows", "fill_padded_rows_"])
def test_without_rows_nothing_is_launched(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(fast, "_fill", None)
    getattr(fast, name)(torch.empty(0, 4, dtype=torch.int32), torch.empty(0, 4), torch.tensor([0]))


@devices
@IMPLEMENTATIONS
def test_both_trace_into_one_graph(device: str, implementation: ModuleType) -> None:
    ids, weights = routing(9, 4, device)
    count = torch.tensor([5], device=device)
    out_ids, out_weights = reference.fill_padded_rows(ids, weights, count)
    traced = in_one_graph(cast("Callable[..., tuple[Tensor, Tensor]]", implementation.fill_padded_rows))(ids, weights, count)
    assert torch.equal(traced[0], out_ids)
    assert torch.equal(traced[1], out_weights)
    in_one_graph(cast("Callable[..., None]", implementation.fill_padded_rows_))(ids, weights, count)
    assert torch.equal(ids, out_ids)
    assert torch.equal(weights, out_weights)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("rows", [1, 512, 16384])
def test_a_captured_graph_follows_the_count(device: str, rows: int) -> None:
    ids, weights = routing(rows, 8, device)
    count = torch.tensor([rows], device=device)
    fast.fill_padded_rows(ids, weights, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_ids, out_weights = fast.fill_padded_rows(ids, weights, count)
    for live in (rows, 0, rows // 3):
        count.fill_(live)
        graph.replay()
        expected_ids, expected_weights = reference.fill_padded_rows(ids, weights, count)
        assert torch.equal(out_ids, expected_ids)
        assert torch.equal(out_weights, expected_weights)

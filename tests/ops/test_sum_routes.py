import pytest
import torch

from moe_typed.ops.sum_routes import reference
from moe_typed.ops.sum_routes.triton import sum_routes
from tests.ops.support import devices, dtypes, floats

NAN = float("nan")


def routes(device: str, rows: int, k: int, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(-1, experts + 1, (rows, k), generator=generator, dtype=torch.int32)
    return ids.to(device), torch.rand(rows, k, generator=generator).to(device)


@dtypes("float32", "float16", "bfloat16")
@pytest.mark.parametrize("hidden", [64, 1500])
@pytest.mark.parametrize(("rows", "k"), [(0, 2), (1, 1), (33, 6), (4, 0)])
def test_matches_the_reference(device: str, dtype: torch.dtype, rows: int, k: int, hidden: int) -> None:
    ids, weights = routes(device, rows, k, 5)
    results = torch.randn(rows * k, hidden, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    found = sum_routes(results, ids, weights, None, 5, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, reference.sum_routes(results, ids, weights, None, 5, dtype))


@devices
def test_what_stands_at_a_dropped_route_is_not_looked_at(device: str) -> None:
    ids = torch.tensor([[0, -1], [5, -1], [1, 1], [1, 1]], dtype=torch.int32, device=device)
    weights = torch.tensor([[1.0, NAN], [NAN, NAN], [0.5, 0.25], [NAN, NAN]], device=device)
    results = torch.tensor([1.0, NAN, NAN, NAN, 4.0, 8.0, NAN, NAN], device=device).repeat_interleave(64).view(8, 64)
    found = sum_routes(results, ids, weights, torch.tensor([3], dtype=torch.int32, device=device), 5, torch.float32)
    assert floats(found[:, 0]) == [1.0, 0.0, 4.0, 0.0]

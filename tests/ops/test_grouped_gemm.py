import pytest
import torch

from moe_typed.ops.align.reference import align
from moe_typed.ops.grouped_gemm import reference
from moe_typed.ops.grouped_gemm.triton import gather_gemm, scatter_gemm
from tests.ops.support import devices, dtypes, on_cuda

TOP_K, EXPERTS = 3, 5
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 8e-3}  # float16: the interpreter also accumulates in it


def randn(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def routes(device: str, rows: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(-1, EXPERTS, (rows, TOP_K), generator=torch.Generator().manual_seed(rows), dtype=torch.int32)
    return align(ids.to(device), None, EXPERTS, block_m)


@dtypes("float32", "float16", "bfloat16")
@pytest.mark.parametrize(("depth", "columns"), [(64, 128), (40, 72)])
@pytest.mark.parametrize(("rows", "block_m", "with_bias"), [(9, 16, True), (40, 32, False), (70, 64, True), (100, 128, False)])
def test_both_products_match_the_reference(
    device: str, dtype: torch.dtype, rows: int, block_m: int, depth: int, columns: int, with_bias: bool
) -> None:
    slots, block_expert = routes(device, rows, block_m)
    weights = randn(device, dtype, EXPERTS, columns, depth) / depth**0.5
    bias = randn(device, dtype, EXPERTS, columns) if with_bias else None
    is_route = slots < rows * TOP_K
    kept = slots[is_route].long()

    given = randn(device, dtype, rows, depth)
    gathered = gather_gemm(given, None, weights, None, bias, slots, block_expert, TOP_K, dtype)
    expected = reference.gather_gemm(given, None, weights, None, bias, slots, block_expert, TOP_K, dtype)
    assert gathered.dtype == dtype
    torch.testing.assert_close(gathered[is_route], expected[is_route], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])

    by_slot = randn(device, dtype, len(slots), depth)
    by_slot[~is_route] = float("nan")
    scattered = scatter_gemm(by_slot, None, weights, None, bias, slots, block_expert, rows * TOP_K, dtype)
    expected = reference.scatter_gemm(by_slot, None, weights, None, bias, slots, block_expert, rows * TOP_K, dtype)
    torch.testing.assert_close(scattered[kept], expected[kept], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize(("rows", "block_m"), [(9, 16), (40, 32), (70, 64), (100, 128)])
def test_fp8_matches_the_reference(device: str, rows: int, block_m: int) -> None:
    depth, columns = 384, 256
    slots, block_expert = routes(device, rows, block_m)
    is_route = slots < rows * TOP_K
    given = randn(device, torch.float8_e4m3fn, rows, depth)
    given_scale = randn(device, torch.float32, rows, depth // 128).abs()
    weights = randn(device, torch.float8_e4m3fn, EXPERTS, columns, depth)
    scale = randn(device, torch.float32, EXPERTS, columns // 128, depth // 128).abs() / depth**0.5
    found = gather_gemm(given, given_scale, weights, scale, None, slots, block_expert, TOP_K, torch.float32)
    expected = reference.gather_gemm(given, given_scale, weights, scale, None, slots, block_expert, TOP_K, torch.float32)
    # Products of e4m3 are exact in float32; the tensor cores keep at least 13 bits of each partial sum.
    torch.testing.assert_close(found[is_route], expected[is_route], rtol=2e-3, atol=2e-3)


@devices
def test_rows_may_have_any_strides(device: str) -> None:
    slots, block_expert = routes(device, 6, 16)
    weights = randn(device, torch.float32, EXPERTS, 64, 48)
    wide = randn(device, torch.float32, 48, 12)
    strided = wide[:, ::2].T
    found = gather_gemm(strided, None, weights, None, None, slots, block_expert, TOP_K, torch.float32)
    expected = gather_gemm(strided.contiguous(), None, weights, None, None, slots, block_expert, TOP_K, torch.float32)
    is_route = slots < 6 * TOP_K
    assert torch.equal(found[is_route], expected[is_route])


def test_operands_that_do_not_fit_are_refused() -> None:
    slots, block_expert = routes("cpu", 4, 16)
    weights = torch.zeros(EXPERTS, 128, 128)
    rows = torch.zeros(4, 128)
    fp8_rows, fp8_weights = rows.to(torch.float8_e4m3fn), weights.to(torch.float8_e4m3fn)

    def refuse(match: str, *operands: torch.Tensor | None) -> None:
        with pytest.raises(ValueError, match=match):
            gather_gemm(*operands, slots, block_expert, TOP_K, torch.float32)  # type: ignore[call-arg, arg-type]

    refuse("width 64, but the weights take", rows[:, :64], None, weights, None, None)
    refuse("rows are torch.float16", rows.half(), None, weights, None, None)
    refuse("scales of the rows", fp8_rows, None, fp8_weights, torch.ones(EXPERTS, 1, 1), None)
    refuse("scales of the weights", fp8_rows, torch.ones(4, 1), fp8_weights, torch.ones(EXPERTS, 1, 2), None)
    refuse("scales of the rows", rows, torch.ones(4, 1), weights, None, None)
    refuse("128 must divide both", fp8_rows, torch.ones(4, 1), fp8_weights[:, :64], torch.ones(EXPERTS, 1, 1), None)
    refuse("bias is", rows, None, weights, None, torch.zeros(EXPERTS, 64))
    refuse("must be contiguous", rows, None, weights.transpose(1, 2), None, None)

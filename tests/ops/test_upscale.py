from types import ModuleType

import pytest
import torch

from moe_typed.ops.quantize import reference as quantize
from moe_typed.ops.scale_layout.spec import ScaleLayout
from moe_typed.ops.upscale import reference
from moe_typed.ops.upscale import triton as fast
from tests.ops.quantize_cases import CASES, Case, raw
from tests.ops.support import devices, in_one_graph, on_cuda
from tests.ops.test_quantize import cases, hard_rows, random_rows

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # Triton's interpreter multiplies in numpy, which warns of infinities

out_dtypes = pytest.mark.parametrize("out", [torch.float32, torch.float16, torch.bfloat16], ids=["float32", "float16", "bfloat16"])


@cases
@out_dtypes
@devices
def test_kernels_agree_with_the_reference_bit_for_bit(case: Case, out: torch.dtype, device: str) -> None:
    if device == "cpu" and out == torch.bfloat16:
        pytest.skip("the interpreter truncates to bfloat16")
    inputs = [hard_rows(device=device), random_rows(5, 640, device=device)]
    if device == "cuda":
        inputs += [random_rows(4099, 640, device=device), random_rows(515, 7168, device=device)]
    for rows in inputs:
        scaled = case.quantize(quantize, rows, None)
        found, wanted = case.upscale(fast, scaled, out, None), case.upscale(reference, scaled, out, None)
        assert (found.dtype, found.shape) == (out, rows.shape)
        nan = torch.isnan(wanted)
        assert torch.equal(torch.isnan(found), nan)
        assert torch.equal(raw(found.masked_fill(nan, 0.0)), raw(wanted.masked_fill(nan, 0.0)))


@devices
@cases
def test_only_live_rows_are_read(device: str, case: Case) -> None:
    rows = random_rows(9, device=device)
    wanted = case.upscale(reference, case.quantize(quantize, rows, None), torch.float32, None)
    rows[4:] = float("nan")
    live = torch.tensor([4], dtype=torch.int32, device=device)
    found = case.upscale(fast, case.quantize(quantize, rows, None), torch.float32, live)
    assert torch.equal(found[:4], wanted[:4])


@devices
@cases
def test_no_rows_launch_nothing(device: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = case.quantize(quantize, torch.empty(0, 512, device=device), None)
    monkeypatch.setattr(fast, "_upscale", None)
    for implementation in (reference, fast):
        assert case.upscale(implementation, scaled, torch.bfloat16, None).shape == (0, 512)


@devices
@pytest.mark.parametrize("name", ["fp8 groups, by column", "fp8 groups, words", "int8 rows", "fp8 tensor", "mxfp4 even, swizzled", "nvfp4"])
def test_kernels_trace_into_one_graph(device: str, name: str) -> None:
    torch.compiler.reset()
    case = CASES[name]
    scaled = case.quantize(quantize, random_rows(3, device=device), None)

    def upscale(*scaled: torch.Tensor) -> torch.Tensor:
        return case.upscale(fast, scaled, torch.float32, None)

    assert torch.equal(in_one_graph(upscale)(*scaled), case.upscale(reference, scaled, torch.float32, None))


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=on_cuda)])
@cases
def test_a_captured_graph_follows_the_count(device: str, case: Case) -> None:
    scaled = case.quantize(quantize, random_rows(300, device=device), None)
    wanted = case.upscale(reference, scaled, torch.bfloat16, None)
    live = torch.tensor([300], dtype=torch.int32, device=device)
    case.upscale(fast, scaled, torch.bfloat16, live)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.upscale(fast, scaled, torch.bfloat16, live)
    for count in (300, 0, 7):
        live.fill_(count)
        found.fill_(-1.0)
        graph.replay()
        assert torch.equal(found[:count], wanted[:count])
        assert bool((found[count:] == -1.0).all())


@pytest.mark.parametrize("implementation", [reference, fast], ids=["reference", "triton"])
def test_scales_in_another_order_are_refused(implementation: ModuleType) -> None:
    rows = random_rows(3, 1024)
    upscale = implementation.upscale_fp8_groups
    by_row, by_column = quantize.quantize_fp8_groups(rows), quantize.quantize_fp8_groups(rows, ScaleLayout.COLUMN_MAJOR)
    with pytest.raises(ValueError, match=r"3 rows of 8 groups, COLUMN_MAJOR, must have the shape \[3, 8\].*strides \[8, 1\]"):
        upscale(*by_row, ScaleLayout.COLUMN_MAJOR)
    with pytest.raises(ValueError, match=r"ROW_MAJOR.*strides \[1, 4\]"):
        upscale(*by_column)
    with pytest.raises(ValueError, match="ROW_MAJOR"):
        upscale(by_row[0], by_row[1][:, :4].contiguous())


def test_float16_overflows_to_infinity() -> None:
    data, scale = quantize.quantize_fp8_rows(torch.tensor([[70000.0, -1.0]]))
    assert reference.upscale_rows(data, scale, torch.float16)[0, 0] == float("inf")

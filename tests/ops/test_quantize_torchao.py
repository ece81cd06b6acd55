"""The microscaling formats against torchao, where it is installed: it is no dependency."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from moe_typed.ops.minifloat.spec import MXFP_ROUNDING
from moe_typed.ops.quantize import reference
from tests.ops.quantize_cases import FN, FP4, raw
from tests.ops.test_quantize import random_rows

MODES = {"up": "RCEIL", "floor": "FLOOR", "even": "EVEN"}


def torchao(module: str, name: str) -> Callable[..., Any]:
    return cast("Callable[..., Any]", getattr(pytest.importorskip(f"torchao.prototype.mx_formats.{module}"), name))


@pytest.mark.parametrize("rounding", ["up", "floor", "even"])
@pytest.mark.parametrize("dtype", [FN, FP4], ids=["mxfp8", "mxfp4"])
@pytest.mark.parametrize("rows_dtype", [torch.bfloat16, torch.float32])
def test_microscaling_formats_are_those_of_torchao(rounding: MXFP_ROUNDING, dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    rows = random_rows(64, dtype=rows_dtype, seed=1)
    rows[3, :64] = 0.0
    mode = getattr(torchao("mx_tensor", "ScaleCalculationMode"), MODES[rounding])
    scale, data = cast("tuple[Tensor, Tensor]", torchao("mx_tensor", "to_mx")(rows, dtype, 32, mode))
    mine, my_scale = (reference.quantize_mxfp8 if dtype == FN else reference.quantize_mxfp4)(rows, rounding)
    assert torch.equal(raw(my_scale), raw(scale))
    assert torch.equal(raw(mine), raw(data))


def test_nvfp4_is_that_of_torchao() -> None:
    rows = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    tensor_scale = reference.nvfp4_tensor_scale(rows)
    scale, data = cast("tuple[Tensor, Tensor]", torchao("nvfp4_tensor", "nvfp4_quantize")(rows, 16, tensor_scale))
    mine, my_scale = reference.quantize_nvfp4(rows, tensor_scale)
    # It rounds the scale in two divisions, not one, and the reciprocal too: what lies next to a tie may fall on its other side.
    assert float((raw(my_scale) != raw(scale)).double().mean()) < 0.002
    assert float((raw(mine) != raw(data)).double().mean()) < 0.002

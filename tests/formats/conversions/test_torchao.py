"""Bit for bit what torchao makes, in the formats that it has."""

import pytest
import torch

from moe_typed import Fp32Rows
from moe_typed.formats import quantizers
from moe_typed.ops.minifloat.spec import MXFP_ROUNDING
from tests.formats.support import FN, FP4, noise

mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao is not installed")
nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor", reason="torchao is not installed")


def rows() -> torch.Tensor:
    data = noise(64, 256)
    data[:, 5] = data.abs().amax(1).clamp(min=1e-3).log2().floor().exp2() * 1.75  # ties of every rule
    data[3, :32] = 0
    return data


@pytest.mark.parametrize(("rule", "rounding"), [("RCEIL", "up"), ("FLOOR", "floor"), ("EVEN", "even")])
@pytest.mark.parametrize(("dtype", "make"), [(FN, quantizers.mxfp8_rounded), (FP4, quantizers.mxfp4_rounded)], ids=["mxfp8", "mxfp4"])
def test_microscaling(dtype: torch.dtype, make: type, rule: str, rounding: MXFP_ROUNDING) -> None:
    scale, data = mx.to_mx(rows(), dtype, 32, mx.ScaleCalculationMode[rule])
    made = make(rounding).run(Fp32Rows(rows()))
    assert torch.equal(made.scale.view(torch.uint8), scale.view(torch.uint8).view(64, 8))
    assert torch.equal(made.data.view(torch.uint8), data.view(torch.uint8).view(64, -1))


def test_nvfp4() -> None:
    """Where no scale falls below e4m3's smallest normal number, to which torchao lifts it."""
    data = noise(64, 256, spread=2)
    made = quantizers.nvfp4.run(Fp32Rows(data))
    scale, packed = nv.nvfp4_quantize(data, 16, made.global_scale.factor)
    assert torch.equal(made.scale.view(torch.uint8), scale.view(torch.uint8).view(64, 16))
    assert torch.equal(made.data.view(torch.uint8), packed.view(torch.uint8).view(64, 128))

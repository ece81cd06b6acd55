"""What the kernels ask of a device and of Triton."""

import pytest
import torch

from moe_typed.ops.product_plans.choose import Layer, runs_wide
from moe_typed.runners.triton.devices import hopper_fault


@pytest.mark.parametrize(("version", "fits"), [("3.5.1", False), ("2.9.0", False), ("3.6.0", True), ("3.10.0+git1", True), ("4.0.0", True)])
def test_a_triton_that_cannot_compile_kernels_for_hopper_is_named(version: str, fits: bool) -> None:
    assert (hopper_fault(version) == "") is fits
    assert fits or hopper_fault(version).endswith(f"need Triton 3.6 or later; this is {version}")


@pytest.mark.parametrize(("capability", "runs"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_the_wide_kernel_is_of_one_generation(capability: tuple[int, int], runs: bool) -> None:
    layer = Layer(torch.bfloat16, 8, 256, 128, False)
    assert runs_wide(capability, layer) is runs
    assert not runs_wide(capability, layer._replace(hidden=200))

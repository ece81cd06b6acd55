"""Compiling beforehand: what is worth a process, and that it is a help and not a condition."""

import pytest
import torch

from moe_typed.ops.product_plans.files import LayerKey
from moe_typed.ops.product_plans.spec import How, Plan
from moe_typed.tuning import families
from moe_typed.tuning.compiling import Compilers
from tests.tuning.support import LAYER, LIMITS, cell


def plans(how: How) -> list[Plan]:
    return [plan for family in families(cell(2000), LIMITS) for plan in family.plans() if family.how is how]


def test_the_wide_kernel_and_a_few_plans_are_left_to_whoever_runs_them() -> None:
    compilers = Compilers(0)
    assert plans(How.WIDE)
    assert [*compilers.compile(LAYER, 2000, plans(How.WIDE))] == []
    assert [*compilers.compile(LAYER, 2000, plans(How.SORTED)[:3])] == []
    compilers.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to compile for")
def test_processes_that_cannot_compile_do_no_harm() -> None:
    compilers = Compilers(0)
    layer = LayerKey("fp8", 4, 2, 256, 128)
    tried = [plan for family in families(cell(8, layer), LIMITS) for plan in family.plans()][:5]
    assert [*compilers.compile(layer, 8, tried)] == [1, 2, 3, 4, 5]
    assert [*compilers.compile(layer, 8, tried)] == [], "each is compiled once"
    compilers.close()

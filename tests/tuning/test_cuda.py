"""Tuning a small layer on a GPU: what is written is right, and is what the layer then runs by."""

from pathlib import Path

import pytest
import torch

from moe_typed.cli.main import GOOD, main
from moe_typed.ops.product_plans.choose import Layer, plans_for
from moe_typed.ops.product_plans.files import VARIABLE, LayerKey, Origin, file_name, read_tuned
from moe_typed.ops.product_plans.spec import How, Plan, Tile
from moe_typed.tuning import Cell, PlanFailed, families
from tests.ops.support import on_cuda

pytestmark = [*on_cuda]

SIZES = ["--experts", "8", "--top-k", "2", "--hidden", "256", "--inter", "128"]
TILE = Tile(16, 32, 128, 4, 3)


@pytest.mark.parametrize(("fmt", "tokens"), [("bf16", 600), ("fp8-block128", 2)])
def test_a_layer_is_tuned_and_then_runs_by_its_plans(tmp_path: Path, fmt: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["tune", *SIZES, "--format", fmt, "--tokens", str(tokens), "--out", str(tmp_path)]
    assert main(command) == GOOD
    device = torch.cuda.get_device_name()
    (layer,) = read_tuned(tmp_path / file_name(device)).layers
    assert [plan.tokens for plan in layer.plans] == [tokens]
    for plan in layer.plans:
        assert plan.us is not None
        assert 1 < plan.us < 1000
        assert plan.measured is not None
        assert plan.measured.device == device
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    dtype = torch.bfloat16 if fmt == "bf16" else torch.float8_e4m3fn
    plans = plans_for(torch.device("cuda"), Layer(dtype, 8, 256, 128, interleaved=False))
    assert plans.source(2).origin is Origin.DEVICE
    assert [plans.choose(plan.tokens, 2) for plan in layer.plans] == [plan.plan for plan in layer.plans]
    before = (tmp_path / file_name(device)).read_text()
    assert main(command) == GOOD
    assert (tmp_path / file_name(device)).read_text() == before


def test_a_plan_that_cannot_run_or_is_wrong_fails_and_the_next_one_runs() -> None:
    from moe_typed.tuning.bench import CudaMeasurer

    measurer = CudaMeasurer(torch.device("cuda"))
    cell = Cell(LayerKey("bf16", 8, 2, 256, 128), 8, 40, "zipf")
    too_large = TILE._replace(columns=256, depth=256, stages=8)
    try:
        with measurer.open(cell) as bench:
            with pytest.raises(PlanFailed, match="shared"):
                bench.time(Plan(How.SORTED, too_large, TILE), 3)
            # Blocks of the second product that are not those of the first meet other routes.
            with pytest.raises(PlanFailed, match="rows are wrong"):
                bench.time(Plan(How.SORTED, TILE._replace(rows=32), TILE), 3)
            assert bench.time(Plan(How.SORTED, TILE, TILE), 3) > 1
    finally:
        measurer.close()


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("how", [How.VECTOR, How.WALK, How.SORTED, How.STREAM])
def test_what_is_compiled_beforehand_is_what_is_run(how: How, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_typed.tuning.bench import CudaMeasurer

    def products() -> set[str]:
        return {path.parent.name for path in tmp_path.rglob("*.cubin") if path.stem in ("_up", "_down", "stream")}

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    measurer = CudaMeasurer(torch.device("cuda"))
    cell = Cell(LayerKey(fmt, 7, 3, 256, 384), 7, 5, "uniform")
    tried = [plan for family in families(cell, measurer.machine.limits) if family.how is how for plan in family.plans()][:4]
    if not tried:
        pytest.skip("the kernel does not run on this device")
    try:
        with measurer.open(cell) as bench:
            by_rule = products()
            assert [*bench.compile(tried)] == [1, 2, 3, 4]
            before = products()
            bench.time(tried[-1], 3)
            assert products() == before > by_rule
    finally:
        measurer.close()

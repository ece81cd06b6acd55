"""What is tried: everything that a kernel takes and a device holds, and nothing else."""

import attrs
import pytest

from moe_typed.ops.product_plans.files import LayerKey
from moe_typed.ops.product_plans.spec import MOST_WALKED, WIDE_ROWS, How, Plan, Tile
from moe_typed.tuning import Cell, Limits, families
from tests.tuning.support import LIMITS

QWEN = LayerKey("bf16", 128, 8, 2048, 768)
TOKENS = (1, 2, 8, 64, 512, 4096, 16384)
LAYERS = [
    QWEN,
    attrs.evolve(QWEN, format="fp8"),
    LayerKey("bf16", 8, 2, 4096, 14336),
    LayerKey("fp8", 8, 2, 384, 128),
    LayerKey("bf16", 4, 1, 72, 40),
]
per_cell = pytest.mark.parametrize("cell", [Cell(layer, layer.experts, tokens, "uniform") for layer in LAYERS for tokens in TOKENS], ids=str)


def plans(cell: Cell, limits: Limits = LIMITS) -> list[Plan]:
    return [plan for family in families(cell, limits) for plan in family.plans()]


def staged(tile: Tile, size: int, both: int) -> int:
    return tile.stages * (tile.rows + both * tile.columns) * tile.depth * size


def streamed(plan: Plan, *, is_fp8: bool) -> int:
    """Return what a stage of the streaming kernel holds: 128 bytes of 128 rows of weights and of the rows, for fp8 of twice as many, and scales."""
    return 128 * 128 + plan.up.rows * (2 * 128 + 16 if is_fp8 else 128)


@per_cell
def test_every_plan_is_one_that_the_kernels_take(cell: Cell) -> None:
    tried = plans(cell)
    assert tried
    assert len(tried) == len(set(tried))
    is_fp8, size = cell.layer.format == "fp8", 1 if cell.layer.format == "fp8" else 2
    for plan in tried:
        assert plan.up.rows == plan.down.rows
        match plan.how:
            case How.VECTOR:
                assert plan.up.rows == 1
                assert 128 % plan.up.columns == 0
                assert cell.tokens <= 16
            case How.WIDE:
                assert plan.up.rows == WIDE_ROWS
            case How.STREAM:
                assert plan.up.stages * streamed(plan, is_fp8=is_fp8) * plan.up.group < LIMITS.shared
                assert plan.up.stages > 1
                assert plan.down.columns == 128 or not cell.layer.hidden % plan.down.columns
            case How.WALK | How.SORTED:
                assert plan.how is How.SORTED or cell.routes <= MOST_WALKED
                assert staged(plan.up, size, 2) <= LIMITS.shared
                assert staged(plan.down, size, 1) <= LIMITS.shared
                if is_fp8:
                    assert plan.up.depth == plan.down.depth == 128
                    assert plan.up.columns <= 128
                    assert cell.layer.inter % plan.up.columns == cell.layer.hidden % plan.down.columns == 0


@per_cell
def test_every_tile_of_a_family_is_in_a_plan(cell: Cell) -> None:
    for family in families(cell, LIMITS):
        assert {plan.up for plan in family.plans()} == set(family.ups)
        assert {plan.down for plan in family.plans()} == set(family.downs)


def test_a_device_with_less_shared_memory_is_tried_with_less() -> None:
    cell = Cell(QWEN, 128, 64, "uniform")
    small = attrs.evolve(LIMITS, shared=64 * 1024)
    by_tiles, all_by_tiles = ([plan for plan in plans(cell, limits) if plan.how in (How.WALK, How.SORTED)] for limits in (small, LIMITS))
    assert {plan.up for plan in by_tiles} < {plan.up for plan in all_by_tiles}
    assert {plan.down for plan in by_tiles} < {plan.down for plan in all_by_tiles}
    assert all(staged(plan.up, 2, 2) <= small.shared for plan in by_tiles)
    by_streaming = [plan for plan in plans(cell, small) if plan.how is How.STREAM]
    assert all(plan.up.stages * streamed(plan, is_fp8=False) * plan.up.group < small.shared for plan in by_streaming)


def test_the_streaming_kernel_is_tried_where_it_runs_and_takes_the_layer() -> None:
    def hows(layer: LayerKey, limits: Limits = LIMITS, tokens: int = 64) -> set[How]:
        return {family.how for family in families(Cell(layer, layer.experts, tokens, "uniform"), limits)}

    assert How.STREAM in hows(QWEN)
    assert How.STREAM not in hows(QWEN, attrs.evolve(LIMITS, capability=(8, 0)))
    assert How.STREAM not in hows(attrs.evolve(QWEN, hidden=2016))
    assert How.STREAM not in hows(QWEN, tokens=4096)


def test_the_wide_kernel_is_tried_where_it_runs_and_takes_the_layer() -> None:
    def hows(layer: LayerKey, limits: Limits) -> set[How]:
        return {family.how for family in families(Cell(layer, layer.experts, 4096, "uniform"), limits)}

    assert How.WIDE in hows(QWEN, LIMITS)
    assert How.WIDE not in hows(QWEN, attrs.evolve(LIMITS, capability=(8, 0)))
    assert How.WIDE not in hows(attrs.evolve(QWEN, hidden=2016), LIMITS)


@per_cell
def test_the_sums_of_a_tile_leave_registers_for_the_rest(cell: Cell) -> None:
    part = 1 if cell.layer.format == "fp8" else 0  # beside the sums of an fp8 tile are those of one step
    for plan in plans(cell):
        if plan.how in (How.WALK, How.SORTED):
            assert plan.up.rows * plan.up.columns * (2 + part) / (32 * plan.up.warps) <= 160
            assert plan.down.rows * plan.down.columns * (1 + part) / (32 * plan.down.warps) <= 160


def test_the_wide_kernel_is_not_tried_where_its_blocks_are_padding_for_the_most_part() -> None:
    def hows(tokens: int) -> set[How]:
        return {family.how for family in families(Cell(QWEN, 128, tokens, "uniform"), LIMITS)}

    assert How.WIDE not in hows(24 * 128 // 8)
    assert How.WIDE in hows(24 * 128 // 8 + 1)


@per_cell
def test_every_warp_of_a_tile_has_columns(cell: Cell) -> None:
    for plan in plans(cell):
        if plan.how in (How.WALK, How.SORTED):
            assert 2 * plan.up.columns >= 16 * plan.up.warps
            assert plan.down.columns >= 16 * plan.down.warps


def test_heights_follow_the_routes_an_expert_of_all_ranks() -> None:
    here = attrs.evolve(QWEN, experts=16)
    apart = families(Cell(here, 128, 512, "uniform"), LIMITS)
    alone = families(Cell(here, 16, 512, "uniform"), LIMITS)
    assert {family.ups[0].rows for family in apart} == {32, 64, WIDE_ROWS}
    assert {family.ups[0].rows for family in alone} == {64, WIDE_ROWS}


def test_quantised_and_other_rows_between_the_products_are_not_mixed() -> None:
    for family in families(Cell(attrs.evolve(QWEN, format="fp8"), 128, 64, "uniform"), LIMITS):
        tiled = family.how in (How.WALK, How.SORTED)
        assert not tiled or len({up.columns == 128 for up in family.ups}) == 1

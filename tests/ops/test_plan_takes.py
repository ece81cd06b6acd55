"""What the kernels take of a plan: what is measured and made by rule, and nothing that they would make wrong results or faults of."""

import json
from pathlib import Path

import pytest
import torch

from moe_typed.ops.product_plans.choose import Layer, Plans
from moe_typed.ops.product_plans.files import LayerKey, Place, TunedLayer, TunedPlan, file_name, source_of
from moe_typed.ops.product_plans.spec import How, Plan, Tile
from moe_typed.ops.product_plans.takes import fault_of
from moe_typed.tuning import Cell, families
from tests.tuning.support import LIMITS

TOKENS = (0, 1, 2, 3, 8, 64, 300, 5000)
TILED = Tile(16, 64, 128, 4, 3)
STREAMED = Tile(8, 64, 128, 4, 5, 2)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize(("hidden", "inter"), [(1024, 512), (2944, 2944), (640, 384)])
def test_plans_by_rule_are_taken(dtype: torch.dtype, wide: bool, hidden: int, inter: int) -> None:
    plans = Plans(Layer(dtype, 8, hidden, inter, interleaved=False), wide, {})
    for tokens in TOKENS:
        assert fault_of(plans.choose(tokens, 2), is_fp8=dtype == torch.float8_e4m3fn, hidden=hidden, inter=inter) is None


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [1, 8, 64, 512, 4096])
def test_plans_that_tuning_tries_are_taken(fmt: str, tokens: int) -> None:
    key = LayerKey(fmt, 8, 2, 640, 384)
    for family in families(Cell(key, 8, tokens, "uniform"), LIMITS):
        for plan in family.plans():
            assert fault_of(plan, is_fp8=fmt == "fp8", hidden=key.hidden, inter=key.inter) is None


def refused(fmt: str, plan: Plan) -> str:
    fault = fault_of(plan, is_fp8=fmt == "fp8", hidden=384, inter=256)
    assert fault is not None
    return fault


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
@pytest.mark.parametrize(
    ("how", "up", "down", "message"),
    [
        (How.SORTED, TILED, TILED._replace(rows=32), "same sorted blocks; got 16 rows and 32"),
        (How.SORTED, TILED._replace(rows=48), TILED._replace(rows=48), "of the first product are powers of two from 16 on; got [48,"),
        (How.SORTED, TILED._replace(rows=8), TILED._replace(rows=8), "from 16 on; got [8,"),
        (How.WALK, TILED, TILED._replace(columns=96), "of the second product are powers of two from 16 on"),
        (How.WALK, TILED._replace(depth=100), TILED, "of the first product are powers of two from 16 on"),
        (How.SORTED, TILED._replace(warps=3), TILED, "warps of the first product are a power of two up to 32; got 3"),
        (How.SORTED, TILED, TILED._replace(warps=64), "warps of the second product are a power of two up to 32; got 64"),
        (How.VECTOR, Tile(1, 6, 256, 4, 1), Tile(1, 8, 256, 4, 1), "of the first product are powers of two from 1 on; got [1, 6,"),
        (How.VECTOR, Tile(1, 8, 256, 4, 1), Tile(1, 8, 250, 4, 1), "of the second product are powers of two from 1 on; got [1, 8, 250,"),
        (How.STREAM, STREAMED._replace(rows=24), STREAMED._replace(columns=128), "rows of (8, 16, 32, 64)"),
        (How.STREAM, STREAMED._replace(group=3), STREAMED._replace(columns=128), "programs of (1, 2); got 8 and 3"),
        (How.STREAM, STREAMED, STREAMED, "pieces of 64 columns are no multiple of 128"),
        (How.STREAM, STREAMED, STREAMED._replace(columns=256), "that divides hidden = 384"),
    ],
)
def test_what_no_kernel_takes_is_refused(fmt: str, how: How, up: Tile, down: Tile, message: str) -> None:
    assert message in refused(fmt, Plan(how, up, down))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(How.SORTED, TILED._replace(depth=64), TILED), "the depth of fp8 is the group of scales, 128; got 64 and 128"),
        (Plan(How.SORTED, TILED, TILED._replace(depth=256)), "got 128 and 256"),
        (Plan(How.WALK, TILED._replace(columns=256), TILED), "at most 128 pairs; got 256"),
        (Plan(How.SORTED, TILED, TILED._replace(columns=256)), "must divide inter = 256 and hidden = 384; got 64 and 256"),
        (Plan(How.VECTOR, Tile(1, 128, 256, 4, 1), Tile(1, 8, 256, 4, 1)), "at most 64 pairs and 128; got 128 and 8"),
        (Plan(How.VECTOR, Tile(1, 64, 256, 4, 1), Tile(1, 256, 256, 4, 1)), "at most 64 pairs and 128; got 64 and 256"),
    ],
)
def test_what_cuts_groups_of_scales_is_refused_for_fp8_alone(plan: Plan, message: str) -> None:
    assert message in refused("fp8", plan)
    assert fault_of(plan, is_fp8=False, hidden=384, inter=256) is None


def test_a_streaming_kernel_takes_pieces_of_128_columns_whatever_the_width() -> None:
    assert fault_of(Plan(How.STREAM, STREAMED, STREAMED._replace(columns=128)), is_fp8=False, hidden=320, inter=192) is None


def test_products_that_look_for_their_own_routes_may_differ_in_height() -> None:
    assert fault_of(Plan(How.WALK, TILED, TILED._replace(rows=32)), is_fp8=False, hidden=384, inter=256) is None


def test_a_file_says_at_which_layer_and_number_a_plan_is_refused(tmp_path: Path) -> None:
    sizes = {"format": "bf16", "experts": 8, "top_k": 2, "hidden": 384, "inter": 256}
    plan = {"tokens": 8, "how": "sorted", "up": [*TILED], "down": [*TILED._replace(rows=32)]}
    (tmp_path / file_name("Mine")).write_text(json.dumps({"device": "Mine", "capability": [9, 0], "layers": [{**sizes, "plans": [plan]}]}))
    with pytest.raises(ValueError, match=r"Mine\.json is not a file of tuned plans: .*hidden 384, inter 256, at 8 tokens: both products go through"):
        source_of(Place("Mine", (9, 0), tmp_path), LayerKey("bf16", 8, 2, 384, 256))


@pytest.mark.parametrize("size", [True, 2**31, 1.5, 0, -8, "8"])
def test_a_tile_has_whole_numbers_that_fit_32_bits(tmp_path: Path, size: object) -> None:
    tile = [16, 64, 128, 4, size]
    plan = {"tokens": 8, "how": "sorted", "up": tile, "down": [*TILED]}
    layer = {"format": "bf16", "experts": 8, "top_k": 2, "hidden": 384, "inter": 256, "plans": [plan]}
    (tmp_path / file_name("Mine")).write_text(json.dumps({"device": "Mine", "capability": [9, 0], "layers": [layer]}))
    with pytest.raises(ValueError, match=r"a tile is .*, whole numbers from 1 on"):
        source_of(Place("Mine", (9, 0), tmp_path), LayerKey("bf16", 8, 2, 384, 256))


def test_nesting_beyond_what_python_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / file_name("Mine")).write_text("[" * 200_000)
    with pytest.raises(ValueError, match="is not a file of tuned plans"):
        source_of(Place("Mine", (9, 0), tmp_path), LayerKey("bf16", 8, 2, 384, 256))


def test_a_layer_made_in_code_is_checked_as_one_that_is_read() -> None:
    with pytest.raises(ValueError, match="at 8 tokens: both products"):
        TunedLayer("bf16", 8, 2, 384, 256, (TunedPlan(8, How.SORTED, TILED, TILED._replace(rows=64)),))

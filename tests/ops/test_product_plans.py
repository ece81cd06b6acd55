import json
from pathlib import Path

import pytest
import torch

from moe_typed.ops import product_plans
from moe_typed.ops.product_plans.choose import Layer, Plans, plans_at, plans_for, wide_takes
from moe_typed.ops.product_plans.files import Place
from moe_typed.ops.product_plans.spec import MOST_WALKED, How, Plan, Tile

CPU = torch.device("cpu")
TUNED = sorted((Path(product_plans.__file__).parent / "tuned").glob("*.json"))


def layer(dtype: torch.dtype = torch.bfloat16, experts: int = 8, hidden: int = 256, inter: int = 128, *, interleaved: bool = False) -> Layer:
    return Layer(dtype, experts, hidden, inter, interleaved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn])
@pytest.mark.parametrize("tokens", [0, 1, 8, 64, 300, 5000])
def test_a_device_without_measurements_gets_a_plan_by_rule(dtype: torch.dtype, tokens: int) -> None:
    plan = plans_for(CPU, layer(dtype)).choose(tokens, 2)
    assert plan.how is not How.WIDE
    assert plan.how is not How.WALK or tokens * 2 <= MOST_WALKED
    assert plan.how is How.VECTOR or plan.up.rows == plan.down.rows >= 16


def test_single_routes_are_multiplied_by_tiles_for_as_many_tokens_as_there_are() -> None:
    plans = Plans(layer(), True, {})
    assert [plans.by_tiles(tokens, 2).how for tokens in (0, 1, 2, 64, 65)] == [How.WALK] * 4 + [How.SORTED]
    assert plans.by_tiles(5000, 2) == plans.without_wide().choose(5000, 2)


def test_what_the_wide_kernel_takes() -> None:
    fp8 = torch.float8_e4m3fn
    taken = [layer(), layer(interleaved=True), layer(torch.float16, hidden=320, inter=64), layer(fp8)]
    refused = [layer(torch.float32), layer(hidden=288), layer(inter=96), layer(fp8, hidden=384), layer(fp8, interleaved=True)]
    assert all(wide_takes(one) for one in taken)
    assert not any(wide_takes(one) for one in refused)


def test_few_rows_an_expert_are_streamed_where_the_kernel_runs() -> None:
    plans = Plans(layer(), True, {})
    assert [plans.choose(tokens, 2).how for tokens in (2, 3, 64, 65)] == [How.VECTOR, How.STREAM, How.STREAM, How.SORTED]
    assert plans.choose(8, 2).up.rows == 8  # an expert has no more rows than there are tokens
    assert plans.choose(9, 2).up.rows > 8
    assert plans.without_wide().choose(64, 2).how is How.WALK
    assert Plans(layer(interleaved=True), True, {}).choose(64, 2).how is How.WALK
    for inter, hidden, columns in [(256, 1024, 512), (256, 640, 128), (640, 1024, 128)]:
        assert Plans(layer(inter=inter, hidden=hidden), True, {}).choose(8, 2).down.columns == columns


def test_a_measured_plan_for_the_streaming_kernel_is_not_taken_where_that_does_not_run() -> None:
    tile = Tile(8, 64, 128, 4, 11)
    tuned: dict[int, tuple[tuple[int, Plan], ...]] = {2: ((8, Plan(How.STREAM, tile, tile)),)}
    assert Plans(layer(), True, tuned).choose(1, 2).up == tile
    for other in (Plans(layer(), False, tuned), Plans(layer(interleaved=True), True, tuned)):
        assert other.choose(1, 2) == other.by_rule(1, 2)


def test_no_more_routes_are_walked_through_than_that_is_of_use() -> None:
    tile = Tile(16, 32, 128, 4, 4)
    tuned: dict[int, tuple[tuple[int, Plan], ...]] = {2: ((10**6, Plan(How.WALK, tile, tile)),)}
    known, most = Plans(layer(), False, tuned), MOST_WALKED // 2
    assert known.choose(most, 2).up == tile
    assert known.choose(most + 1, 2) == known.by_rule(most + 1, 2)
    by_rule = Plans(layer(experts=64), False, {})
    assert [by_rule.choose(tokens, 2).how for tokens in (MOST_WALKED // 8, MOST_WALKED // 8 + 1)] == [How.WALK, How.SORTED]


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_kernels_for_compute_capability_9_are_planned_there_alone(tmp_path: Path, capability: tuple[int, int]) -> None:
    assert plans_at(Place("Mine", (9, 0), tmp_path), layer()).wide
    assert not plans_at(Place("Mine", capability, tmp_path), layer()).wide


def test_many_rows_an_expert_go_to_the_wide_kernel_where_it_runs() -> None:
    plans = Plans(layer(), True, {})
    assert plans.choose(5000, 2).how is How.WIDE
    assert plans.without_wide().choose(5000, 2).how is How.SORTED


def test_the_nearest_number_of_tokens_is_taken_by_ratio(tmp_path: Path) -> None:
    tile = [16, 32, 128, 4, 4, 1]
    plans = [
        {"tokens": tokens, "how": how, "up": tile, "down": tile} for tokens, how in [(1, "vector"), (16, "walk"), (400, "sorted"), (900, "wide")]
    ]
    sizes = {"format": "bf16", "experts": 8, "top_k": 2, "hidden": 256, "inter": 128}
    path = tmp_path / "device.json"
    path.write_text(json.dumps([{**sizes, "plans": plans}, {**sizes, "experts": 9, "plans": plans[:1]}]))
    known = plans_at(Place("device", (9, 0), tmp_path), layer())
    expected = {1: How.VECTOR, 4: How.VECTOR, 5: How.WALK, 80: How.WALK, 81: How.SORTED, 600: How.SORTED, 601: How.WIDE, 10**6: How.WIDE}
    assert {tokens: known.choose(tokens, 2).how for tokens in expected} == expected
    assert known.choose(4, 1) == Plans(layer(), True, {}).choose(4, 1)
    narrow = plans_at(Place("device", (8, 0), tmp_path), layer())
    assert narrow.choose(10**6, 2) == Plans(layer(), False, {}).choose(10**6, 2)


SHARED_BYTES = 228 * 1024  # of a multiprocessor of compute capability 9.0, of which each program takes a KiB more than it says


def stream_bytes(plan: Plan, *, fp8: bool) -> int:
    """Return what the stages of the streaming kernel take: 128 rows of weights, rows (for fp8 twice as many, and scales), and two barriers."""
    return plan.up.stages * (128 * 128 + plan.up.rows * (2 * 128 + 16 if fp8 else 128) + 16) + 1024


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("tokens", [3, 9, 64])
def test_stages_of_a_streaming_plan_by_rule_fit(tokens: int, fp8: bool) -> None:
    plan = Plans(layer(torch.float8_e4m3fn if fp8 else torch.bfloat16), True, {}).choose(tokens, 2)
    assert plan.how is How.STREAM
    assert SHARED_BYTES * 3 // 4 < stream_bytes(plan, fp8=fp8) <= SHARED_BYTES


@pytest.mark.parametrize("path", TUNED, ids=[path.stem for path in TUNED])
def test_measured_plans_are_ones_that_the_kernels_take(path: Path) -> None:
    for entry in json.loads(path.read_text()):
        dtype = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}[entry["format"]]
        known = Layer(dtype, entry["experts"], entry["hidden"], entry["inter"], interleaved=False)
        tokens = [plan["tokens"] for plan in entry["plans"]]
        assert tokens == sorted(set(tokens))
        for one in entry["plans"]:
            plan = Plan(How(one["how"]), Tile(*one["up"]), Tile(*one["down"]))
            assert plan.up.rows == plan.down.rows
            assert plan.how is not How.WALK or one["tokens"] * entry["top_k"] <= MOST_WALKED
            assert plan.how not in (How.WIDE, How.STREAM) or wide_takes(known)
            if plan.how is How.STREAM:
                assert plan.up.rows in (8, 16, 32, 64)
                assert plan.down.columns == 128 or not (plan.down.columns % 128 or entry["hidden"] % plan.down.columns)
                assert stream_bytes(plan, fp8=entry["format"] == "fp8") * plan.up.group <= SHARED_BYTES
            if entry["format"] == "fp8" and plan.how in (How.WALK, How.SORTED):
                assert plan.up.depth == plan.down.depth == 128
                assert plan.up.columns <= 128

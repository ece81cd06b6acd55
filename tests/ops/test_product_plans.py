import json
from pathlib import Path

import pytest
import torch

from moe_typed.ops import product_plans
from moe_typed.ops.product_plans.choose import Layer, Plans, measured, plans_for, wide_takes
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


def test_a_plan_for_fp8_by_rule_quantises_where_it_has_tiles() -> None:
    plans = [plans_for(CPU, layer(torch.float8_e4m3fn)).choose(tokens, 2) for tokens in (1, 8, 5000)]
    assert [plan.quantises() for plan in plans] == [False, True, True]


def test_what_the_wide_kernel_takes() -> None:
    fp8 = torch.float8_e4m3fn
    taken = [layer(), layer(interleaved=True), layer(torch.float16, hidden=320, inter=64), layer(fp8)]
    refused = [layer(torch.float32), layer(hidden=288), layer(inter=96), layer(fp8, hidden=384), layer(fp8, interleaved=True)]
    assert all(wide_takes(one) for one in taken)
    assert not any(wide_takes(one) for one in refused)


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
    known = Plans(layer(), True, measured(path, layer(), wide=True))
    expected = {1: How.VECTOR, 4: How.VECTOR, 5: How.WALK, 80: How.WALK, 81: How.SORTED, 600: How.SORTED, 601: How.WIDE, 10**6: How.WIDE}
    assert {tokens: known.choose(tokens, 2).how for tokens in expected} == expected
    assert known.choose(4, 1) == Plans(layer(), True, {}).choose(4, 1)
    narrow = Plans(layer(), False, measured(path, layer(), wide=False))
    assert narrow.choose(10**6, 2) == Plans(layer(), False, {}).choose(10**6, 2)


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
            assert plan.how is not How.WIDE or wide_takes(known)
            if entry["format"] == "fp8" and plan.how in (How.WALK, How.SORTED):
                assert plan.up.depth == plan.down.depth == 128
                assert plan.up.columns <= 128

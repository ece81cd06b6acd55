"""Where the plans of a layer come from: this device before another of its capability, a named directory before the shipped one, a rule at last."""

import json
from pathlib import Path

import pytest
import torch

from moe_typed.ops.product_plans.choose import Layer, Plans, plans_at, plans_for
from moe_typed.ops.product_plans.files import SHIPPED, VARIABLE, LayerKey, Origin, Place, named_directory, read_tuned, source_of
from moe_typed.ops.product_plans.spec import How, Plan, Tile

TILE = Tile(16, 32, 128, 4, 4, 1)
KEY = LayerKey("bf16", 8, 2, 256, 128)
LAYER = Layer(torch.bfloat16, 8, 256, 128, interleaved=False)
H200 = Place("NVIDIA H200", (9, 0))
SHIPPED_KEY = read_tuned(SHIPPED / "NVIDIA_H200.json").layers[0].key


def write(directory: Path, device: str, columns: int, *, key: LayerKey = KEY, capability: tuple[int, int] = (9, 0), how: str = "sorted") -> Path:
    """Write a file with one plan, which its number of columns tells from others."""
    sizes = {"format": key.format, "experts": key.experts, "top_k": key.top_k, "hidden": key.hidden, "inter": key.inter}
    plan = {"tokens": 8, "how": how, "up": [*TILE._replace(columns=columns)], "down": [*TILE]}
    directory.mkdir(exist_ok=True)
    path = directory / f"{device.replace(' ', '_')}.json"
    path.write_text(json.dumps({"device": device, "capability": capability, "layers": [{**sizes, "plans": [plan]}]}))
    return path


def columns(place: Place, layer: Layer = LAYER, top_k: int = 2) -> int | None:
    """Return by how many columns the plan is known; None for a plan by rule."""
    plans = plans_at(place, layer)
    plan = plans.choose(8, top_k)
    return None if plan == plans.by_rule(8, top_k) else plan.up.columns


def test_the_named_directory_comes_before_the_shipped_one(tmp_path: Path) -> None:
    path = write(tmp_path, "NVIDIA H200", 256, key=SHIPPED_KEY)
    place = Place(H200.device, H200.capability, tmp_path)
    assert source_of(place, SHIPPED_KEY).file == str(path)
    assert source_of(H200, SHIPPED_KEY).file == str(SHIPPED / "NVIDIA_H200.json")
    layer = Layer(torch.bfloat16, SHIPPED_KEY.experts, SHIPPED_KEY.hidden, SHIPPED_KEY.inter, interleaved=False)
    assert columns(place, layer, SHIPPED_KEY.top_k) == 256


def test_a_layer_that_the_named_file_lacks_is_looked_up_in_the_shipped_one(tmp_path: Path) -> None:
    write(tmp_path, "NVIDIA H200", 256)
    source = source_of(Place(H200.device, H200.capability, tmp_path), SHIPPED_KEY)
    assert (source.origin, source.file) == (Origin.DEVICE, str(SHIPPED / "NVIDIA_H200.json"))


def test_this_device_comes_before_another_of_its_capability(tmp_path: Path) -> None:
    write(tmp_path, "AA Other", 64)
    write(tmp_path, "ZZ Other", 128)
    write(tmp_path, "Elder", 16, capability=(8, 0))
    place = Place("Mine", (9, 0), tmp_path)
    assert (columns(place), source_of(place, KEY).origin) == (64, Origin.CAPABILITY)
    write(tmp_path, "Mine", 256)
    assert (columns(place), source_of(place, KEY).origin) == (256, Origin.DEVICE)
    assert columns(Place("Mine", (8, 0), tmp_path)) == 256


def test_each_top_k_is_looked_up_by_itself(tmp_path: Path) -> None:
    write(tmp_path, "Mine", 256)
    write(tmp_path, "Other", 64, key=LayerKey("bf16", 8, 4, 256, 128))
    plans = plans_at(Place("Mine", (9, 0), tmp_path), LAYER)
    assert [plans.source(top_k).origin for top_k in (2, 4, 1)] == [Origin.DEVICE, Origin.CAPABILITY, Origin.RULE]
    assert [plans.choose(8, top_k).up.columns for top_k in (2, 4)] == [256, 64]
    assert "measured for top 2 and 4 alone" in str(plans.source(1))


@pytest.mark.parametrize(
    "other",
    [
        Layer(torch.bfloat16, 9, 256, 128, interleaved=False),
        Layer(torch.bfloat16, 8, 512, 128, interleaved=False),
        Layer(torch.bfloat16, 8, 256, 256, interleaved=False),
        Layer(torch.float8_e4m3fn, 8, 256, 128, interleaved=False),
        Layer(torch.float32, 8, 256, 128, interleaved=False),
    ],
)
def test_another_layer_is_planned_by_rule_and_the_source_says_why(tmp_path: Path, other: Layer) -> None:
    path = write(tmp_path, "Mine", 256)
    plans = plans_at(Place("Mine", (9, 0), tmp_path), other)
    assert plans.choose(8, 2) == plans.by_rule(8, 2)
    source = plans.source(2)
    assert (source.origin, source.file) == (Origin.RULE, "")
    assert str(source).count("float32" if other.dtype == torch.float32 else str(path)) == 1


def test_fp16_takes_the_plans_of_bf16(tmp_path: Path) -> None:
    write(tmp_path, "Mine", 256)
    assert columns(Place("Mine", (9, 0), tmp_path), LAYER._replace(dtype=torch.float16)) == 256


def test_a_plan_for_a_kernel_that_does_not_run_is_no_plan(tmp_path: Path) -> None:
    write(tmp_path, "Mine", 256, capability=(8, 0), how="wide")
    plans = plans_at(Place("Mine", (8, 0), tmp_path), LAYER)
    assert plans.choose(8, 2).how is not How.WIDE
    assert plans.source(2).origin is Origin.RULE


def test_without_any_file_the_source_names_device_and_capability(tmp_path: Path) -> None:
    source = source_of(Place("Mine", (7, 5), tmp_path), KEY)
    assert source.origin is Origin.RULE
    for fragment in ("by rule, since", "Mine", "7.5", "moe-typed tune"):
        assert fragment in str(source)


def test_a_foreign_file_of_the_device_is_refused_when_plans_are_made(tmp_path: Path) -> None:
    write(tmp_path, "Mine", 256).write_text("{")
    with pytest.raises(ValueError, match=r"Mine\.json is not a file of tuned plans"):
        plans_at(Place("Mine", (9, 0), tmp_path), LAYER)


def test_the_environment_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert named_directory() is None
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert named_directory() == tmp_path
    monkeypatch.setenv(VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"MOE_TYPED_TUNED names .*gone, which is no directory"):
        named_directory()


def test_plans_say_that_they_are_made_by_rule_where_nothing_is_measured() -> None:
    assert "NVIDIA GPUs alone" in str(plans_for(torch.device("cpu"), LAYER).source(2))
    assert "cannot copy" in str(Plans(LAYER, True, {}).without_wide().source(2))


def test_a_file_in_the_shipped_form_is_named_by_its_device() -> None:
    file = read_tuned(SHIPPED / "NVIDIA_H200.json")
    assert (file.device, file.capability) == ("NVIDIA H200", (9, 0))
    assert isinstance(file.layers[0].plans[0].plan, Plan)

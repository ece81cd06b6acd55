"""Files of tuned plans: what is written can be read, nothing is lost, and what is not ours is refused with a reason."""

import json
import multiprocessing
from pathlib import Path

import attrs
import pytest

from moe_typed.ops.product_plans.files import SHIPPED, Conditions, TunedPlan, file_name, read_tuned
from moe_typed.ops.product_plans.spec import How, Tile
from moe_typed.tuning import Store
from moe_typed.tuning.journal import Journal
from moe_typed.tuning.store import replace
from tests.tuning.support import LAYER, cell

DEVICE, CAPABILITY = "Test GPU", (9, 0)
CONDITIONS = Conditions(DEVICE, "2.11.0", "3.6.0", "0.1.0", "0123", "uniform", "4567")
TILE = Tile(16, 32, 128, 4, 4, 1)
OTHER = attrs.evolve(LAYER, experts=32)


def tuned(tokens: int, us: float = 12.5) -> TunedPlan:
    return TunedPlan(tokens, How.WALK, TILE, TILE._replace(columns=64), us, CONDITIONS)


def store(directory: Path) -> Store:
    return Store(directory, DEVICE, CAPABILITY)


def test_what_is_put_is_read_and_layers_and_numbers_ascend(tmp_path: Path) -> None:
    where = tmp_path / "new" / "folder"
    for key, tokens in ((OTHER, 8), (LAYER, 64), (LAYER, 1), (LAYER, 8)):
        store(where).put(key, tuned(tokens))
    found = read_tuned(where / "Test_GPU.json")
    assert (found.device, found.capability) == (DEVICE, CAPABILITY)
    assert [(layer.key, [plan.tokens for plan in layer.plans]) for layer in found.layers] == [(LAYER, [1, 8, 64]), (OTHER, [8])]
    assert found.layers[1].plans == (tuned(8),)


def test_a_plan_replaces_the_one_at_its_number_alone(tmp_path: Path) -> None:
    for plan in (tuned(1), tuned(8), tuned(8, us=3.0)):
        store(tmp_path).put(LAYER, plan)
    assert store(tmp_path).read().layers[0].plans == (tuned(1), tuned(8, us=3.0))
    store(tmp_path).forget(LAYER, 8)
    assert store(tmp_path).plan_of(LAYER, 8) is None
    store(tmp_path).forget(LAYER, 1)
    assert store(tmp_path).read().layers == ()


def test_the_shipped_form_is_kept_when_something_is_added(tmp_path: Path) -> None:
    shipped = SHIPPED / "NVIDIA_H200.json"
    (tmp_path / shipped.name).write_text(shipped.read_text())
    Store(tmp_path, "NVIDIA H200", CAPABILITY).put(LAYER, tuned(8))
    before, after = ({layer.key: layer for layer in read_tuned(path).layers} for path in (shipped, tmp_path / shipped.name))
    assert before == {key: layer for key, layer in after.items() if key != LAYER}


def put_some(directory: Path, experts: int) -> None:
    for tokens in range(1, 11):
        store(directory).put(attrs.evolve(LAYER, experts=experts), tuned(tokens))


def test_processes_that_write_to_one_file_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=put_some, args=(tmp_path, experts)) for experts in (1, 2, 3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [(layer.experts, len(layer.plans)) for layer in store(tmp_path).read().layers] == [(1, 10), (2, 10), (3, 10)]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    replace(path, "old")
    with pytest.raises(UnicodeEncodeError):
        replace(path, "new" * 10**6 + "\ud800")  # fails when most of it is written
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


ENTRY = {"format": "bf16", "experts": 8, "top_k": 2, "hidden": 256, "inter": 128}
PLAN = {"tokens": 8, "how": "walk", "up": list(TILE), "down": list(TILE)}


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("", "Expecting value"),
        ('{"device": "Test GPU", "capab', "Unterminated string"),
        ("\ufffd\0", "Expecting value"),
        ('{"16": {"BLOCK_SIZE_M": 16}}', "16"),
        ("3", "not a file of tuned plans"),
        (json.dumps({"device": "Other GPU", "capability": [9, 0], "layers": []}), "belong into Other_GPU.json"),
        (json.dumps({"device": DEVICE, "capability": [8, 0], "layers": []}), "(8, 0)"),
        (json.dumps([{**ENTRY, "plans": []}]), "must ascend"),
        (json.dumps([{**ENTRY, "plans": [PLAN, PLAN]}]), "must ascend"),
        (json.dumps([{**ENTRY, "plans": [PLAN | {"how": "guess"}]}]), "how"),
        (json.dumps([{**ENTRY, "plans": [PLAN | {"up": [16, 32]}]}]), "up"),
        (json.dumps([{**ENTRY, "plans": [PLAN | {"up": [16, 32, 0, 4, 4, 1]}]}]), "up"),
        (json.dumps([{**ENTRY, "plans": [PLAN]}, {**ENTRY, "plans": [PLAN]}]), "twice"),
        (json.dumps([{**ENTRY, "plans": [PLAN], "extra": 1}]), "extra"),
    ],
)
def test_a_file_that_is_not_one_of_this_device_is_refused_and_left_alone(tmp_path: Path, text: str, fragment: str) -> None:
    path = tmp_path / file_name(DEVICE)
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Test_GPU\.json") as caught:
        store(tmp_path)
    assert fragment in str(caught.value)
    assert path.read_text() == text


def test_a_journal_is_read_again_and_only_under_the_same_conditions(tmp_path: Path) -> None:
    journal = Journal(tmp_path, cell(), CONDITIONS)
    plans = [tuned(8).plan, tuned(8).plan._replace(how=How.SORTED)]
    journal.add(plans[0], 3.5, "")
    journal.add(plans[1], None, "out of shared memory")
    again = Journal(tmp_path, cell(), CONDITIONS)
    assert [again.known(plan) for plan in plans] == [(3.5, ""), (None, "out of shared memory")]
    assert len(Journal(tmp_path, cell(tokens=9), CONDITIONS)) == 0
    assert len(Journal(tmp_path, cell(), attrs.evolve(CONDITIONS, triton="3.7.0"))) == 0
    assert len(Journal(tmp_path, cell(), CONDITIONS)) == 0


@pytest.mark.parametrize("kept", range(0, 400, 7))
def test_a_journal_that_was_cut_short_loses_one_line_at_most(tmp_path: Path, kept: int) -> None:
    plans = [tuned(8).plan._replace(up=TILE._replace(columns=columns)) for columns in (32, 64, 128)]
    journal = Journal(tmp_path, cell(), CONDITIONS)
    for plan in plans:
        journal.add(plan, 1.0, "")
    (path,) = tmp_path.rglob("*.jsonl")
    whole = path.read_text()
    path.write_text(whole[:kept])
    again = Journal(tmp_path, cell(), CONDITIONS)
    lines = whole[:kept].count("\n")
    assert max(0, lines - 1) <= len(again) <= lines
    for plan in plans:
        again.add(plan, 2.0, "")
    assert [Journal(tmp_path, cell(), CONDITIONS).known(plan) for plan in plans] == [(2.0, "")] * 3


def test_dropping_a_journal_leaves_no_folder(tmp_path: Path) -> None:
    journal = Journal(tmp_path, cell(), CONDITIONS)
    journal.add(tuned(8).plan, 1.0, "")
    journal.drop()
    assert list(tmp_path.iterdir()) == []

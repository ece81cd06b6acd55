"""The search: what wins, what is skipped, and that an interruption at any point loses nothing."""

from pathlib import Path

import attrs
import pytest

from moe_typed.ops.product_plans.files import LayerKey, Origin, Place, TunedFile, source_of
from moe_typed.ops.product_plans.spec import How, Plan
from moe_typed.runners import UnsupportedError
from moe_typed.tuning import Cell, Compiled, DeviceLostError, Machine, PlanFailed, Progress, Skipped, Started, Store, Tried, Tuned, families, tune
from moe_typed.tuning.search import decide, plans_so_far
from tests.tuning.support import LAYER, LIMITS, MACHINE, FakeMeasurer, by_size, cell, failing

CELLS = (cell(8), cell(700))


def store(directory: Path) -> Store:
    return Store(directory, MACHINE.device, LIMITS.capability)


def run(directory: Path, measurer: FakeMeasurer, *cells: Cell, again: bool = False) -> list[Progress]:
    return list(tune(cells or CELLS, measurer, store(directory), again=again))


def won(directory: Path, tokens: int, key: LayerKey = LAYER) -> Plan:
    plan = store(directory).plan_of(key, tokens)
    assert plan is not None
    return plan.plan


def test_the_fastest_tiles_of_both_products_win(tmp_path: Path) -> None:
    run(tmp_path, FakeMeasurer())
    for one in CELLS:
        tried = {Plan(family.how, up, down) for family in families(one, LIMITS) for up in family.ups for down in family.downs}
        assert by_size(won(tmp_path, one.tokens)) == min(map(by_size, tried))


def test_what_happens_is_told_in_order(tmp_path: Path) -> None:
    told = run(tmp_path, FakeMeasurer(), cell())
    kinds = list(dict.fromkeys(type(one) for one in told))
    assert kinds == [Started, Compiled, Tried, Tuned]
    tried = [one for one in told if isinstance(one, Tried)]
    assert [one.best for one in tried] == [min(by_size(before.plan) for before in tried[: number + 1]) for number in range(len(tried))]
    (started,), (tuned,) = ([one for one in told if isinstance(one, kind)] for kind in (Started, Tuned))
    assert isinstance(started, Started)
    assert isinstance(tuned, Tuned)
    assert tuned.tried == len(tried)
    assert tuned.failed == 0
    assert tuned.before_us == by_size(tuned.before)


def test_no_plan_is_measured_twice_before_the_finals_and_all_are_compiled_before(tmp_path: Path) -> None:
    measurer = FakeMeasurer()
    told = run(tmp_path, measurer, cell())
    tried = [one.plan for one in told if isinstance(one, Tried)]
    assert len(tried) == len(set(tried))
    assert measurer.timed[: len(tried)] == tried
    assert len(measurer.compiled) == len(set(measurer.compiled))
    assert {(plan.how, plan.up) for plan in measurer.timed} == {(plan.how, plan.up) for plan in measurer.compiled}
    assert {(plan.how, plan.down) for plan in measurer.timed} == {(plan.how, plan.down) for plan in measurer.compiled}
    finals = measurer.timed[len(tried) :]
    assert len(finals) == 5 * len(set(finals))
    assert finals[: len(set(finals))] == finals[len(set(finals)) : 2 * len(set(finals))][::-1], "no plan is always the first of a round"


def test_a_family_that_is_far_slower_is_left(tmp_path: Path) -> None:
    def slow_vectors(plan: Plan) -> float:
        return by_size(plan) * (10 if plan.how is How.VECTOR else 1)

    measurer = FakeMeasurer(slow_vectors)
    run(tmp_path, measurer, cell(tokens=1))
    vectors = {plan for plan in measurer.timed if plan.how is How.VECTOR}
    assert len(vectors) <= 2, "the plan by rule, and the first of the family"


def test_of_two_ways_to_find_routes_the_slower_is_tried_with_the_best_tiles_alone(tmp_path: Path) -> None:
    def sorting_wins_late(plan: Plan) -> float:
        first = plan.up == families(cell(), LIMITS)[1].ups[0] and plan.down == families(cell(), LIMITS)[1].downs[0]
        return by_size(plan) + (0.0 if plan.how is not How.SORTED or first else -20.0)

    measurer = FakeMeasurer(sorting_wins_late)
    run(tmp_path, measurer, cell())
    assert len({plan for plan in measurer.timed if plan.how is How.SORTED}) < len({plan for plan in measurer.timed if plan.how is How.WALK}) / 2
    assert won(tmp_path, 8).how is How.SORTED


def test_plans_that_fail_are_counted_and_do_not_win(tmp_path: Path) -> None:
    told = run(tmp_path, FakeMeasurer(failing(How.WALK, How.VECTOR)), cell())
    (tuned,) = (one for one in told if isinstance(one, Tuned))
    assert tuned.won.how is How.SORTED
    assert tuned.failed > 0
    assert {one.failure for one in told if isinstance(one, Tried) and one.us is None} == {"out of shared memory"}
    assert tuned.before.how is not How.WALK or tuned.before_us is None


def test_a_plan_that_fails_in_the_finals_does_not_win(tmp_path: Path) -> None:
    first = FakeMeasurer()
    (before,) = (one for one in run(tmp_path / "before", first, cell()) if isinstance(one, Tuned))

    def fails_later(plan: Plan) -> float:
        if plan == before.won.plan and later.timed.count(plan) > 1:
            raise PlanFailed("an error that comes and goes")
        return by_size(plan)

    later = FakeMeasurer(fails_later)
    (tuned,) = (one for one in run(tmp_path, later, cell()) if isinstance(one, Tuned))
    assert tuned.won.plan != before.won.plan
    assert (tuned.failed, before.failed) == (1, 0)


def test_where_rows_lie_by_expert_nothing_walks_or_goes_by_itself(tmp_path: Path) -> None:
    measurer = FakeMeasurer()
    run(tmp_path, measurer, attrs.evolve(cell(1), by_expert=True), attrs.evolve(cell(700), by_expert=True))
    assert {plan.how for plan in measurer.timed} == {How.SORTED, How.WIDE}


def test_where_nothing_runs_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no plan for bf16, 16 experts"):
        run(tmp_path, FakeMeasurer(failing(*How)), cell())
    assert store(tmp_path).read().layers == ()


def test_a_second_run_skips_what_was_measured_under_the_same_conditions(tmp_path: Path) -> None:
    run(tmp_path, FakeMeasurer())
    before = store(tmp_path).read()
    second = FakeMeasurer()
    assert [type(one) for one in run(tmp_path, second)] == [Skipped, Skipped]
    assert (second.timed, second.opened) == ([], [])
    assert store(tmp_path).read() == before


@pytest.mark.parametrize("changed", ["torch", "triton", "moe_typed", "kernels"])
def test_other_versions_or_kernels_are_measured_anew(tmp_path: Path, changed: str) -> None:
    run(tmp_path, FakeMeasurer(), cell())
    names = ("torch", "triton", "moe_typed", "kernels")
    versions = {name: "other" if name == changed else str(getattr(MACHINE, name)) for name in names}
    other = FakeMeasurer(machine=Machine(MACHINE.device, LIMITS, **versions))
    assert any(isinstance(one, Tuned) for one in run(tmp_path, other, cell()))
    (layer,) = store(tmp_path).read().layers
    assert len(layer.plans) == 1


@pytest.mark.parametrize(
    "other",
    [cell(load="zipf"), Cell(LAYER, 64, 8, "uniform")],
    ids=["another load", "more experts elsewhere"],
)
def test_another_draw_is_another_cell(tmp_path: Path, other: Cell) -> None:
    run(tmp_path, FakeMeasurer(), cell())
    assert any(isinstance(one, Tuned) for one in run(tmp_path, FakeMeasurer(), other))


def test_again_forgets_the_cells_that_are_named_and_no_others(tmp_path: Path) -> None:
    run(tmp_path, FakeMeasurer())
    kept = store(tmp_path).plan_of(LAYER, 700)
    told = run(tmp_path, FakeMeasurer(lambda plan: by_size(plan) + 1), cell(8), again=True)
    assert any(isinstance(one, Tuned) for one in told)
    assert store(tmp_path).plan_of(LAYER, 700) == kept


def test_an_interruption_at_any_call_loses_nothing(tmp_path: Path) -> None:
    alone = FakeMeasurer()
    run(tmp_path / "alone", alone)
    expected = store(tmp_path / "alone").read()
    for call in (*range(1, 20), *range(20, alone.calls, 11), alone.calls):
        where = tmp_path / str(call)
        with pytest.raises(KeyboardInterrupt):
            run(where, FakeMeasurer(interrupt=call))
        run(where, FakeMeasurer())
        assert store(where).read() == expected
        assert [path.name for path in where.iterdir()] == ["Test_GPU.json"], "no journal is left"


@pytest.mark.parametrize("again", [False, True])
def test_what_was_tried_before_an_interruption_is_not_tried_again(tmp_path: Path, again: bool) -> None:
    alone, first, second = FakeMeasurer(), FakeMeasurer(interrupt=150), FakeMeasurer()
    run(tmp_path, alone, cell())
    where = tmp_path if again else tmp_path / "other"
    with pytest.raises(KeyboardInterrupt):
        run(where, first, cell(), again=again)
    assert first.timed
    told = run(where, second, cell())
    (started,) = (one for one in told if isinstance(one, Started))
    assert started.known == len(first.timed)
    assert len(second.timed) == len(alone.timed) - len(first.timed)
    assert not set(first.timed) & set(second.compiled)


def test_a_plan_that_took_the_device_down_is_not_run_again(tmp_path: Path) -> None:
    culprit = families(cell(), LIMITS)[0].plans()[5]

    def lost(plan: Plan) -> float:
        if plan == culprit:
            raise DeviceLostError(plan, "an illegal memory access was encountered")
        return by_size(plan)

    with pytest.raises(DeviceLostError, match="illegal memory access"):
        run(tmp_path, FakeMeasurer(lost), cell())
    (tuned,) = (one for one in run(tmp_path, FakeMeasurer(lost), cell()) if isinstance(one, Tuned))
    assert tuned.failed == 1


def test_the_plan_so_far_stays_unless_another_is_clearly_faster() -> None:
    used, other, third = (Plan(how, *families(cell(), LIMITS)[1].plans()[0][1:]) for how in (How.WALK, How.SORTED, How.VECTOR))
    noise = {used: [10.0, 10.2, 10.4, 10.1, 10.3], other: [10.1, 9.9, 10.3, 10.0, 10.2]}
    assert decide(used, noise) == used
    assert decide(used, {**noise, other: [9.0, 9.1, 20.0, 9.2, 9.1]}) == other, "one bad round does not matter"
    assert decide(used, {other: [3.0] * 5, third: [2.0] * 5}) == third, "a plan that does not run does not stay"
    assert decide(used, {used: [1.0] * 5, other: [2.0] * 5}) == used


def test_the_plan_so_far_is_that_of_the_file_and_takes_part(tmp_path: Path) -> None:
    run(tmp_path, FakeMeasurer(), cell())
    used, by_rule = plans_so_far(cell(), MACHINE, store(tmp_path))
    assert used == won(tmp_path, 8)
    measurer = FakeMeasurer(machine=attrs.evolve(MACHINE, kernels="9999"))
    run(tmp_path, measurer, cell())
    assert measurer.timed[:2] == [used, by_rule]
    assert used in measurer.timed[-6:]


def test_what_is_written_is_what_layers_look_up(tmp_path: Path) -> None:
    run(tmp_path, FakeMeasurer())
    source = source_of(Place(MACHINE.device, LIMITS.capability, tmp_path), LAYER)
    assert source.origin is Origin.DEVICE
    assert "Triton 3.6.0" in source.detail
    assert "at 8, 700 tokens" in source.detail
    assert isinstance(store(tmp_path).read(), TunedFile)

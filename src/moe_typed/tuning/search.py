"""Find the fastest plans of cells, and keep what is found on disk.

Each family of plans is tried with its first tiles; those that are far slower than the best are left, and of two that differ in how routes are found,
the slower one. In the others every tile of the first product is tried beside one of the second, and then every tile of the second beside the best of
the first. The fastest of them are tried with routes found in the other way as well. The fastest plans of all, the plan that was used so far and the
plan by rule are then measured side by side, in turns; the one that was used so far stays unless another is clearly faster.
"""

import hashlib
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from statistics import median
from typing import Final, final

from ..ops.product_plans.choose import Layer, plans_at
from ..ops.product_plans.files import CONVERTER, Conditions, Place, TunedPlan
from ..ops.product_plans.spec import How, Plan
from ..runners import UnsupportedError
from .journal import Journal
from .measurer import CellMeasurer, DeviceLostError, Machine, Measurer, PlanFailed
from .progress import Compiled, Progress, Skipped, Started, Tried, Tuned
from .space import DTYPES, Cell, Family, families
from .store import Store

_METHOD: Final = 1  # goes up when plans are measured in another way, so that old times are not taken for new ones
_REPLAYS: Final = 7
_FAR: Final = 1.3  # times the best of the first tiles: a family beyond it is left
_FIRST_TRIES: Final = 3  # first tiles that may fail before a family is left
_FINALISTS: Final = 4
_TWINS: Final = {How.WALK: How.SORTED, How.SORTED: How.WALK}  # the same tiles, with routes found in the other way
_ROUNDS: Final = 5
_ROUND_REPLAYS: Final = 9


def tune(cells: Sequence[Cell], measurer: Measurer, store: Store, *, again: bool = False) -> Iterator[Progress]:
    """Tune cells one after the other, and yield what happens. A cell that is on disk, measured under the same conditions, is skipped.

    ``again``: forget first what is on disk of these cells. The iterator may be left, and its caller interrupted, at any time: what was measured is on
    disk, and the next call goes on from there. Raises: ValueError for files on disk that are not ours; UnsupportedError where no plan runs at all;
    DeviceLostError, after which another process goes on without the plan that did it.
    """
    machine = measurer.machine
    if again:
        for cell in cells:
            store.forget(cell.layer, cell.tokens)
            _journal(cell, machine, store).drop()
    for cell in cells:
        conditions, journal = conditions_of(cell, machine), _journal(cell, machine, store)
        known = store.plan_of(cell.layer, cell.tokens)
        if known is not None and known.measured == conditions:
            journal.drop()
            yield Skipped(cell, known)
            continue
        tried = families(cell, machine.limits)
        yield Started(cell, sum(len(family.plans()) for family in tried), len(journal))
        with measurer.open(cell) as bench:
            search = _Search(cell, bench, journal)
            used, by_rule = plans_so_far(cell, machine, store)
            others = [plan for plan in (used, by_rule) if cell.takes(plan.how)]
            yield from search.over(tried, others)
            rounds = search.side_by_side(others)
        won = decide(used, rounds)
        tuned = TunedPlan(cell.tokens, *won, round(median(rounds[won]), 2), conditions)
        store.put(cell.layer, tuned)
        journal.drop()
        before_us = median(rounds[used]) if used in rounds else None
        yield Tuned(cell, tuned, used, before_us, search.tried, search.failed)


def conditions_of(cell: Cell, machine: Machine) -> Conditions:
    """Return what a cell is measured with."""
    candidates = [_METHOD, cell.routed, cell.by_expert, CONVERTER.unstructure(families(cell, machine.limits))]
    digest = hashlib.sha256(json.dumps(candidates).encode()).hexdigest()[:12]
    return Conditions(machine.device, machine.torch, machine.triton, machine.moe_typed, machine.kernels, cell.load, digest)


def plans_so_far(cell: Cell, machine: Machine, store: Store) -> tuple[Plan, Plan]:
    """Return the plan that a layer would use with what is on disk, and the plan by rule."""
    key = cell.layer
    layer = Layer(DTYPES[key.format], key.experts, key.hidden, key.inter, interleaved=False)
    plans = plans_at(Place(machine.device, machine.limits.capability, store.directory), layer)
    return plans.choose(cell.tokens, key.top_k), plans.by_rule(cell.tokens, key.top_k)


def decide(used: Plan, rounds: Mapping[Plan, Sequence[float]]) -> Plan:
    """Return the plan with the lowest median; the one that is used so far, unless the middle rounds of the two lie apart."""
    won = min(rounds, key=lambda plan: median(rounds[plan]))
    if used in rounds and sorted(rounds[won])[-2] >= sorted(rounds[used])[1]:
        return used
    return won


def _journal(cell: Cell, machine: Machine, store: Store) -> Journal:
    return Journal(store.directory, cell, conditions_of(cell, machine))


@final
class _Search:
    """The search in one cell."""

    def __init__(self, cell: Cell, bench: CellMeasurer, journal: Journal) -> None:
        self._cell, self._bench, self._journal = cell, bench, journal
        self._times: dict[Plan, float] = {}
        self.tried = self.failed = 0

    def _compile(self, plans: Sequence[Plan]) -> Iterator[Compiled]:
        """Compile the plans that are not known yet."""
        missing = [plan for plan in dict.fromkeys(plans) if self._journal.known(plan) is None]
        for done in self._bench.compile(missing):
            yield Compiled(self._cell, done, len(missing))

    def over(self, tried: Sequence[Family], others: Sequence[Plan]) -> Iterator[Compiled | Tried]:
        """Try the others, and the families."""
        yield from self._compile([*others, *(family.plans()[0] for family in tried)])
        for plan in dict.fromkeys(others):
            yield from self._try(plan)
        started: dict[Family, float] = {}
        for family in tried:
            us = yield from self._first(family)
            if us is not None:
                started[family] = us
        far = _FAR * min(started.values(), default=0.0)
        chosen = [family for family, us in started.items() if us <= far and not self._has_faster_twin(family, started)]
        yield from self._compile([plan for family in chosen for plan in family.plans()])
        for family in chosen:
            yield from self._descend(family)
        yield from self._try_twins({family.how for family in tried})

    def _has_faster_twin(self, family: Family, started: Mapping[Family, float]) -> bool:
        twin = Family(_TWINS.get(family.how, family.how), family.ups, family.downs)
        return started.get(twin, started[family]) < started[family]

    def _try_twins(self, hows: set[How]) -> Iterator[Compiled | Tried]:
        fastest = [plan for plan in sorted(self._times, key=lambda plan: self._times[plan]) if plan.how in _TWINS][:_FINALISTS]
        twins = [plan._replace(how=_TWINS[plan.how]) for plan in fastest if _TWINS[plan.how] in hows]
        yield from self._compile(twins)
        for plan in twins:
            yield from self._try(plan)

    def side_by_side(self, others: Sequence[Plan]) -> dict[Plan, list[float]]:
        """Return the times of the fastest plans and of the others that run, a time a round. Raises: UnsupportedError where nothing runs."""
        fastest = sorted(self._times, key=lambda plan: self._times[plan])[:_FINALISTS]
        rounds: dict[Plan, list[float]] = {plan: [] for plan in (*fastest, *(plan for plan in others if plan in self._times))}
        for number in range(_ROUNDS):
            for plan in list(rounds) if number % 2 == 0 else list(reversed(rounds)):
                try:
                    rounds[plan].append(self._bench.time(plan, _ROUND_REPLAYS))
                except PlanFailed as failed:  # one that ran before the run was interrupted, perhaps
                    self._journal.add(plan, None, str(failed))
                    self.failed += 1
                    del rounds[plan]
        if not rounds:
            raise UnsupportedError(f"no plan for {self._cell.layer} runs at {self._cell.tokens} tokens")
        return rounds

    def _first(self, family: Family) -> Generator[Tried, None, float | None]:
        for up in family.ups[:_FIRST_TRIES]:
            us = yield from self._try(Plan(family.how, up, family.downs[0]))
            if us is not None:
                return us
        return None

    def _descend(self, family: Family) -> Iterator[Tried]:
        for up in family.ups:
            yield from self._try(Plan(family.how, up, family.downs[0]))
        first = [up for up in family.ups if Plan(family.how, up, family.downs[0]) in self._times]
        best = min(first, key=lambda up: self._times[Plan(family.how, up, family.downs[0])])
        for down in family.downs:
            yield from self._try(Plan(family.how, best, down))

    def _try(self, plan: Plan) -> Generator[Tried, None, float | None]:
        if plan in self._times:
            return self._times[plan]
        known = self._journal.known(plan)
        if known is None:
            try:
                known = (self._bench.time(plan, _REPLAYS), "")
            except PlanFailed as failed:
                known = (None, str(failed))
            except DeviceLostError as lost:
                self._journal.add(plan, None, str(lost))  # so that the next run goes on without it
                raise
            self._journal.add(plan, *known)
        us, failure = known
        self.tried += 1
        if us is None:
            self.failed += 1
        else:
            self._times[plan] = us
        yield Tried(self._cell, plan, us, failure, min(self._times.values(), default=None))
        return us

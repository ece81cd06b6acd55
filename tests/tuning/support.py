"""A measurer without a device: times are a formula, and it can be interrupted at any call."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager

from typing_extensions import override

from moe_typed.ops.product_plans.files import LayerKey
from moe_typed.ops.product_plans.spec import How, Plan
from moe_typed.tuning import Cell, CellMeasurer, Limits, Machine, Measurer, PlanFailed

LIMITS = Limits(227 * 1024, (9, 0))
MACHINE = Machine("Test GPU", LIMITS, torch="2.11.0", triton="3.6.0", moe_typed="0.1.0", kernels="0123")
LAYER = LayerKey("bf16", 16, 2, 256, 128)


def cell(tokens: int = 8, layer: LayerKey = LAYER, load: str = "uniform") -> Cell:
    return Cell(layer, layer.experts, tokens, load)


def by_size(plan: Plan) -> float:
    """Tell plans apart by everything that they say; none takes long to find by products alone."""
    first = {How.VECTOR: 60.0, How.WALK: 50.0, How.SORTED: 55.0, How.STREAM: 57.0, How.WIDE: 58.0}[plan.how]
    return first + sum(abs(tile.columns - 64) / 16 + tile.stages * 0.25 + tile.depth / 512 + tile.warps * 0.125 + tile.group for tile in plan[1:])


class FakeMeasurer(Measurer):
    """Measures by a formula, which may raise PlanFailed. ``interrupt``: the call that is interrupted as by Ctrl-C; 0 for none."""

    def __init__(self, time: Callable[[Plan], float] = by_size, *, machine: Machine = MACHINE, interrupt: int = 0) -> None:
        self._time, self._machine, self._interrupt = time, machine, interrupt
        self.calls = 0
        self.timed: list[Plan] = []
        self.compiled: list[Plan] = []
        self.opened: list[Cell] = []
        self.closed = 0

    @property
    @override
    def machine(self) -> Machine:
        return self._machine

    @override
    @contextmanager
    def open(self, cell: Cell) -> Generator[CellMeasurer]:
        self.opened.append(cell)
        self.tick()
        try:
            yield FakeCell(self)
        finally:
            self.closed += 1

    def tick(self) -> None:
        self.calls += 1
        if self.calls == self._interrupt:
            raise KeyboardInterrupt

    def time(self, plan: Plan) -> float:
        self.tick()
        self.timed.append(plan)
        return self._time(plan)


class FakeCell(CellMeasurer):
    def __init__(self, measurer: FakeMeasurer) -> None:
        self._measurer = measurer

    @override
    def compile(self, plans: Sequence[Plan]) -> Iterator[int]:
        for done, plan in enumerate(plans, 1):
            self._measurer.tick()
            self._measurer.compiled.append(plan)
            yield done

    @override
    def time(self, plan: Plan, replays: int) -> float:
        return self._measurer.time(plan)


def failing(*hows: How) -> Callable[[Plan], float]:
    """Return times of which some ways have none."""

    def time(plan: Plan) -> float:
        if plan.how in hows:
            raise PlanFailed("out of shared memory")
        return by_size(plan)

    return time

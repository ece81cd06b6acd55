"""Rows that lie by expert, from emulated libraries into the Triton runner and home again, by plans; against one rank that has all experts."""

import threading
from typing import cast

import pytest
from torch import Tensor

from moe_typed.plan import Backend, Environment, MoEProblem, Wire, build_experts, plan
from moe_typed.runners import ReferenceCheckpoint
from moe_typed.runners.triton.runner import TritonRunner
from moe_typed.stages import SegmentRowsInput, SlabRowsInput
from moe_typed.table import find
from tests.dispatchers.setups import SETUPS, expected, slots
from tests.dispatchers.support import INTER, LOCAL, SILU, TOPK, batch, held_by, near, weights
from tests.emulation.world import World
from tests.ops.support import on_cpu

BACKENDS = {
    "deepep ll": (Backend.DEEPEP_LL, SlabRowsInput),
    "mooncake": (Backend.MOONCAKE, SlabRowsInput),
    "nixl": (Backend.NIXL, SlabRowsInput),
    "deepep v2 expanded": (Backend.DEEPEP_V2_EXPANDED, SegmentRowsInput),
    "deepep v2 masked": (Backend.DEEPEP_V2_MASKED, SegmentRowsInput),
}
GPU = Environment(
    device="cuda",
    device_name="a GPU that Triton's interpreter stands for",
    capability=(9, 0),
    libraries={"torch": "2.13.0", "triton": "3.9.0", **{backend.module: "1.0" for backend, _ in BACKENDS.values()}},
)

ONE_AT_A_TIME = threading.Lock()  # every rank is a thread, and Triton's interpreter runs in one
pytestmark = [*on_cpu]  # the libraries are emulated on the CPU
backends = pytest.mark.parametrize("name", BACKENDS)


def run_planned(name: str, kind: str, ranks: int) -> list[Tensor]:
    """Return what a layer of each rank makes of a batch, over float32 weights, which the interpreter multiplies exactly."""
    setup, (backend, runner_input) = SETUPS[name], BACKENDS[name]
    world, w = World(ranks), weights("fp32", LOCAL * ranks, setup.hidden)
    problem = MoEProblem(
        num_experts=LOCAL * ranks,
        top_k=TOPK,
        hidden=setup.hidden,
        inter=INTER,
        model="fp32",
        weights="fp32",
        activation=SILU.name,
        rows=4,
        wire=Wire.FP8_BLOCK128,
        backend=backend,
        ranks=ranks,
    )
    report = plan(problem, GPU)
    assert report.runner == "triton"

    def body(rank: int) -> Tensor:
        dispatcher = setup.dispatcher(world.group(rank), "fp8")
        experts = build_experts(report, cast("ReferenceCheckpoint", held_by(w, rank)), SILU)
        assert isinstance(experts.runner, TritonRunner)
        assert find(dispatcher.variant, experts.runner).key == (backend.variant, runner_input)
        rows, routing = batch(kind, rank, LOCAL * ranks, setup.hidden)
        dispatched = dispatcher.dispatch(rows, slots(setup, routing))
        with ONE_AT_A_TIME:
            results = experts(dispatched)
        return dispatcher.combine(results)

    return world.run(body)


@backends
@pytest.mark.parametrize("ranks", [1, 2])
def test_planned_layers_bring_every_row_home(name: str, ranks: int) -> None:
    for rank, found in enumerate(run_planned(name, "mixed", ranks)):
        near(found, expected(SETUPS[name], "mixed", rank, ranks, "fp32", "fp8"))


@backends
@pytest.mark.parametrize("kind", ["uneven", "nowhere", "one rank"])
def test_other_batches_come_home(name: str, kind: str) -> None:
    for rank, found in enumerate(run_planned(name, kind, 2)):
        near(found, expected(SETUPS[name], kind, rank, 2, "fp32", "fp8"))

"""Rows out to the ranks of their experts and home again, against one rank that has all experts: every dispatcher, wire and weight format."""

import pytest
import torch

from moe_typed import debug
from tests.dispatchers.setups import SETUPS, expected, run_layers
from tests.dispatchers.support import KINDS, near

FORMS = ("bf16", "fp8 block", "mxfp8", "mxfp4")

setups = pytest.mark.parametrize("name", SETUPS)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize(("name", "wire"), [(name, wire) for name, setup in SETUPS.items() for wire in setup.wires])
def test_every_wire_comes_home(name: str, wire: str, ranks: int) -> None:
    setup = SETUPS[name]
    for rank, (first, second) in enumerate(run_layers(setup, wire, "bf16", ranks, "mixed", rounds=2)):
        wanted = expected(setup, "mixed", rank, ranks, "bf16", wire)
        near(first, wanted)
        near(second, wanted)


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize(("name", "wire"), [(name, wire) for name, setup in SETUPS.items() for wire in setup.wires])
def test_every_weight_format_takes_every_wire(name: str, wire: str, form: str) -> None:
    setup = SETUPS[name]
    for rank, (found,) in enumerate(run_layers(setup, wire, form, 2, "mixed")):
        near(found, expected(setup, "mixed", rank, 2, form, wire))


@pytest.mark.parametrize("kind", KINDS[1:])
@setups
def test_every_batch_comes_home(name: str, kind: str) -> None:
    setup = SETUPS[name]
    for wire in setup.wires[:2]:
        for rank, (found,) in enumerate(run_layers(setup, wire, "bf16", 2, kind)):
            wanted = expected(setup, kind, rank, 2, "bf16", wire)
            near(found, wanted)
            assert bool((found[wanted == 0] == 0).all())


@setups
def test_debug_finds_nothing_wrong(name: str) -> None:
    setup = SETUPS[name]
    wire = setup.wires[-1]
    with debug("strict"):
        for kind in ("mixed", "padded device"):
            for (found,) in run_layers(setup, wire, "mxfp4" if wire == "mxfp4" else "bf16", 2, kind):
                assert bool(torch.isfinite(found).all())

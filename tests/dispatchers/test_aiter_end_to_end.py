"""Rows out, through the emulated AITER, and home: every dispatcher, against one rank that has all experts in float32."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from moe_typed import Payload
from moe_typed.formats import MxFp4ExpertWeights
from moe_typed.runners import PreparedWeights, prepare_aiter
from moe_typed.runners.aiter import MxFp4Layout
from moe_typed.table import AnyRunner
from tests.dispatchers.support import SETUPS, Weights, expected, run_layers
from tests.runners.aiter.support import make_library

# What AITER rounds beside the rows: what lies between the products, in the format that the weights ask for, and the result in bf16.
TOLERANCE = {"bf16": 0.02, "fp8 block": 0.08, "mxfp8": 0.08, "mxfp4": 0.3}

PAIRS = {"bf16": ("bf16", "mxfp4"), "fp8": ("fp8 block",), "mxfp8": ("mxfp8",), "mxfp4": ("mxfp4",), "rows": ("fp8 block",), "ue8m0": ("fp8 block",)}
CASES = [(name, wire, form) for name, setup in SETUPS.items() for wire in setup.wires for form in PAIRS.get(wire, ())]


def prepared(w: Weights) -> PreparedWeights[AnyRunner, Payload]:
    library, _ = make_library()
    prepare = cast("Callable[..., PreparedWeights[AnyRunner, Payload]]", prepare_aiter)
    return prepare(w, library, layout=MxFp4Layout.A4W4) if isinstance(w, MxFp4ExpertWeights) else prepare(w, library)


def length(rows: Tensor) -> float:
    """Return the root of the sum of squares."""
    return float(rows.square().sum().sqrt())


def check(name: str, wire: str, form: str, kind: str) -> None:
    setup = SETUPS[name]
    for rank, (found,) in enumerate(run_layers(setup, wire, form, 2, kind, prepared)):
        wanted = expected(setup, kind, rank, 2, form, wire)
        assert found.dtype == torch.bfloat16
        assert bool((found[wanted == 0] == 0).all())
        assert length(found.float() - wanted) <= TOLERANCE[form] * length(wanted)


@pytest.mark.parametrize(("name", "wire", "form"), CASES)
def test_every_dispatcher_reaches_aiter(name: str, wire: str, form: str) -> None:
    check(name, wire, form, "mixed")


@pytest.mark.parametrize("kind", ["idle", "one row", "nowhere", "one rank", "padded host", "padded device"])
@pytest.mark.parametrize("name", SETUPS)
def test_every_batch_reaches_aiter(name: str, kind: str) -> None:
    check(name, "bf16", "bf16", kind)

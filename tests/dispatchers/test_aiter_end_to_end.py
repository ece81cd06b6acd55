"""Rows out, through the emulated AITER, and home: every dispatcher, against one rank that has all experts in float32."""

from collections.abc import Callable, Mapping
from typing import Final, cast

import pytest
import torch
from torch import Tensor

from moe_typed import Payload, SwigluOai, UnsupportedError
from moe_typed.runners import Activation, PreparedWeights, prepare_aiter
from moe_typed.runners.aiter import MxFp4Layout
from moe_typed.table import AnyRunner
from tests.dispatchers.setups import SETUPS, expected, run_layers
from tests.dispatchers.support import SILU, Weights
from tests.runners.aiter.support import make_library, static_scales

# What AITER rounds: the rows where the weights ask for it, what lies between the products, in the same format, and the result in bf16.
TOLERANCE: Final[Mapping[str, float]] = {
    "bf16": 0.02,
    "fp8 tensor": 0.1,
    "fp8 channel": 0.08,
    "fp8 block": 0.08,
    "int8": 0.04,
    "mxfp8": 0.08,
    "mxfp4": 0.3,
    "a16w4": 0.02,
    "a8w4": 0.08,
}
KEYWORDS: Final[Mapping[str, Mapping[str, object]]] = {
    "fp8 tensor": {"static": static_scales()},
    "mxfp4": {"layout": MxFp4Layout.A4W4},
    "a16w4": {"layout": MxFp4Layout.A16W4},
    "a8w4": {"layout": MxFp4Layout.A8W4},
}

PAIRS = {"bf16": ("bf16", "mxfp4"), "fp8": ("fp8 block",), "mxfp8": ("mxfp8",), "mxfp4": ("mxfp4",), "rows": ("fp8 block",), "ue8m0": ("fp8 block",)}
CASES = [(name, wire, form) for name, setup in SETUPS.items() for wire in setup.wires for form in PAIRS.get(wire, ())]
OTHERS = ("fp8 tensor", "fp8 channel", "int8", "a16w4", "a8w4")  # rows are quantised by AITER, so that they go out as bf16


def prepare_form(form: str) -> Callable[[Weights], PreparedWeights[AnyRunner, Payload]]:
    """Return what prepares weights of a form for the emulated AITER, their accept-set forgotten."""
    library, _ = make_library()
    prepare = cast("Callable[..., PreparedWeights[AnyRunner, Payload]]", prepare_aiter)
    return lambda w: prepare(w, library, **KEYWORDS.get(form, {}))


def length(rows: Tensor) -> float:
    """Return the root of the sum of squares."""
    return float(rows.square().sum().sqrt())


def check(name: str, wire: str, form: str, kind: str) -> None:
    setup = SETUPS[name]
    activation: Activation = SwigluOai() if form == "a16w4" else SILU
    for rank, (found,) in enumerate(run_layers(setup, wire, form, 2, kind, prepare_form(form), activation=activation)):
        wanted = expected(setup, kind, rank, 2, form, wire, activation)
        assert found.dtype == torch.bfloat16
        assert bool((found[wanted == 0] == 0).all())
        assert length(found.float() - wanted) <= TOLERANCE[form] * length(wanted)


@pytest.mark.parametrize(("name", "wire", "form"), CASES)
def test_every_dispatcher_reaches_aiter(name: str, wire: str, form: str) -> None:
    check(name, wire, form, "mixed")


@pytest.mark.parametrize("form", OTHERS)
@pytest.mark.parametrize("name", SETUPS)
def test_every_dispatcher_reaches_every_other_weight_format(name: str, form: str) -> None:
    if form == "fp8 tensor" and name.startswith("mori"):
        with pytest.raises(UnsupportedError, match="no count of live rows with fp8-tensor weights"):
            check(name, "bf16", form, "mixed")
    else:
        check(name, "bf16", form, "mixed")


@pytest.mark.parametrize("kind", ["uneven", "idle", "one row", "nowhere", "one rank", "padded host", "padded device"])
@pytest.mark.parametrize("name", SETUPS)
def test_every_batch_reaches_aiter(name: str, kind: str) -> None:
    check(name, "bf16", "bf16", kind)

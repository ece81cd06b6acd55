"""The emulations are what the protocols ask for."""

from collections.abc import Callable
from inspect import Parameter, signature

import pytest

from moe_typed.runners.ascend.ops import AscendBuffer, AscendExtensionOps, AscendOps
from tests.emulation.ascend.deep_ep import AscendEvent, EmulatedAscendBuffer, LowLatencyHandle, NormalHandle
from tests.emulation.ascend.extension import EmulatedAscendExtensionOps
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.emulation.world import World


def methods(protocol: type) -> list[tuple[str, Callable[..., object]]]:
    return [(name, value) for base in protocol.__mro__ for name, value in vars(base).items() if not name.startswith("_") and callable(value)]


EMULATIONS = ((AscendOps, EmulatedAscendOps), (AscendExtensionOps, EmulatedAscendExtensionOps), (AscendBuffer, EmulatedAscendBuffer))
CASES = [
    pytest.param(theirs, vars(emulation).get(name) or getattr(emulation, name), id=name)
    for protocol, emulation in EMULATIONS
    for name, theirs in methods(protocol)
]


def test_the_checkers_agree() -> None:
    ops: AscendOps = EmulatedAscendOps()
    extension: AscendExtensionOps = EmulatedAscendExtensionOps()
    buffer: AscendBuffer[NormalHandle, LowLatencyHandle, AscendEvent] = EmulatedAscendBuffer(World(1).group(0))
    assert {type(ops), type(extension), type(buffer)} == {emulation for _, emulation in EMULATIONS}


@pytest.mark.parametrize(("theirs", "ours"), CASES)
def test_names_order_kinds_and_defaults_are_the_protocol_s(theirs: Callable[..., object], ours: Callable[..., object]) -> None:
    def shape(function: Callable[..., object]) -> list[tuple[str, object, object]]:
        return [(name, value.kind, None if value.default is ... else value.default) for name, value in signature(function).parameters.items()]

    assert shape(ours) == shape(theirs)
    assert Parameter.VAR_KEYWORD not in [value.kind for value in signature(ours).parameters.values()]

"""The emulated classes have the methods of the real ones, with the same parameters, as the stubs state them."""

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.emulation.deep_ep import EmulatedBuffer
from tests.emulation.deep_ep_common import Config
from tests.emulation.deep_ep_elastic import EmulatedElasticBuffer
from tests.emulation.elastic import EPHandle
from tests.emulation.events import EventHandle, EventOverlap
from tests.emulation.mooncake import EmulatedMooncakeBuffer
from tests.emulation.mooncake import EventOverlap as MooncakeEventOverlap
from tests.emulation.mooncake_elastic import EmulatedMooncakeElasticBuffer, MooncakeEPHandle
from tests.emulation.mori import EmulatedDispatchCombineOp
from tests.emulation.mori_config import EpDispatchCombineConfig, EpDispatchRoutingHandle
from tests.emulation.mori_v2 import EmulatedCommunicator, EmulatedDispatchCombineOpV2
from tests.emulation.mori_v2_config import EpDispatchCombineConfigV2, EpDispatchRoutingHandleV2
from tests.emulation.nixl import EmulatedNixlBuffer

TYPINGS: Final = Path(__file__).parents[2] / "typings"

_SYSTEM: Final = frozenset({"is_sm90_compiled", "get_comm_stream", "get_local_buffer_tensor"})  # what is of the device and its memory
_NIXL: Final = frozenset({"get_dispatch_config", "get_combine_config", "set_num_sms", "capture", "get_low_latency_buffer_size_hint"})


@dataclass(frozen=True)
class Pair:
    """A class of a stub, and its emulation, which lacks some methods."""

    stub: str
    name: str
    emulation: type
    lacks: frozenset[str] = frozenset()


PAIRS: Final = [
    Pair("deep_ep/buffers/legacy.pyi", "Buffer", EmulatedBuffer, _SYSTEM),
    Pair("deep_ep/buffers/elastic.pyi", "ElasticBuffer", EmulatedElasticBuffer, frozenset({"get_comm_stream"})),
    Pair("deep_ep/buffers/elastic.pyi", "EPHandle", EPHandle),
    Pair("deep_ep/_C.pyi", "Config", Config),
    Pair("deep_ep/_C.pyi", "EventHandle", EventHandle),
    Pair("deep_ep/utils/event.pyi", "EventOverlap", EventOverlap),
    Pair("mori/ops/dispatch_combine.pyi", "EpDispatchCombineOp", EmulatedDispatchCombineOp),
    Pair("mori/ops/dispatch_combine.pyi", "EpDispatchCombineConfig", EpDispatchCombineConfig),
    Pair("mori/ops/dispatch_combine.pyi", "EpDispatchRoutingHandle", EpDispatchRoutingHandle),
    Pair("mori/ops/dispatch_combine_v2/dispatch_combine_op.pyi", "EpDispatchCombineOp", EmulatedDispatchCombineOpV2),
    Pair("mori/ops/dispatch_combine_v2/dispatch_combine_op.pyi", "EpDispatchCombineConfig", EpDispatchCombineConfigV2, frozenset({"tuned"})),
    Pair("mori/ops/dispatch_combine_v2/dispatch_combine_op.pyi", "EpDispatchRoutingHandle", EpDispatchRoutingHandleV2),
    Pair("mori/cco.pyi", "Communicator", EmulatedCommunicator, frozenset({"get_unique_id", "init"})),
    Pair("mooncake/mooncake_ep_buffer.pyi", "Buffer", EmulatedMooncakeBuffer),
    Pair("mooncake/mooncake_ep_buffer.pyi", "EventOverlap", MooncakeEventOverlap),
    Pair("mooncake/mooncake_elastic_buffer.pyi", "ElasticBuffer", EmulatedMooncakeElasticBuffer),
    Pair("mooncake/mooncake_elastic_buffer.pyi", "EPHandle", MooncakeEPHandle),
    Pair("nixl_ep/buffer.pyi", "Buffer", EmulatedNixlBuffer, _SYSTEM | _NIXL),
]


def class_of(pair: Pair) -> ast.ClassDef:
    tree = ast.parse((TYPINGS / pair.stub).read_text())
    (found,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == pair.name]
    return found


def members(node: ast.ClassDef) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    """Yield the methods of a stub, each overload by itself, with the names and defaults of their parameters."""
    fields: list[tuple[str, str | None]] = []
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields.append((statement.target.id, None if statement.value is None else ast.unparse(statement.value)))
        if not isinstance(statement, ast.FunctionDef):
            continue
        arguments = statement.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults: list[ast.expr | None] = [*[None] * (len(positional) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
        names = [argument.arg for argument in (*positional, *arguments.kwonlyargs)]
        given = [(name, None if default is None else ast.unparse(default)) for name, default in zip(names, defaults, strict=True)]
        yield statement.name, [pair for pair in given if pair[0] not in ("self", "cls")]
    if any(isinstance(decorator, ast.Name) and decorator.id == "dataclass" for decorator in node.decorator_list):
        yield "__init__", fields


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.stub.split('/')[0]}.{pair.name}")
def test_methods_have_the_parameters_of_the_stub(pair: Pair) -> None:
    stubbed = dict.fromkeys(name for name, _ in members(class_of(pair)))
    lacking = {name for name in stubbed if name not in dir(pair.emulation)}
    assert lacking == pair.lacks
    for name, expected in members(class_of(pair)):
        if name in pair.lacks or name in ("__exit__", "__eq__", "__hash__"):
            continue
        value: object = inspect.getattr_static(pair.emulation, name)
        if isinstance(value, property):
            continue
        found = inspect.signature(getattr(pair.emulation, name)).parameters
        parameters = [parameter for key, parameter in found.items() if key not in ("self", "cls")]
        names = [parameter.name for parameter in parameters]
        assert names[: len(expected)] == [key for key, _ in expected], name
        assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[len(expected) :]), name
        for parameter, (_, default) in zip(parameters, expected, strict=False):
            # An overload may ask for what has a default, or have a default of its own.
            if default is not None and default != "...":
                assert repr_of(parameter.default) == last_name(default), f"{name}({parameter.name})"


def repr_of(default: object) -> str:
    """Return a default as a stub writes it, a member of an enum or of a module by its last name."""
    return repr(default).split(":")[0].rsplit(".", 1)[-1] if not isinstance(default, (int, str)) else repr(default)


def last_name(default: str) -> str:
    return default.rsplit(".", 1)[-1]

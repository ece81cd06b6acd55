"""The protocol says of each operator what the published torch-npu says: names, order, keywords, types, defaults and results; and so do the codes.

The schemas are strings of the wheel's library, which is read and never loaded.
"""

import enum
import inspect
import re
import sys
import typing
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Final, Literal

import pytest
import torch
from torch import Tensor
from torchgen.model import Argument, FunctionSchema

from moe_typed.runners.ascend.ops import AclFormat, AscendOps, NpuDtype, RoutingQuantMode, TorchDtypeCode
from tests.typings.published import fetch, needs

LIBRARY: Final = "torch_npu/lib/libtorch_npu.so"
META: Final = "torch_npu/op_plugin/meta/_meta_registrations.py"
FORMATS: Final = "torch_npu/npu/_format.py"

FUNCTIONS: Final = {name: function for name, function in inspect.getmembers(AscendOps, inspect.isfunction) if not name.startswith("_")}
OPERATORS: Final = sorted(FUNCTIONS)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, bytes]:
    """Return the files of the published wheel that say something of operators."""
    needs("torch-npu")
    with fetch("torch-npu", tmp_path_factory.mktemp("torch_npu")) as archive:
        return {name: archive.read(name) for name in (LIBRARY, META, FORMATS)}


def schemas(library: bytes) -> Mapping[str, FunctionSchema]:
    """Return the schema of each operator of the protocol, without those of other overloads."""
    found: dict[str, FunctionSchema] = {}
    for match in re.finditer(rb"\0((npu_\w+)\([^\0]*\) -> [^\0]+)\0", library):
        name = match[2].decode()
        if name in OPERATORS:
            found[name] = FunctionSchema.parse(match[1].decode())
    return found


def test_the_protocol_is_what_is_published(wheel: Mapping[str, bytes]) -> None:
    published = schemas(wheel[LIBRARY])
    assert sorted(published) == OPERATORS
    assert [*(line for name in OPERATORS for line in differences(name, published[name]))] == []
    assert "torch_npu" not in sys.modules


def differences(name: str, schema: FunctionSchema) -> Iterator[str]:
    function = FUNCTIONS[name]
    hints = typing.get_type_hints(function)
    ours = [*inspect.signature(function).parameters.values()][1:]
    arguments = schema.arguments
    theirs = [*arguments.flat_positional, *arguments.flat_kwarg_only]
    if [parameter.name for parameter in ours] != [argument.name for argument in theirs]:
        yield f"{name}: {[parameter.name for parameter in ours]} for {[argument.name for argument in theirs]}"
        return
    for parameter, argument in zip(ours, theirs, strict=True):
        keyword = argument in arguments.flat_kwarg_only
        if keyword != (parameter.kind is inspect.Parameter.KEYWORD_ONLY):
            yield f"{name}({argument.name}): keyword-only is {keyword}"
        if not is_default(parameter.default, argument):
            yield f"{name}({argument.name}): {parameter.default!r} for {argument.default}"
        if kind(hints[parameter.name]) != str(argument.type).replace("int[2]", "int[]"):
            yield f"{name}({argument.name}): {hints[parameter.name]} for {argument.type}"
    if results(hints["return"]) != [str(result.type) for result in schema.returns]:
        yield f"{name}: returns {hints['return']} for {schema.returns}"


def is_default(ours: object, argument: Argument) -> bool:
    match argument.default:
        case None:
            return ours is inspect.Parameter.empty
        case "[]":
            return ours is ...  # a list as a default would be shared
        case "None":
            return ours is None
        case "True" | "False":
            return ours is (argument.default == "True")
        case text if text[0] in "'\"":
            return ours == text[1:-1]
        case text:
            return isinstance(ours, int | float) and float(ours) == float(text)


def kind(hint: object) -> str:
    """Return the schema's type that an annotation stands for: an enum and a dtype are ints there, a literal is a string."""
    members = set(typing.get_args(hint)) if isinstance(hint, UnionType) or typing.get_origin(hint) is typing.Union else {hint}
    optional = "?" if NoneType in members else ""
    members.discard(NoneType)
    if members == {torch.dtype, int}:
        return f"int{optional}"
    (only,) = members
    if isinstance(only, type) and issubclass(only, enum.IntEnum):
        return f"int{optional}"
    if typing.get_origin(only) is Literal:
        return f"str{optional}"
    names: dict[object, str] = {Tensor: "Tensor", int: "int", float: "float", bool: "bool", str: "str", torch.dtype: "ScalarType"}
    names |= {list[Tensor]: "Tensor[]", list[int]: "int[]"}
    return f"{names[only]}{optional}"


def results(hint: object) -> list[str]:
    return [kind(part) for part in typing.get_args(hint)] if typing.get_origin(hint) is tuple else [kind(hint)]


# ---- codes -------------------------------------------------------------------------------------------------------------------------------


def test_the_numbers_of_dtypes_are_those_published(wheel: Mapping[str, bytes]) -> None:
    text = wheel[META].decode()
    foreign = {name.upper(): int(number) for number, name in re.findall(r'(\d+): "torch_npu\.(\w+)"', text)}
    native = {name: int(number) for number, name in re.findall(r"(\d+): torch\.(\w+),", text)}
    float8 = {
        name.upper(): native[name] for name in ("float8_e5m2", "float8_e4m3fn") if native[name] > 256
    }  # listed by both numbers; the later counts
    assert {member.name: member.value for member in NpuDtype} == foreign | float8
    first = {name: int(number) for number, name in reversed(re.findall(r"(\d+): torch\.(\w+),", text))}
    known = {member.name.lower(): member.value for member in TorchDtypeCode}
    assert {name: first[name] for name in known if name in first} == {name: value for name, value in known.items() if name in first}
    assert {"int8", "int32", "float32", "bfloat16", "float16"} <= first.keys() & known.keys()


def test_the_numbers_of_formats_are_those_published(wheel: Mapping[str, bytes]) -> None:
    published = {name: int(number) for name, number in re.findall(r"^    (\w+) = (\d+)$", wheel[FORMATS].decode(), re.MULTILINE)}
    assert {member.name: member.value for member in AclFormat}.items() <= published.items()


def test_the_quantisations_of_routing_are_those_published(wheel: Mapping[str, bytes]) -> None:
    (body,) = re.findall(r"def npu_moe_init_routing_v2_meta\(.*?(?=\n@impl)", wheel[META].decode(), re.DOTALL)
    (listed,) = re.findall(r"and quant_mode in \[([^\]]*)\]", body)
    assert {mode.value for mode in RoutingQuantMode} == {int(number) for number in listed.split(",")}


def test_differences_are_found() -> None:
    """Each kind of difference, in a schema that is changed by one thing."""
    good = "npu_swiglu(Tensor input, int dim=-1) -> Tensor"
    assert [*differences("npu_swiglu", FunctionSchema.parse(good))] == []
    for old, new in (
        ("dim", "axis"),
        ("int dim", "float dim"),
        ("=-1", "=0"),
        ("=-1", ""),
        (", int", ", *, int"),
        ("-> Tensor", "-> (Tensor, Tensor)"),
    ):
        assert len([*differences("npu_swiglu", FunctionSchema.parse(good.replace(old, new)))]) == 1

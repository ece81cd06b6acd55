"""The stubs of AITER say of the published wheel what its source says: parameters, their order and defaults, enums, dtypes and the quantisers by kind.

What the stubs say of it: for a function the protocol of its name and the wheel's, such as ``FusedMoeWheel017`` for ``fused_moe``, and the stub itself
where there is no such protocol. The source is parsed; importing it would build extensions.
"""

import ast
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from tests.typings.published import fetch, needs
from tests.typings.signatures import AITER, Module, Signature, bound, difference, members, read

SUFFIX: Final = "Wheel017"
MODULES: Final = ("fused_moe", "ops/quant", "ops/shuffle", "utility/dtypes", "utility/fp4_utils")
HEADER: Final = "aiter_meta/csrc/include/aiter_enum.h"  # of the enums that pybind11 makes
ENUMS: Final = ("ActivationType", "QuantType")

STUBS: Final = {module: read(AITER / f"{module}.pyi") for module in MODULES}
VERSIONS: Final = read(AITER / "_versions.pyi")
VALUES: Final = {enum: members(read(AITER / "ops" / "enum.pyi").classes[enum]) for enum in ENUMS}


def test_the_wheel_is_as_its_stubs_say(tmp_path: Path) -> None:
    needs("amd-aiter")
    with fetch("amd-aiter", tmp_path) as wheel:
        for name in (HEADER, *(f"aiter/{module}.py" for module in MODULES)):
            wheel.extract(name, tmp_path)
    sources = {module: read(tmp_path / "aiter" / f"{module}.py") for module in MODULES}
    assert [*itertools.chain.from_iterable(functions(module, sources[module]) for module in MODULES)] == []
    assert [*quantisers(sources["ops/quant"])] == []
    assert [*marks(sources["ops/shuffle"])] == []
    assert [*enums((tmp_path / HEADER).read_text())] == []
    assert set(keys(sources["utility/dtypes"].constants["d_dtypes"])) == set(VERSIONS.literals(f"DtypeNames{SUFFIX}"))
    assert "aiter" not in sys.modules


def test_every_statement_about_the_wheel_is_compared_with_it() -> None:
    stated = {name for name in VERSIONS.classes if name.endswith(SUFFIX)}
    by_function = {protocol(function) for module in STUBS.values() for function in module.functions}
    by_kind = {ast.unparse(kind.returns) for kind in overloads() if kind.returns is not None}
    assert stated <= by_function | by_kind


# ---- functions -------------------------------------------------------------------------------------------------------------------------------


def protocol(function: str) -> str:
    """Return the name of the protocol of a function in the wheel, such as ``Per1x32F4QuantWheel017``, which there may be or not."""
    return "".join(word[:1].upper() + word[1:] for word in function.split("_")) + SUFFIX


def functions(module: str, source: Module) -> Iterator[str]:
    """Yield what is wrong with the functions of one stub."""
    missing = VERSIONS.literals(f"Missing{SUFFIX}")
    for function in STUBS[module].functions:
        if (function in source.functions) == (function in missing):
            yield f"{module}.{function}: {'is there' if function in missing else 'is not there'}"
        elif function not in missing:
            own = protocol(function) in VERSIONS.classes
            stated = VERSIONS.call_signatures(protocol(function)) if own else STUBS[module].signatures(function)
            (found,) = source.signatures(function)
            for overload in stated:
                yield from difference(f"{module}.{function}", overload, found)


def marks(source: Module) -> Iterator[str]:
    """Yield the shuffles that mark their result, or do not, otherwise than the type of the result says."""
    for function in ("shuffle_weight", "shuffle_weight_a16w4"):
        (call,) = (node for node in VERSIONS.classes[protocol(function)].body if isinstance(node, ast.FunctionDef))
        stated = call.returns is not None and ast.unparse(call.returns) == "ShuffledTensor"
        found = any(
            isinstance(node, ast.Attribute) and node.attr == "is_shuffled" and isinstance(node.ctx, ast.Store)
            for node in ast.walk(source.functions[function][0])
        )
        if stated != found:
            yield f"{function}: {'sets' if found else 'does not set'} is_shuffled"


# ---- quantisers ------------------------------------------------------------------------------------------------------------------------------


def overloads() -> list[ast.FunctionDef]:
    return [node for node in VERSIONS.classes[f"GetHipQuant{SUFFIX}"].body if isinstance(node, ast.FunctionDef)]


def quantisers(source: Module) -> Iterator[str]:
    """Yield what ``get_hip_quant`` returns otherwise than its overloads say."""
    (table,) = (node for node in ast.walk(source.functions["get_hip_quant"][0]) if isinstance(node, ast.Dict))
    found = dict(zip(keys(table), table.values, strict=True))
    names = {value: name for name, value in VALUES["QuantType"].items()}
    stated = {names[literal(overload)]: ast.unparse(overload.returns) for overload in overloads() if overload.returns is not None}
    if set(stated) != set(VERSIONS.literals(f"QuantTypeNames{SUFFIX}")):
        yield f"get_hip_quant: has overloads for {sorted(stated)}"
    for kind, quantiser in stated.items():
        match found.get(kind):
            case None if quantiser == "UnsupportedQuant":
                pass
            case ast.Lambda() if quantiser == "NoQuant":
                pass
            case ast.Name(function):
                yield from difference(f"get_hip_quant({kind})", call_signature(quantiser), source.signatures(function)[0])
            case ast.Call(ast.Attribute(attr="partial"), [ast.Name(function)], [ast.keyword(arg=str(name))]):
                yield from difference(f"get_hip_quant({kind})", call_signature(quantiser), bound(source.signatures(function)[0], name))
            case other:
                yield f"get_hip_quant({kind}): gives {'nothing' if other is None else ast.unparse(other)} where the stub says {quantiser}"


def call_signature(quantiser: str) -> Signature:
    (signature,) = (VERSIONS if quantiser in VERSIONS.classes else STUBS["ops/quant"]).call_signatures(quantiser)
    return signature


def literal(overload: ast.FunctionDef) -> int:
    """Return the value of the member that an overload is for."""
    (value,) = (node for node in ast.walk(overload.args) if isinstance(node, ast.Constant))
    return int(ast.literal_eval(value))


def keys(table: ast.expr) -> Iterator[str]:
    """Yield the keys of a table: strings, or members of an enum or their values."""
    assert isinstance(table, ast.Dict)
    for key in table.keys:
        match key:
            case ast.Constant(str(name)):
                yield name
            case ast.Attribute(ast.Name(), name) | ast.Attribute(ast.Attribute(_, name), "value"):
                yield name
            case _:
                raise AssertionError(key)


# ---- enums -----------------------------------------------------------------------------------------------------------------------------------


def enums(header: str) -> Iterator[str]:
    for enum, values in VALUES.items():
        found = enumerators(header, enum)
        stated = {name: values[name] for name in VERSIONS.literals(f"{enum}Names{SUFFIX}")}
        if found != stated:
            yield f"{enum}: {found} where the stub says {stated}"


def enumerators(header: str, enum: str) -> Mapping[str, int]:
    """Return the members of an enum of C++, of which one without a value is the one before it and one more."""
    (body,) = re.findall(rf"enum class {enum} : int\s*{{([^}}]*)}}", header)
    found: dict[str, int] = {}
    value = -1
    for name, written in re.findall(r"(\w+)\s*(?:=\s*(-?\d+))?\s*,", body):
        value = int(written) if written else value + 1
        found[name] = value
    return found

"""Signatures as they are written, in sources and in stubs: read, never imported."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import attrs

from tests.typing.checkers import ROOT

TYPINGS: Final = ROOT / "typings"
AITER: Final = TYPINGS / "aiter"

Kind: TypeAlias = Literal["positional", "any", "keyword", "rest"]


@attrs.frozen
class Parameter:
    """A parameter without its type: how it may be passed, and its default as text, None where there is none."""

    name: str
    kind: Kind
    default: str | None


Signature: TypeAlias = tuple[Parameter, ...]


@attrs.frozen
class Module:
    """What is defined at the top of a module: all definitions of each function, so its overloads; classes; and constants."""

    functions: Mapping[str, Sequence[ast.FunctionDef]]
    classes: Mapping[str, ast.ClassDef]
    constants: Mapping[str, ast.expr]

    def signatures(self, function: str) -> Sequence[Signature]:
        return [signature(definition, self.constants) for definition in self.functions[function]]

    def call_signatures(self, protocol: str) -> Sequence[Signature]:
        """Return what an instance of a protocol is called with."""
        return [signature(definition, self.constants)[1:] for definition in definitions(self.classes[protocol].body).get("__call__", ())]

    def literals(self, alias: str) -> Sequence[str]:
        """Return the strings of a ``Literal`` by the name of its alias."""
        return [node.value for node in ast.walk(self.constants[alias]) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def read(file: Path) -> Module:
    body = ast.parse(file.read_bytes()).body
    return Module(definitions(body), {node.name: node for node in body if isinstance(node, ast.ClassDef)}, dict(constants(body)))


def definitions(body: Sequence[ast.stmt]) -> Mapping[str, Sequence[ast.FunctionDef]]:
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            found.setdefault(node.name, []).append(node)
    return found


def constants(body: Sequence[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], value):
                yield name, value
            case ast.AnnAssign(ast.Name(name), _, ast.expr() as value):
                yield name, value
            case _:
                pass


def signature(function: ast.FunctionDef, known: Mapping[str, ast.expr]) -> Signature:
    """Return the parameters of a function, ``self`` too. A default that is the name of a constant of the module is that constant."""

    def text(default: ast.expr | None) -> str | None:
        match default:
            case None:
                return None
            case ast.Name(name) if isinstance(known.get(name), ast.Constant):
                return ast.unparse(known[name])
            case _:
                return ast.unparse(default)

    written = function.args
    by_position = [*written.posonlyargs, *written.args]
    defaults = [*[None] * (len(by_position) - len(written.defaults)), *written.defaults]
    return (
        *(
            Parameter(argument.arg, "positional" if number < len(written.posonlyargs) else "any", text(default))
            for number, (argument, default) in enumerate(zip(by_position, defaults, strict=True))
        ),
        *(Parameter(argument.arg, "rest", None) for argument in (written.vararg,) if argument is not None),
        *(Parameter(argument.arg, "keyword", text(default)) for argument, default in zip(written.kwonlyargs, written.kw_defaults, strict=True)),
        *(Parameter(argument.arg, "rest", None) for argument in (written.kwarg,) if argument is not None),
    )


def bound(parameters: Signature, name: str) -> Signature:
    """Return what is left of a signature when ``functools.partial`` has bound one parameter by its name: all after it go by name too."""
    at = [parameter.name for parameter in parameters].index(name)
    return (*parameters[:at], *(attrs.evolve(parameter, kind="keyword") for parameter in parameters[at + 1 :]))


def difference(who: str, stated: Signature, found: Signature) -> list[str]:
    """Return one line for each parameter that stands otherwise than stated."""
    faults = [f"{who}: {there} where the stub says {here}" for here, there in zip(stated, found, strict=False) if here != there]
    faults += [f"{who}: the stub says {parameter} more" for parameter in stated[len(found) :]]
    faults += [f"{who}: the stub lacks {parameter}" for parameter in found[len(stated) :]]
    return faults


def members(enum: ast.ClassDef) -> Mapping[str, int]:
    """Return the members of an enum of pybind11 by the stub, which tells each one's value by its type."""
    found: dict[str, int] = {}
    for node in enum.body:
        match node:
            case ast.AnnAssign(ast.Name(name), ast.Subscript(ast.Name("ClassVar"), ast.Subscript(_, ast.Subscript(ast.Name("Literal"), value)))):
                found[name] = int(ast.literal_eval(value))
            case _:
                pass
    return found

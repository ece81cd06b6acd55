"""A row of the transition table whose functions do not fit is refused by both checkers, whichever row it is and however it is broken."""

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

import attrs
import pytest

from moe_typed import table
from tests.typing.checkers import CHECKERS, ROOT, Checker, Messages, run

SOURCE: Final = ROOT / "src" / "moe_typed"
BASES: Final = {
    "Carry": "moe_typed.stages",
    "CombineInput": "moe_typed.stages",
    "RunnerInput": "moe_typed.stages",
    "Payload": "moe_typed.formats",
    "Edge": "moe_typed.table",
}

# What a broken row is led astray to; none of it belongs to any row.
STRANGERS: Final = """
class StrangeCarry(Carry): ...
class StrangeInput(RunnerInput): ...
class StrangeCombineInput(CombineInput): ...
class StrangePayload(Payload): ...
"""


Function = Callable[..., object]


@attrs.frozen
class WrittenRow:
    """A row as it stands in the text of the table: what it begins with, and the functions that it names."""

    edge: ast.Call
    pre: Function
    post: Function


def written_rows(module: ast.Module) -> Iterator[WrittenRow]:
    """Yield every ``Edge(...).pre(room.f).post(room.g)``."""
    for node in ast.walk(module):
        match node:
            case ast.Call(ast.Attribute(ast.Call(ast.Attribute(ast.Call() as edge, "pre"), [pre]), "post"), [post]):
                yield WrittenRow(edge, named(pre), named(post))
            case _:
                pass


def named(written: ast.expr) -> Function:
    """Return the function that the table names as ``room.function``."""
    match written:
        case ast.Attribute(ast.Name(room), function):
            found: Function = getattr(getattr(table, room), function)
            return found
        case _:
            raise AssertionError(ast.unparse(written))


def parse(module: str) -> ast.Module:
    return ast.parse((SOURCE / Path(*module.split(".")[1:])).with_suffix(".py").read_text())


def origins(module: str) -> dict[str, str]:
    """Return the module that each name of a module is imported from."""
    package = module.rpartition(".")[0]
    return {
        alias.name: importlib.util.resolve_name("." * node.level + (node.module or ""), package)
        for node in parse(module).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def signature(function: Function) -> tuple[ast.FunctionDef, dict[str, str]]:
    """Return a function of the table without its body, and what its annotations are to be imported from."""
    module = function.__module__
    found = next(node for node in parse(module).body if isinstance(node, ast.FunctionDef) and node.name == function.__name__)
    found.body = ast.parse("raise NotImplementedError").body
    return found, origins(module)


# ---- the ways to break a row ------------------------------------------------------------------------------------------------------


def annotation(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def foreign_carry(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    post.args.args[1].annotation = annotation("StrangeCarry")


def foreign_carry_from_pre(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    match pre.returns:
        case ast.Subscript(_, ast.Tuple([runner_input, _])):
            pre.returns = annotation(f"tuple[{ast.unparse(runner_input)}, StrangeCarry]")
        case _:
            raise AssertionError(ast.unparse(pre))


def dropped_carry(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    del post.args.args[1]


def forgotten_carry(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    match pre.returns:
        case ast.Subscript(_, ast.Tuple([runner_input, _])):
            pre.returns = runner_input
        case _:
            raise AssertionError(ast.unparse(pre))


def foreign_combine_input(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    post.returns = annotation("StrangeCombineInput")


def foreign_runner_input(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    match pre.returns:
        case ast.Subscript(_, ast.Tuple([_, carry])):
            pre.returns = annotation(f"tuple[StrangeInput, {ast.unparse(carry)}]")
        case _:
            raise AssertionError(ast.unparse(pre))


def narrower_payload(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    match pre.args.args[0].annotation:
        case ast.Subscript(variant, _):
            pre.args.args[0].annotation = annotation(f"{ast.unparse(variant)}[StrangePayload]")
        case _:
            raise AssertionError(ast.unparse(pre))


def swapped(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    pre.args, post.args = post.args, pre.args


def unbroken(pre: ast.FunctionDef, post: ast.FunctionDef) -> None:
    pass


Break = Callable[[ast.FunctionDef, ast.FunctionDef], None]
BREAKS: Final[tuple[Break, ...]] = (
    foreign_carry,
    foreign_carry_from_pre,
    dropped_carry,
    forgotten_carry,
    foreign_combine_input,
    foreign_runner_input,
    narrower_payload,
    swapped,
)
WRITTEN: Final = tuple(written_rows(parse(table.__name__)))


def variant(row: WrittenRow, breaking: Break) -> str:
    """Return a module with one row of the table in it, as it is written there, over functions that are broken in one way."""
    pre, pre_origins = signature(row.pre)
    post, post_origins = signature(row.post)
    breaking(pre, post)
    body = f"{STRANGERS}\n{ast.unparse(pre)}\n{ast.unparse(post)}\nROW = {ast.unparse(row.edge)}.pre({pre.name}).post({post.name})\n"
    own = {pre.name, post.name}
    known = BASES | origins(table.__name__) | pre_origins | post_origins
    used = sorted({node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)} & known.keys() - own)
    return "\n".join([*(f"from {known[name]} import {name}" for name in used), body])


def file_name(row: WrittenRow, breaking: Break) -> str:
    return f"{row.pre.__name__}_{row.post.__name__}_{breaking.__name__}.py"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> tuple[Mapping[Checker, Messages], Path]:
    folder = tmp_path_factory.mktemp("rows")
    for row in WRITTEN:
        for breaking in (unbroken, *BREAKS):
            (folder / file_name(row, breaking)).write_text(variant(row, breaking))
    return run(folder, tmp_path_factory.mktemp("pyright")), folder


def test_no_row_of_the_table_is_overlooked() -> None:
    assert [(row.pre, row.post) for row in WRITTEN] == [row.functions for row in table.ROWS]


@pytest.mark.parametrize("row", WRITTEN, ids=lambda row: f"{row.pre.__name__}-{row.post.__name__}")
@pytest.mark.parametrize("checker", CHECKERS)
class TestRow:
    def test_passes_as_it_is(self, said: tuple[Mapping[Checker, Messages], Path], checker: Checker, row: WrittenRow) -> None:
        messages = [texts for (name, _), texts in said[0][checker].items() if name == file_name(row, unbroken)]
        assert messages == []

    @pytest.mark.parametrize("breaking", BREAKS, ids=lambda breaking: breaking.__name__)
    def test_is_refused_when_broken(self, said: tuple[Mapping[Checker, Messages], Path], checker: Checker, row: WrittenRow, breaking: Break) -> None:
        name = file_name(row, breaking)
        lines = (said[1] / name).read_text().splitlines()
        places = {number for (file, number) in said[0][checker] if file == name}
        assert places == {next(number for number, line in enumerate(lines, 1) if line.startswith("ROW = "))}

"""Stubs of libraries that need a GPU: they parse, they hide nothing, and what they say twice is the same."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.typing.checkers import ROOT
from tests.typings.signatures import AITER, TYPINGS, Signature, bound, definitions, read, signature

LIBRARIES: Final = ("aiter", "deep_ep", "mooncake", "mori", "nixl_ep")
FILES: Final = sorted(file for library in LIBRARIES for file in (TYPINGS / library).rglob("*.pyi"))
CASES: Final = ("must_pass", "must_fail")

VERSIONS: Final = read(AITER / "_versions.pyi")
QUANT: Final = read(AITER / "ops" / "quant.pyi")
FUSED_MOE: Final = read(AITER / "fused_moe.pyi").signatures("fused_moe")[0]


def name_of(file: Path) -> str:
    return str(file.relative_to(TYPINGS))


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_nothing_is_hidden_from_checkers(file: Path) -> None:
    names = {node.id for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Name)}
    assert not names & {"Any", "Incomplete"}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("cases", CASES)
def test_both_kinds_of_cases_use_the_library(library: str, cases: str) -> None:
    imported = ast.parse((ROOT / "tests" / "typing" / cases / f"library_{library}.py").read_text())
    modules = {node.module or "" for node in ast.walk(imported) if isinstance(node, ast.ImportFrom)}
    modules |= {alias.name for node in ast.walk(imported) if isinstance(node, ast.Import) for alias in node.names}
    assert library in {module.split(".")[0] for module in modules}


def overloaded(file: Path) -> Iterator[tuple[str, list[ast.FunctionDef]]]:
    tree = ast.parse(file.read_text())
    for body in (tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))):
        for name, found in definitions(body).items():
            if len(found) > 1:
                yield name, list(found)


@pytest.mark.parametrize(
    ("file", "name", "found"),
    [pytest.param(file, name, found, id=f"{name_of(file)}:{name}") for file in FILES for name, found in overloaded(file)],
)
def test_overloads_are_of_one_function(file: Path, name: str, found: list[ast.FunctionDef]) -> None:
    """They differ in types, in what has a default, and in what must be named: never in names and their order."""
    del file, name
    orders = {tuple(parameter.name for parameter in signature(overload, {})) for overload in found}
    assert len(orders) == 1


def test_newer_versions_of_fused_moe_add_at_the_end() -> None:
    wheel, head, output = (VERSIONS.call_signatures(name)[0] for name in ("FusedMoeWheel017", "FusedMoeHead", "FusedMoeOutput"))
    assert output == FUSED_MOE
    assert head == output[: len(head)]
    assert wheel == head[: len(wheel)]
    assert len(wheel) < len(head) < len(output)
    assert all(parameter.default is not None for parameter in output[5:])


@pytest.mark.parametrize("version", ["FusedMoeQuantTypes", "FusedMoeNoCombine"])
def test_additions_of_unknown_place_go_by_name(version: str) -> None:
    (head,) = VERSIONS.call_signatures("FusedMoeHead")
    (found,) = VERSIONS.call_signatures(version)
    assert found[: len(head)] == head
    assert {parameter.kind for parameter in found[len(head) :]} == {"keyword"}


@pytest.mark.parametrize(
    ("protocol", "function"),
    [
        ("PerTensorQuantHip", "per_tensor_quant_hip"),
        ("PerTokenQuantHip", "per_token_quant_hip"),
        ("Per1x32QuantHip", "per_1x32_mx_quant_hip"),
        ("PerTensorQuant", "per_tensor_quant"),
        ("PerTokenQuant", "pertoken_quant"),
        ("Per1x32F4Quant", "per_1x32_f4_quant"),
    ],
)
def test_a_quantiser_got_by_its_kind_is_the_one_of_its_name(protocol: str, function: str) -> None:
    assert QUANT.call_signatures(protocol) == QUANT.signatures(function)


def test_the_quantiser_of_groups_is_bound_to_128() -> None:
    def by_name(parameters: Signature) -> list[str]:
        return [parameter.name for parameter in parameters]

    (group,) = QUANT.signatures("per_group_quant_hip")
    (size,) = (parameter.default for parameter in group if parameter.name == "group_size")
    assert size == "128"
    assert QUANT.call_signatures("Per1x128QuantHip") == [bound(group, "group_size")]
    assert "group_size" not in by_name(QUANT.call_signatures("Per1x128QuantHip")[0])

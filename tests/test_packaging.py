"""What the package promises as a whole: its rooms, its names, its manners, and what is in its wheel."""

import ast
import enum
import importlib
import inspect
import itertools
import pkgutil
import re
import subprocess
import sys
import tomllib
import zipfile
from abc import ABCMeta
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from jaxtyping import AbstractDtype
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moe_typed

ROOT: Final = Path(__file__).parents[1]
SOURCE: Final = ROOT / "src" / "moe_typed"
FILES: Final = sorted(SOURCE.rglob("*.py"))

# Who may know whom: a room knows those on the lines above its own, and itself.
LEVELS: Final = (
    ("ops",),
    ("boundary",),
    ("formats",),
    ("routing",),
    ("stages",),
    ("runners",),
    ("table",),
    ("experts",),
    ("dispatchers",),
    ("plan",),
    ("capture", "checkpoints", "integrations", "tuning"),
    ("cli",),
)
LEVEL: Final = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
KNOWS_NO_ROOM: Final = ("ops", "boundary")

BACKENDS: Final = ("aiter", "cattrs", "deep_ep", "deep_gemm", "mori", "rich", "safetensors", "sglang", "torch_npu", "transformers", "triton", "vllm")

per_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def rooms_known_to(path: Path) -> Iterator[str]:
    """Yield the room behind every import of the package itself, those inside functions and under TYPE_CHECKING too."""
    package = ("moe_typed", *path.relative_to(SOURCE).parent.parts)
    for node in ast.walk(parse(path)):
        match node:
            case ast.ImportFrom(module, names, level):
                start = package[: len(package) - level + 1] if level else ()
                target = (*start, *(module.split(".") if module else ()))
                if target[0] == "moe_typed":
                    yield from (target[1],) if len(target) > 1 else (alias.name for alias in names)
            case ast.Import(names):
                yield from (alias.name.split(".")[1] for alias in names if alias.name.startswith("moe_typed."))
            case _:
                pass


class TestRooms:
    @per_file
    def test_imports_point_downward(self, path: Path) -> None:
        room = room_of(path)
        if room == "__init__":
            return
        allowed = {known for known, level in LEVEL.items() if level < LEVEL[room]} if room not in KNOWS_NO_ROOM else set[str]()
        assert set(rooms_known_to(path)) - {room} <= allowed

    def test_every_room_has_its_place(self) -> None:
        assert {room_of(path) for path in FILES} - {"__init__"} <= LEVEL.keys()

    def test_a_fresh_import_loads_no_backend(self) -> None:
        program = f"import sys, moe_typed; print(*sorted(set({BACKENDS!r}) & set(sys.modules)))"
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split() == []


class TestNames:
    def test_each_public_name_is_there_and_listed_once(self) -> None:
        """Their order is RUF022's business."""
        assert len(moe_typed.__all__) == len(set(moe_typed.__all__))
        assert all(inspect.getattr_static(moe_typed, name, None) is not None for name in moe_typed.__all__)

    def test_the_package_imports_what_it_exports_and_nothing_else(self) -> None:
        imported = [
            alias.asname or alias.name for node in parse(SOURCE / "__init__.py").body if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
        assert sorted(imported) == sorted(moe_typed.__all__)

    def test_no_object_has_two_public_names(self) -> None:
        objects = [id(getattr(moe_typed, name)) for name in moe_typed.__all__]
        assert len(objects) == len(set(objects))

    def test_each_room_lists_what_it_offers(self) -> None:
        for path in SOURCE.glob("*/__init__.py"):
            room = importlib.import_module(f"moe_typed.{path.parent.name}")
            listed: list[str] = getattr(room, "__all__", [])
            assert len(listed) == len(set(listed))
            assert all(inspect.getattr_static(room, name, None) is not None for name in listed), room

    def test_the_version_is_the_distribution_s(self) -> None:
        assert moe_typed.__version__ == project()["version"]


def public_classes() -> set[type]:
    modules = [importlib.import_module(info.name) for info in pkgutil.walk_packages(moe_typed.__path__, "moe_typed.")]
    found = itertools.chain.from_iterable(vars(module).values() for module in modules)
    return {cls for cls in found if isinstance(cls, type) and cls.__module__.startswith("moe_typed.") and not cls.__name__.startswith("_")}


class TestManners:
    def test_a_class_is_abstract_or_final(self) -> None:
        """Enumerations and records are final by kind, names of dtypes have no instances, the root of a tree of errors is abstract without ABC."""
        for cls in public_classes():
            is_final = "__final__" in vars(cls) or issubclass(cls, enum.Enum | tuple | AbstractDtype)
            is_abstract = isinstance(cls, ABCMeta) or (issubclass(cls, Exception) and bool(cls.__subclasses__()))
            assert is_final or is_abstract, cls
            assert not (is_final and cls.__subclasses__()), cls

    @per_file
    def test_nothing_depends_on_assert_or_probes_for_attributes(self, path: Path) -> None:
        for node in ast.walk(parse(path)):
            assert not isinstance(node, ast.Assert), node.lineno
            assert not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr"), node.lineno

    @per_file
    def test_every_public_class_and_function_says_what_it_is(self, path: Path) -> None:
        tree = parse(path)
        assert ast.get_docstring(tree)
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                is_overload = any(isinstance(decorator, ast.Name) and decorator.id == "overload" for decorator in node.decorator_list)
                assert is_overload or ast.get_docstring(node), f"{node.name}, line {node.lineno}"


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


class TestDistribution:
    def test_the_wheel_holds_the_package_with_its_type_marker(self, tmp_path: Path) -> None:
        subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True, capture_output=True)
        (wheel,) = tmp_path.glob("*.whl")
        names = set(zipfile.ZipFile(wheel).namelist())
        assert "moe_typed/py.typed" in names
        assert {str(path.relative_to(SOURCE.parent)) for path in FILES} <= names
        assert {name.split("/")[0] for name in names} == {"moe_typed", f"moe_typed-{moe_typed.__version__}.dist-info"}

    def test_ci_pins_every_direct_dependency_within_its_range(self) -> None:
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        pins = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", "\n".join(lines), re.MULTILINE)}
        extras = project()["optional-dependencies"]
        for text in (*project()["dependencies"], *itertools.chain.from_iterable(extras.values())):
            requirement = Requirement(text)
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text

    def test_the_readme_and_ci_agree_on_the_command_that_passes_the_tests(self) -> None:
        command = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
        assert "nox" in command
        assert f"```console\n{command}\n```" in (ROOT / "README.md").read_text()

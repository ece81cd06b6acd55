"""What belongs to one library or mode does not type where another's belongs: every pair of classes, in both checkers.

One module is written with a line for each pair. Where both are the same the line must pass; all others must be refused, in words that name both.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, TypeAlias, get_args, get_origin, get_type_hints

import pytest

from moe_typed import stages
from moe_typed.boundary import fields_of
from moe_typed.boundary.fields import ClassSpec
from moe_typed.stages import CombineInput, DispatchOutput, Handle
from moe_typed.table import ROWS
from tests.typing.checkers import CHECKERS, Checker, Messages, run

Pair: TypeAlias = tuple[str, str, str]
"""What kind of pair, what is given, and where."""

OUTPUTS: Final = tuple(dict.fromkeys(row.key[0] for row in ROWS))
COMBINES: Final = tuple(dict.fromkeys(row.ends_at for row in ROWS))
COUNTS: Final = ("ReceivedPerExpert", "PaddedReceivedPerExpert", "PaddedPrefixSum", "SegmentEnds", "DeviceCount")


def finals(base: type) -> tuple[type, ...]:
    below: list[type] = base.__subclasses__()
    return tuple(cls for cls in below if cls.__module__.startswith("moe_typed.") and not cls.__subclasses__())


HANDLES: Final = finals(Handle)


def written(hint: object) -> str:
    """Return an annotation as a module writes it."""
    arguments = ", ".join(written(argument) for argument in get_args(hint))
    origin = get_origin(hint) or hint
    name = str(getattr(origin, "__name__"))  # noqa: B009  not every hint has one
    return f"{name}[{arguments}]" if arguments else name


def with_handle(cls: type) -> bool:
    return any(field.name == "handle" for field in fields_of(cls))


def call(cls: type, value: str, field: str, other: str) -> str:
    """Return the source that builds a class from the fields of an object of it, one of them another."""
    arguments = (other if item.name == field else f"{value}.{item.name}" for item in fields_of(cls))
    return f"{cls.__name__}({', '.join(arguments)})"


def declared(cls: type) -> str:
    return f"{cls.__name__}[Bf16Rows]" if issubclass(cls, DispatchOutput) else cls.__name__


def lines() -> Iterator[tuple[Pair, bool, str]]:
    """Yield each pair, whether it fits, and its line of source."""
    number = 0

    def line(parameters: str, expression: str) -> str:
        nonlocal number
        number += 1
        return f"def case_{number}({parameters}) -> object: return {expression}"

    for taken in COMBINES:  # what a dispatcher's combine takes
        dispatcher = f"dispatcher: Dispatcher[Bf16Rows, Bf16Rows, {taken.__name__}, PhysicalIds]"
        for made in COMBINES:
            source = line(f"{dispatcher}, made: {made.__name__}", "dispatcher.combine(made)")
            yield ("combine", made.__name__, taken.__name__), made is taken, source
    for cls in (*OUTPUTS, *COMBINES):
        if with_handle(cls):
            own = next(field for field in fields_of(cls) if field.name == "handle").declared
            for handle in HANDLES:
                source = line(f"made: {declared(cls)}, handle: {handle.__name__}", call(cls, "made", "handle", "handle"))
                yield ("handle", handle.__name__, f"{cls.__name__} ({own})"), own == handle.__name__, source
    for row in {row.functions[0]: row for row in ROWS}.values():  # the way to a runner
        pre = row.functions[0]
        for variant in OUTPUTS:
            source = line(f"made: {declared(variant)}", f"{pre.__name__}(made)")
            yield ("pre", variant.__name__, f"{pre.__name__} ({row.key[0].__name__})"), variant is row.key[0], source
    carries = tuple(dict.fromkeys(get_args(get_type_hints(row.functions[0])["return"])[1] for row in ROWS))
    for post in dict.fromkeys(row.functions[1] for row in ROWS):  # the way home
        output, own = (written(hint) for hint in [*get_type_hints(post).values()][:2])
        for carry in carries:
            given = written(carry)
            source = line(f"output: {output}, carry: {given}", f"{post.__name__}(output, carry)")
            yield ("carry", given, f"{post.__name__} ({own})"), given == own, source
    for cls in OUTPUTS:  # how many rows came
        for field in fields_of(cls):
            if field.name in ("received", "segments"):
                assert isinstance(field.spec, ClassSpec)
                own = next(name for name in COUNTS if name in [held.__name__ for held in field.spec.classes])
                for name in COUNTS:
                    source = line(f"made: {declared(cls)}, counts: {name}", call(cls, "made", field.name, "counts"))
                    yield ("counts", name, f"{cls.__name__}.{field.name} ({own})"), name == own, source
    for name in COUNTS:
        source = line(f"ids: Tensor, counts: {name}", "Routing(ids, ids, PhysicalIds, 8, Settled(), True, counts)")
        yield ("counts", name, "Routing.live (DeviceCount)"), name == "DeviceCount", source


LINES: Final = tuple(lines())
FUNCTIONS: Final = tuple(dict.fromkeys(function for row in ROWS for function in row.functions))
NAMES: Final = frozenset(re.findall(r"\w+", " ".join(source for _, _, source in LINES)))
HEAD: Final = (
    "from torch import Tensor",
    "from moe_typed import Bf16Rows, DeviceCount, Dispatcher, PhysicalIds, Routing, Settled",
    f"from moe_typed.stages import {', '.join(name for name in stages.__all__ if name in NAMES)}",
    *(f"from {function.__module__} import {function.__name__}" for function in FUNCTIONS),
)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Checker, Messages]:
    folder: Path = tmp_path_factory.mktemp("foreign")
    (folder / "pairs.py").write_text("\n".join([*HEAD, *(source for _, _, source in LINES)]) + "\n")
    return run(folder, tmp_path_factory.mktemp("pyright"))


def errors(said: Mapping[Checker, Messages], checker: Checker) -> dict[int, str]:
    return {line: "\n".join(texts) for (_, line), texts in said[checker].items()}


@pytest.mark.parametrize("checker", CHECKERS)
def test_a_pair_types_where_it_fits_and_nowhere_else(said: Mapping[Checker, Messages], checker: Checker) -> None:
    found = errors(said, checker)
    expected = {number for number, (_, fits, _) in enumerate(LINES, len(HEAD) + 1) if not fits}
    assert {number: LINES[number - len(HEAD) - 1] for number in found.keys() ^ expected if number > len(HEAD)} == {}
    assert found.keys() == expected


@pytest.mark.parametrize("checker", CHECKERS)
def test_the_message_names_what_is_given(said: Mapping[Checker, Messages], checker: Checker) -> None:
    found = errors(said, checker)
    for number, ((_, given, _), fits, source) in enumerate(LINES, len(HEAD) + 1):
        assert fits or given in found[number], source


@pytest.mark.parametrize("kind", ["combine", "handle", "pre", "carry", "counts"])
def test_pairs_of_every_kind_fit_and_do_not(kind: str) -> None:
    assert {fits for (found, _, _), fits, _ in LINES if found == kind} == {True, False}


def test_no_class_is_left_out() -> None:
    assert {cls.__name__ for cls in (*OUTPUTS, *COMBINES, *HANDLES)} <= {*stages.__all__}
    assert set(finals(CombineInput)) <= set(COMBINES)

"""What must not type does not, in both checkers, and they say why in words that help."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.typing.checkers import CHECKERS, Checker, Messages, compare, expected, run

MUST_FAIL = Path(__file__).parent / "must_fail"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Mapping[Checker, Messages]:
    return run(MUST_FAIL, tmp_path_factory.mktemp("pyright"))


@pytest.mark.parametrize("file", sorted(path.name for path in MUST_FAIL.glob("*.py")))
@pytest.mark.parametrize("checker", CHECKERS)
def test_every_bad_line_is_refused_and_no_other(said: Mapping[Checker, Messages], checker: Checker, file: str) -> None:
    def of_file(messages: Messages) -> Messages:
        return {place: texts for place, texts in messages.items() if place[0] == file}

    demanded = of_file(expected(MUST_FAIL)[checker])
    assert demanded
    assert compare(of_file(said[checker]), demanded) == []


def test_every_function_of_a_case_is_wrong_somewhere() -> None:
    """A case without an expectation would be no case."""
    places = expected(MUST_FAIL)["mypy"]
    for path in MUST_FAIL.glob("*.py"):
        lines = path.read_text().splitlines()
        starts = [number for number, line in enumerate(lines, 1) if line.startswith("def ")]
        for start, end in zip(starts, [*starts[1:], len(lines) + 1], strict=True):
            is_helper = "..." in lines[start - 1] or "raise NotImplementedError" in lines[start]
            assert is_helper or any((path.name, line) in places for line in range(start, end)), f"{path.name}:{start}"


def test_compare_finds_what_is_unexpected_and_what_is_missing() -> None:
    said: Messages = {("a.py", 1): ["bad thing"], ("a.py", 2): ["worse thing"]}
    assert compare(said, said) == []
    assert compare(said, {("a.py", 1): ["bad"]}) == ["a.py:2: unexpected: worse thing"]
    assert compare({}, {("a.py", 1): ["bad"]}) == ["a.py:1: missing: bad"]
    assert compare(said, {("a.py", 1): ["good"], ("a.py", 2): ["worse"]}) == ["a.py:1: unexpected: bad thing", "a.py:1: missing: good"]


def test_expectations_stand_for_the_line_of_code_above_them(tmp_path: Path) -> None:
    text = 'x: int = ""  # E: both\n\ny: int = ""\n\n# E: mypy alone\n# P: -\nz: int = ""\n# E: one\n# P: other\n'
    (tmp_path / "case.py").write_text(text)
    found = expected(tmp_path)
    assert found["mypy"] == {("case.py", 1): ["both"], ("case.py", 3): ["mypy alone"], ("case.py", 7): ["one"]}
    assert found["pyright"] == {("case.py", 1): ["both"], ("case.py", 7): ["other"]}

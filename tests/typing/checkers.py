"""Run mypy and pyright over a directory of cases, and read what they say and what was expected of them."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, Literal, TypeAlias, cast

ROOT: Final = Path(__file__).parents[2]

Checker: TypeAlias = Literal["mypy", "pyright"]
Place: TypeAlias = tuple[str, int]
Messages: TypeAlias = Mapping[Place, list[str]]

CHECKERS: Final[tuple[Checker, ...]] = ("mypy", "pyright")

_EXPECTATION: Final = re.compile(r"#\s*(?P<mark>[EP]): (?P<text>.+)$")
_SILENT: Final = "-"


def run(cases: Path, scratch: Path) -> Mapping[Checker, Messages]:
    """Return the errors that each checker reports in the files of ``cases``, both under the project's own settings.

    ``scratch``: an empty directory for pyright's configuration. The two run side by side. Raises: RuntimeError when a checker breaks down.
    """
    configuration = {"extends": str(ROOT / "pyproject.toml"), "include": [os.path.relpath(cases, scratch)], "exclude": []}
    (scratch / "pyrightconfig.json").write_text(json.dumps(configuration))
    files = sorted(map(str, cases.glob("*.py")))
    mypy = _start("mypy", "--output", "json", "--no-error-summary", *files)
    pyright = _start("pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(scratch))
    return {"mypy": _collect(_mypy_errors(_finish(mypy))), "pyright": _collect(_pyright_errors(_finish(pyright), len(files)))}


def expected(cases: Path) -> Mapping[Checker, Messages]:
    """Return what the comments in the files of ``cases`` demand.

    ``# E: text`` demands an error of mypy whose message holds ``text``, on the nearest line of code at or above the comment; ``# P: text`` an
    error of pyright, which must say the same as mypy where there is no ``# P:``. Every error needs its comment. A dash says that the checker
    sees nothing.
    """
    found: dict[Checker, dict[Place, list[str]]] = {"mypy": {}, "pyright": {}}
    for path in sorted(cases.glob("*.py")):
        marks: dict[int, dict[str, list[str]]] = {}
        line_of_code = 0
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line.strip() and not line.lstrip().startswith("#"):
                line_of_code = number
            if (match := _EXPECTATION.search(line)) is not None:
                marks.setdefault(line_of_code, {}).setdefault(match["mark"], []).append(match["text"])
        for number, texts in marks.items():
            mypy = texts.get("E", [])
            for checker, demanded in (("mypy", mypy), ("pyright", texts.get("P", mypy))):
                if demanded != [_SILENT]:
                    found[cast("Checker", checker)][path.name, number] = demanded
    return found


def compare(said: Messages, demanded: Messages) -> list[str]:
    """Return one line for each error that nobody expected, and one for each expectation that no error meets."""
    faults: list[str] = []
    for place in sorted({*said, *demanded}):
        messages, texts = said.get(place, []), demanded.get(place, [])
        name, number = place
        faults += [f"{name}:{number}: unexpected: {message}" for message in messages if not any(text in message for text in texts)]
        faults += [f"{name}:{number}: missing: {text}" for text in texts if not any(text in message for message in messages)]
    return faults


def _start(module: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _finish(process: subprocess.Popen[str]) -> str:
    output, complaints = process.communicate()
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{output}{complaints}")
    return output


def _mypy_errors(output: str) -> Iterator[tuple[Place, str]]:
    for line in output.splitlines():
        error = json.loads(line)
        if error["severity"] == "error":
            yield (Path(error["file"]).name, error["line"]), error["message"]


def _pyright_errors(output: str, files: int) -> Iterator[tuple[Place, str]]:
    report = json.loads(output)
    if report["summary"]["filesAnalyzed"] < files:
        raise RuntimeError(f"pyright looked at {report['summary']['filesAnalyzed']} of {files} files")
    for error in report["generalDiagnostics"]:
        # pyright indents the lines of its explanations with no-break spaces
        yield (Path(error["file"]).name, error["range"]["start"]["line"] + 1), error["message"].replace("\xa0", " ")


def _collect(errors: Iterator[tuple[Place, str]]) -> Messages:
    found: defaultdict[Place, list[str]] = defaultdict(list)
    for place, message in errors:
        found[place].append(message)
    return found

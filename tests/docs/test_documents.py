"""The documentation runs: its Python is executed, its commands are run, and its generated parts are what the code says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

from docs import generate

ROOT = Path(__file__).parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
CONSOLE = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


def names(pages: tuple[Path, ...]) -> list[str]:
    return [page.name for page in pages]


def commands() -> list[str]:
    blocks = (block for page in PAGES for block in CONSOLE.findall(page.read_text()))
    lines = (line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ moe-typed"))
    return list(dict.fromkeys(lines))


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_python_of_a_page_runs(page: Path) -> None:
    document = Sybil(parsers=[PythonCodeBlockParser()], path=str(ROOT)).parse(page)
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_generated_parts_of_a_page_are_current(page: Path) -> None:
    text = page.read_text()
    assert generate.rewrite(text) == text, "run: python -m docs.generate"


@pytest.mark.parametrize("command", commands())
def test_a_command_of_a_page_runs(command: str, tmp_path: Path) -> None:
    program, *arguments = shlex.split(command)
    assert program == "moe-typed"
    done = subprocess.run([sys.executable, "-m", "moe_typed.cli.main", *arguments], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target

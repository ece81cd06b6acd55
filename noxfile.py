"""The project's jobs. Plain ``nox`` runs what CI runs; ``nox -s bench coverage`` the rest; ``nox -R`` skips the installation.

All jobs share one environment, since torch alone takes half a minute and up to several gigabytes for each.
"""

import functools
import os
from pathlib import Path
from typing import Final

import nox

nox.needs_version = ">=2025.5"
nox.options.sessions = ["lint", "typecheck", "tests", "docs"]

BIN: Final = Path(__file__).parent / ".nox" / "environment" / "bin"
EXTRAS: Final = "docs,lint,test,transformers,triton,typecheck"

# The pyright of the wheel and the Node of the wheel: nothing is asked of a registry, and a newer release is not announced.
PYRIGHT: Final[dict[str, str | None]] = {
    "PYRIGHT_PYTHON_FORCE_VERSION": None,
    "PYRIGHT_PYTHON_PYLANCE_VERSION": None,
    "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
}

# Workers share the cores already.
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1"}
WITHOUT_TYPING: Final = ("--ignore=tests/typing", "--ignore=tests/docs")

job = functools.partial(nox.session, venv_backend="none", requires=["environment"])


def python(session: nox.Session, *arguments: str, env: dict[str, str | None] | None = None) -> None:
    """Run the environment's Python, with the environment's programs first on the path."""
    path = os.pathsep.join([str(BIN), os.environ.get("PATH", os.defpath)])
    session.run(str(BIN / "python"), *arguments, env={"PATH": path, "MOE_TYPED_DEBUG": None, **(env or {})})


@nox.session(reuse_venv=True, default=False)
def environment(session: nox.Session) -> None:
    """Install the project and every tool that a job needs."""
    session.install("-c", "constraints.txt", "-e", f".[{EXTRAS}]")


@job()
def lint(session: nox.Session) -> None:
    """Check style and formatting."""
    python(session, "-m", "ruff", "check", ".")
    python(session, "-m", "ruff", "format", "--check", ".")


@job()
def typecheck(session: nox.Session) -> None:
    """Run mypy and pyright, both strict, over all code; then show that what must not type does not."""
    python(session, "-m", "mypy")
    python(session, "-m", "pyright", env=PYRIGHT)
    python(session, "-m", "pytest", "tests/typing", env=PYRIGHT)


@job()
def tests(session: nox.Session) -> None:
    """Run the tests: as they are, with every boundary judged by the oracle, and what they say of errors without ``assert``."""
    if session.posargs:
        python(session, "-m", "pytest", *session.posargs)
        return
    pytest = ("-m", "pytest", "-n", "auto", *WITHOUT_TYPING)
    python(session, *pytest, env={**ONE_THREAD})
    # The boundary's own tests set the level themselves, and those of kernels and of the package do not build any.
    without = [f"--ignore=tests/{name}" for name in ("boundary", "ops", "test_packaging.py")]
    python(session, *pytest, *without, env={**ONE_THREAD, "MOE_TYPED_DEBUG": "strict"})
    unasserted = "ignore:assertions not in test modules:pytest.PytestConfigWarning"  # the tests' own are rewritten, and hold
    python(session, "-O", *pytest, "-W", unasserted, "-k", "error or refuse or reject or raise", env={**ONE_THREAD})


@job()
def docs(session: nox.Session) -> None:
    """Run what the documentation shows."""
    if not Path("tests/docs").is_dir():
        session.skip("there are no tests of the documentation yet")
    python(session, "-m", "pytest", "tests/docs")


@job(default=False)
def bench(session: nox.Session) -> None:
    """Run the benchmarks, and keep the figures of those that end in ``_cuda``, which need a GPU, where the documentation takes them from."""
    has_gpu = any(Path("/dev").glob("nvidia[0-9]*"))
    for script in sorted(Path("benchmarks").glob("[!_]*.py")):
        on_gpu = script.stem.endswith("_cuda")
        if on_gpu and not has_gpu:
            session.log(f"{script} needs a GPU")
            continue
        python(session, "-m", f"benchmarks.{script.stem}", *(("--results", "benchmarks/results") if on_gpu else ()), *session.posargs)


@job(default=False)
def coverage(session: nox.Session) -> None:
    """Measure which lines and branches the tests reach."""
    python(session, "-m", "pytest", "-n", "auto", *WITHOUT_TYPING, "--cov", "--cov-report=term:skip-covered", *session.posargs, env={**ONE_THREAD})

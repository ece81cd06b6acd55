"""Wheels that are read and never installed: fetched by pip at the version that constraints.txt pins.

Whoever has no network says so by ``MOE_TYPED_OFFLINE=1``, and the tests that need a wheel are skipped. For all others a wheel that does not come is a
failure, so that what is compared with it is compared wherever it is not said otherwise.
"""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Final

import pytest

from tests.typing.checkers import ROOT

OFFLINE: Final = "MOE_TYPED_OFFLINE"
_TIMEOUT: Final = 180  # seconds for 40 MB, retries included


def pinned(distribution: str) -> str:
    """Return the version of a distribution in constraints.txt."""
    (version,) = re.findall(rf"^{re.escape(distribution)}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(version)


def needs(distribution: str) -> None:
    """Skip the test where there is no network, by the word of whoever runs it."""
    if os.environ.get(OFFLINE):
        pytest.skip(f"{OFFLINE} is set, and {distribution} would have to be fetched")


def fetch(distribution: str, folder: Path) -> zipfile.ZipFile:
    """Return the wheel of a distribution. Raises: RuntimeError when it does not come."""
    requirement = f"{distribution}=={pinned(distribution)}"
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    patient = ("--retries", "3", "--timeout", "30")
    command = [sys.executable, "-m", "pip", "download", *quiet, *patient, "--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{requirement} did not come in {_TIMEOUT} s. Without a network, set {OFFLINE}=1.") from None
    if done.returncode:
        raise RuntimeError(f"{requirement} did not come. Without a network, set {OFFLINE}=1. pip says:\n{done.stderr}")
    (wheel,) = folder.glob("*.whl")
    return zipfile.ZipFile(wheel)

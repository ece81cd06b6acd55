"""An owner of handles, which ends those that a test leaves open."""

from collections.abc import Iterator

import pytest

from tests.stages.support import Owner


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.close()

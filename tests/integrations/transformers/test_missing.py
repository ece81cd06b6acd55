"""What registering says where transformers is missing, and where it is there but lacks something itself."""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
from typing_extensions import override

from moe_typed.integrations.transformers import register

FP8 = "transformers.integrations.finegrained_fp8"


class Lacking(importlib.abc.MetaPathFinder):
    """Find no module of the fp8 experts, since another module is not there."""

    def __init__(self, lacks: str) -> None:
        self.lacks = lacks

    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> importlib.machinery.ModuleSpec | None:
        if fullname == FP8:
            raise ModuleNotFoundError(f"No module named {self.lacks!r}", name=self.lacks)
        return None


@pytest.mark.parametrize(("lacks", "text"), [("httpx2", "No module named 'httpx2'"), (FP8, "needs transformers 5.17 or later")])
def test_the_error_names_what_is_missing(lacks: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, FP8, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Lacking(lacks), *sys.meta_path])
    with pytest.raises(ImportError, match=text):
        register()

"""Operators are imported when they are asked for, and what is missing is named."""

import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from moe_typed.runners.ascend.ops import ZeroLedGroupListType, load_extension_ops, load_ops

BACKENDS = ("torch_npu", "sgl_kernel_npu", "deep_ep")


def install(folder: Path, **modules: str) -> None:
    """Write packages: a module's dots are double underscores in its name."""
    for name, source in modules.items():
        file = folder.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in [parent for parent in file.parents if folder in parent.parents]:
            (package / "__init__.py").touch()
        file.write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of packages, all that there are of the backends."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    importlib.invalidate_caches()
    before = dict(sys.modules)
    for name in before:
        if name.split(".")[0] in BACKENDS:
            monkeypatch.delitem(sys.modules, name)
    yield tmp_path
    for name in sys.modules.keys() - before.keys():
        if name.split(".")[0] in BACKENDS:
            del sys.modules[name]


def test_the_package_imports_no_backend() -> None:
    code = f"import sys, moe_typed.runners.ascend.ops; sys.exit(any(name.split('.')[0] in {BACKENDS!r} for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_torch_npu_is_missing(site: Path) -> None:
    with pytest.raises(ImportError, match=r"needs torch_npu.*install CANN") as caught:
        load_ops()
    assert caught.value.name == "torch_npu"
    with pytest.raises(ImportError, match="needs torch_npu"):
        load_extension_ops()


def test_what_torch_npu_misses_is_not_torch_npu(site: Path) -> None:
    install(site, torch_npu="import a_library_of_cann")
    with pytest.raises(ModuleNotFoundError, match="a_library_of_cann"):
        load_ops()


def test_torch_npu_s_operators_are_torch_s(site: Path) -> None:
    install(site, torch_npu="imported = True")
    assert load_ops() is torch.ops.npu
    assert "torch_npu" in sys.modules


def test_the_extension_is_missing(site: Path) -> None:
    install(site, torch_npu="")
    with pytest.raises(ImportError, match="need sgl_kernel_npu") as caught:
        load_extension_ops()
    assert caught.value.name == "sgl_kernel_npu"


def test_the_extension_lacks_some(site: Path) -> None:
    """One function is there, one has a module without it, the others have no module."""
    install(site, torch_npu="", sgl_kernel_npu__norm__l1_norm="def l1_norm(input): return input + 1", sgl_kernel_npu__activation__situ="")
    ops = load_extension_ops()
    assert ops.l1_norm(torch.zeros(1)).item() == 1
    rows = torch.zeros(1, 2)
    calls: dict[str, Callable[[], object]] = {
        "situ": lambda: ops.situ(rows, rows, ZeroLedGroupListType.COUNT, need_quant=True),
        "swiglu_quant": lambda: ops.swiglu_quant(rows, rows, ZeroLedGroupListType.COUNT),
        "swiglu_group_quant": lambda: ops.swiglu_group_quant(rows, None, rows),
    }
    for name, call in calls.items():
        with pytest.raises(ImportError, match=f"has no {name};"):
            call()


def test_what_a_function_s_module_misses_is_said(site: Path) -> None:
    install(site, torch_npu="", sgl_kernel_npu__norm__l1_norm="import a_compiler")
    with pytest.raises(ModuleNotFoundError, match="a_compiler"):
        load_extension_ops()

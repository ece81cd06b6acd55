"""What an AITER can do, read from source: of fake packages with each signature, and of a published wheel. None is ever imported."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from moe_typed.plan import Wire, wire_for_aiter
from moe_typed.runners.aiter import AiterFacts, RowBounds, probe_aiter_source, probe_installed_aiter

IMPORTED = 'raise RuntimeError("AITER was imported")\n'
PRODUCERS = {
    "with scale_type": "def per_1x32_mx_quant_hip(x, scale=None, quant_dtype=None, shuffle=False, num_rows=None, scale_type=None): ...\n",
    "with scale_type by name alone": "def per_1x32_mx_quant_hip(x, *, scale_type=None): ...\n",
    "of fp4 alone": "def per_1x32_f4_quant_hip(x, scale=None, quant_dtype=None, shuffle=False, num_rows=None): ...\n",
    "for another group": "def per_group_quant_hip(x, scale_type=None): ...\n",
    "in a torch reference": "def per_1x32_f8_scale_f8_quant(x, scale=None, scale_type=None): ...\n",
    "no Python": "def per_1x32_mx_quant_hip(x, scale_type=None)\n",
}
TAKES = """
def fused_moe_2stages(hidden_states, w1, a1_scale=None):
    if hidden_states.dtype == dtypes.fp8 and {extra}a1_scale is not None:
        a1 = hidden_states
"""
FP4 = "for fp4 rows alone"
CONSUMERS = {
    "with the branch": TAKES.format(extra=""),
    "with the branch among others": TAKES.format(extra="w1.dtype == dtypes.fp4x2 and "),
    FP4: TAKES.format(extra="").replace("dtypes.fp8", "dtypes.fp4x2"),
    "without a look at the scale": "def fused_moe_2stages(hidden_states):\n    if hidden_states.dtype == dtypes.fp8 and True: ...\n",
    "in another function": TAKES.format(extra="").replace("fused_moe_2stages", "fused_moe_1stage"),
}
GOOD_PRODUCERS = ("with scale_type", "with scale_type by name alone")
GOOD_CONSUMERS = ("with the branch", "with the branch among others")


def fake(package: Path, producer: str, consumer: str) -> Path:
    (package / "ops").mkdir(parents=True)
    (package / "__init__.py").write_text(IMPORTED)
    (package / "ops" / "quant.py").write_text("# coding: utf-8\n# µ\n" + PRODUCERS[producer] + IMPORTED, encoding="utf-8")
    (package / "fused_moe.py").write_text(CONSUMERS[consumer] + IMPORTED, encoding="utf-8")
    return package


@pytest.mark.parametrize("producer", PRODUCERS)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_producer_and_consumer_are_asked_apart(tmp_path: Path, producer: str, consumer: str) -> None:
    facts = probe_aiter_source(fake(tmp_path / "aiter", producer, consumer), "1.2.3")
    assert facts == AiterFacts("1.2.3", producer in GOOD_PRODUCERS, consumer in GOOD_CONSUMERS, passes_mxfp4=consumer == FP4)


def test_the_parameters_of_the_call_are_read_of_every_kind(tmp_path: Path) -> None:
    package = fake(tmp_path / "aiter", "of fp4 alone", "with the branch")
    (package / "fused_moe.py").write_text(
        "def fused_moe(hidden_states, /, w1, gate_mode='separated', *, output=None): ...\ndef other(no_combine): ...\n"
    )
    facts = probe_aiter_source(package, "1.2.3")
    assert facts.parameters == {"hidden_states", "w1", "gate_mode", "output"}
    assert (facts.has_gate_modes, facts.takes("output"), facts.takes("no_combine")) == (True, True, False)
    assert not AiterFacts("1.2.3", quantizes_mxfp8=True, passes_mxfp8=True).has_gate_modes


def test_the_bounds_of_rows_are_those_of_the_environment() -> None:
    assert RowBounds.read({}) == RowBounds(256, 256)
    assert RowBounds.read({"AITER_BF16_FP8_MOE_BOUND": "0", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND": "17"}) == RowBounds(fp8=0, fp4=17)
    with pytest.raises(ValueError, match="many"):
        RowBounds.read({"AITER_BF16_FP8_MOE_BOUND": "many"})


@pytest.mark.parametrize("missing", ["ops/quant.py", "fused_moe.py", ""])
def test_files_that_are_not_there_can_do_nothing(tmp_path: Path, missing: str) -> None:
    package = fake(tmp_path / "aiter", "with scale_type", "with the branch")
    if missing:
        (package / missing).unlink()
    else:
        shutil.rmtree(package)
    facts = probe_aiter_source(package, "")
    assert (facts.quantizes_mxfp8, facts.passes_mxfp8) == (missing == "fused_moe.py", missing == "ops/quant.py")


def test_the_encoding_is_the_file_s_own(tmp_path: Path) -> None:
    package = fake(tmp_path / "aiter", "with scale_type", "with the branch")
    (package / "ops" / "quant.py").write_bytes(b"# coding: latin-1\n# \xb5\n" + PRODUCERS["with scale_type"].encode())
    assert probe_aiter_source(package, "").quantizes_mxfp8


# ---- installed -------------------------------------------------------------------------------------------------------------------------


def test_an_installed_one_is_found_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path / "aiter", "with scale_type", "with the branch")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert probe_installed_aiter() == AiterFacts("unknown", quantizes_mxfp8=True, passes_mxfp8=True)
    record = tmp_path / "amd_aiter-9.8.7.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: amd-aiter\nVersion: 9.8.7\n")
    assert probe_installed_aiter() == AiterFacts("9.8.7", quantizes_mxfp8=True, passes_mxfp8=True)
    assert "aiter" not in sys.modules


def test_none_is_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert probe_installed_aiter() is None
    (tmp_path / "aiter.py").write_text(IMPORTED)  # another thing of that name
    sys.path_importer_cache.pop(str(tmp_path), None)
    assert probe_installed_aiter() is None


# ---- published -------------------------------------------------------------------------------------------------------------------------

VERSION = "0.1.7.post2.dev18"
FILES = ("aiter/ops/quant.py", "aiter/fused_moe.py")


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the package folder of a published wheel. Only one test needs it, hence only one worker fetches it."""
    folder = tmp_path_factory.mktemp("published")
    fetch = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--retries", "0", "--timeout", "10"]
    command = [*fetch, "--disable-pip-version-check", "--quiet", "--dest", str(folder), f"amd-aiter=={VERSION}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip(f"amd-aiter {VERSION} did not come from PyPI within a minute")
    if done.returncode:
        pytest.skip(f"amd-aiter {VERSION} cannot be had from PyPI: {done.stderr.strip().splitlines()[-1:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in FILES:
            archive.extract(name, folder)
    wheel.unlink()
    return folder / "aiter"


def test_the_published_one_can_neither(published: Path) -> None:
    """Version 0.1.7 has a per-1x32 quantiser of fp4 alone, and two stages that take fp8 rows with a scale for other groups alone."""
    assert "def per_1x32_f4_quant_hip(" in (published / "ops" / "quant.py").read_text()  # the file was found
    assert "def fused_moe_2stages(" in (published / "fused_moe.py").read_text()
    facts = probe_aiter_source(published, VERSION)
    assert (facts.quantizes_mxfp8, facts.passes_mxfp8, facts.passes_mxfp4, facts.has_gate_modes) == (False, False, False, False)
    assert {"hidden_states", "expert_mask", "num_local_tokens", "bias2"} <= facts.parameters
    assert not {"output", "no_combine", "swiglu_limit", "quant_dtype_a"} & facts.parameters
    assert wire_for_aiter(Wire.MXFP8, facts).wire is Wire.BF16
    assert "aiter" not in sys.modules

"""Loading AITER: once, lazily, with what its functions and its source say; and a clear word where it is missing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_typed.runners.aiter import gfx_of

QUANT = """
def get_hip_quant(qType):
    def per_1x32_mx_quant_hip(x, scale=None, {scale_type}): ...
    return per_1x32_mx_quant_hip
"""
INIT = """
import os
from types import SimpleNamespace
print("imported")
ActivationType = SimpleNamespace(Silu="silu", Swiglu="swiglu")
QuantType = SimpleNamespace(No=0, per_Tensor=1, per_Token=2, per_1x32=3, per_128x128=5)
from .ops.quant import get_hip_quant
"""
MOE = """
def fused_moe(hidden_states, w1, w2, topk_weight, topk_ids, gate_mode="separated", *, output=None):
    return "called"
def fused_moe_2stages(hidden_states, a1_scale):
    if hidden_states.dtype == dtypes.fp4x2 and a1_scale is not None: ...
"""


def install(folder: Path, scale_type: str) -> None:
    (folder / "aiter" / "ops").mkdir(parents=True)
    (folder / "aiter" / "__init__.py").write_text(INIT)
    (folder / "aiter" / "ops" / "__init__.py").write_text("")
    (folder / "aiter" / "ops" / "quant.py").write_text(QUANT.format(scale_type=scale_type))
    (folder / "aiter" / "fused_moe.py").write_text(MOE)


def python(source: str, *folders: Path) -> str:
    program = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]!r}; {source}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_importing_the_package_and_its_acceptance_table_imports_no_aiter(tmp_path: Path) -> None:
    install(tmp_path, "scale_type=None")
    assert python("import moe_typed, moe_typed.runners.acceptance, moe_typed.runners.aiter; print('aiter' in sys.modules)", tmp_path) == "False\n"


@pytest.mark.parametrize("scale_type", ["scale_type=None", "shuffle=False"])
def test_it_is_imported_once_and_asked_for_its_facts(tmp_path: Path, scale_type: str) -> None:
    install(tmp_path, scale_type)
    source = (
        "from moe_typed import load_aiter; library = load_aiter(); assert load_aiter() is library; facts = library.facts;"
        "print(facts.version, facts.quantizes_mxfp8, facts.passes_mxfp8, facts.passes_mxfp4, sorted(facts.parameters), facts.gfx, facts.bounds.fp8);"
        "print(library.silu, library.swiglu, library.no_quant, library.per_1x32, library.fused_moe(1, 2, 3, 4, 5))"
    )
    parameters = ["gate_mode", "hidden_states", "output", "topk_ids", "topk_weight", "w1", "w2"]
    quantizes = scale_type == "scale_type=None"
    expected = f"imported\nunknown {quantizes} False True {parameters} {gfx_of(None)} 256\nsilu swiglu 0 3 called\n"
    assert python(source, tmp_path) == expected


def test_a_missing_aiter_is_named_with_the_way_to_install_it() -> None:
    source = "from moe_typed import *; import torch; w = torch.zeros(1, 64, 32).bfloat16(); w2 = torch.zeros(1, 32, 32).bfloat16();"
    said = python(source + "prepare_aiter(Bf16ExpertWeights(w, w2, GateUp))")
    assert "ImportError: the AITER runner needs AITER: pip install amd-aiter" in said


@pytest.mark.skipif(torch.version.hip is not None, reason="this is an AMD machine")
def test_a_device_of_another_maker_has_no_gfx() -> None:
    assert gfx_of(None) is None

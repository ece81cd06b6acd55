"""What an installed AITER can do with mxfp8, read from its source without importing it (importing it builds extensions).

Two questions, and both must be yes. Can the producer quantise to e8m0 scales: does its per-1x32 quantiser take ``scale_type``? Without it, it returns
float32 scales, which the kernel reads as e8m0 bytes: garbage, and no exception. And does the consumer take rows that are quantised already: does
``fused_moe_2stages`` ask for fp8 hidden states with a scale? Where it does not, it drops the scale or quantises again. A signature tells the first
alone; there are versions in which the first is true and the second is not.
"""

import ast
import importlib.util
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final, final

import attrs

from .problem import Wire
from .report import Degradation

_PACKAGE: Final = "aiter"
_DISTRIBUTION: Final = "amd-aiter"
_QUANTISERS: Final = ("per_1x32_mx_quant_hip", "per_1x32_f4_quant_hip")


@final
@attrs.frozen
class AiterFacts:
    """What one AITER can do."""

    version: str
    quantizes_mxfp8: bool
    passes_mxfp8: bool


def probe_installed_aiter() -> AiterFacts | None:
    """Return the facts of the installed AITER; None where there is none. Imports nothing of it."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        version = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = "unknown"
    return probe_aiter_source(Path(spec.submodule_search_locations[0]), version)


def probe_aiter_source(package: Path, version: str) -> AiterFacts:
    """Return the facts of an AITER by its package folder. What is not there, or is not Python, can do nothing."""
    return AiterFacts(version, _quantizes_mxfp8(package / "ops" / "quant.py"), _passes_mxfp8(package / "fused_moe.py"))


def _functions(file: Path) -> Iterator[ast.FunctionDef]:
    try:
        module = ast.parse(file.read_bytes())  # bytes, as the source says itself how it is encoded
    except (FileNotFoundError, SyntaxError):
        return
    yield from (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))


def _quantizes_mxfp8(file: Path) -> bool:
    """Say whether a per-1x32 quantiser takes ``scale_type``."""
    parameters = (
        argument.arg for function in _functions(file) if function.name in _QUANTISERS for argument in (*function.args.args, *function.args.kwonlyargs)
    )
    return "scale_type" in parameters


def _passes_mxfp8(file: Path) -> bool:
    """Say whether ``fused_moe_2stages`` has a branch for fp8 hidden states that come with a scale."""
    tests = (
        node
        for function in _functions(file)
        if function.name == "fused_moe_2stages"
        for node in ast.walk(function)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)
    )
    return any(_asks(test, "hidden_states.dtype == dtypes.fp8") and _asks(test, "a1_scale is not None") for test in tests)


def _asks(test: ast.BoolOp, question: str) -> bool:
    wanted = ast.dump(ast.parse(question, mode="eval").body)
    return any(ast.dump(node) == wanted for value in test.values for node in ast.walk(value))


@final
@attrs.frozen
class WireDecision:
    """The wire that is sent, and what was given up for it."""

    wire: Wire
    degradation: Degradation | None


def wire_for_aiter(asked: Wire, facts: AiterFacts | None) -> WireDecision:
    """Return the wire to send to AITER's experts: mxfp8 falls back to bf16 where the installed AITER would misread it.

    ``facts`` None: no AITER is installed. The caller records the degradation in its plan, and logs it.
    """
    if asked is not Wire.MXFP8:
        return WireDecision(asked, None)
    if facts is None:
        lacks = "no AITER is installed"
    elif not facts.quantizes_mxfp8:
        lacks = f"AITER {facts.version} has no scale_type in its per-1x32 quantiser, and would send float32 scales"
    elif not facts.passes_mxfp8:
        lacks = f"AITER {facts.version} does not take hidden states that are mxfp8 already, and would drop their scales"
    else:
        return WireDecision(asked, None)
    return WireDecision(Wire.BF16, Degradation(subject="wire", preferred=Wire.MXFP8.value, used=Wire.BF16.value, detail=lacks))

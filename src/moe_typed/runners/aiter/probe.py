"""What an AITER can do: read from its source without importing it (importing it builds extensions), which is all that a plan needs.

Of mxfp8 rows two questions must both be answered yes. Can the producer quantise to e8m0 scales: does its per-1x32 quantiser take ``scale_type``?
Without it, it returns float32 scales, which the kernel reads as e8m0 bytes: garbage, and no exception. And does the consumer take rows that are
quantised already: does ``fused_moe_2stages`` ask for fp8 hidden states with a scale? Where it does not, it drops the scale or quantises again. A
signature tells the first alone; there are versions in which the first is true and the second is not.
"""

import ast
import importlib.util
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, final

import attrs

PACKAGE: Final = "aiter"
_DISTRIBUTION: Final = "amd-aiter"
_QUANTISERS: Final = ("per_1x32_mx_quant_hip", "per_1x32_f4_quant_hip")

_DEFAULT_BOUND: Final = 256  # of both variables in aiter/fused_moe.py


@final
@attrs.frozen
class RowBounds:
    """The numbers of rows from which on AITER gives mxfp4 weights other activations (``aiter/fused_moe.py``, which reads them from the environment).

    ``fp8``: interleaved gate and up rows see fp8 instead of bf16 (``AITER_BF16_FP8_MOE_BOUND``, gfx950 alone). ``fp4``: separated ones see fp4
    instead of bf16, with the clamped swiglu (``GPTOSS_SWIGLU_MXFP4_BF16_BOUND``).
    """

    fp8: int = _DEFAULT_BOUND
    fp4: int = _DEFAULT_BOUND

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "RowBounds":
        """Return the bounds that an environment sets. Raises: ValueError for one that is no number."""
        names = ("AITER_BF16_FP8_MOE_BOUND", "GPTOSS_SWIGLU_MXFP4_BF16_BOUND")
        fp8, fp4 = (int(environment.get(name, _DEFAULT_BOUND)) for name in names)
        return cls(fp8, fp4)


@final
@attrs.frozen
class AiterFacts:
    """What one AITER can do.

    ``quantizes_mxfp8``, ``passes_mxfp8``, ``passes_mxfp4``: whether its quantiser makes mxfp8 rows, and whether its MoE takes rows that are quantised
    already. ``parameters``: the names of those of ``fused_moe``. ``gfx``: the architecture; None where no device was asked. ``bounds``: see there.
    """

    version: str
    quantizes_mxfp8: bool
    passes_mxfp8: bool
    passes_mxfp4: bool = False
    parameters: frozenset[str] = frozenset()
    gfx: str | None = None
    bounds: RowBounds = RowBounds()

    def takes(self, parameter: str) -> bool:
        """Say whether ``fused_moe`` has a parameter. What a version lacks: ``output`` (a copy is made instead), ``no_combine``, ``gate_mode``, ..."""
        return parameter in self.parameters

    @property
    def has_gate_modes(self) -> bool:
        """Say whether this is a version with gate modes; mxfp8 weights and fp8 activations came with them (0.1.7 has none of the three)."""
        return self.takes("gate_mode")


def probe_installed_aiter() -> AiterFacts | None:
    """Return the facts of the installed AITER; None where there is none. Imports nothing of it."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        version = metadata.version(_DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = "unknown"
    return probe_aiter_source(Path(spec.submodule_search_locations[0]), version)


def probe_aiter_source(package: Path, version: str) -> AiterFacts:
    """Return the facts of an AITER by its package folder. What is not there, or is not Python, can do nothing."""
    moe = package / "fused_moe.py"
    return AiterFacts(
        version,
        quantizes_mxfp8="scale_type" in _parameters(package / "ops" / "quant.py", _QUANTISERS),
        passes_mxfp8=_passes(moe, "fp8"),
        passes_mxfp4=_passes(moe, "fp4x2"),
        parameters=_parameters(moe, ("fused_moe",)),
    )


def _functions(file: Path) -> Iterator[ast.FunctionDef]:
    try:
        module = ast.parse(file.read_bytes())  # bytes, as the source says itself how it is encoded
    except (FileNotFoundError, SyntaxError):
        return
    yield from (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef))


def _parameters(file: Path, names: tuple[str, ...]) -> frozenset[str]:
    """Return the names of the parameters of some functions."""
    found = (function.args for function in _functions(file) if function.name in names)
    return frozenset(argument.arg for arguments in found for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _passes(file: Path, dtype: str) -> bool:
    """Say whether ``fused_moe_2stages`` has a branch for hidden states of a dtype that come with a scale."""
    tests = (
        node
        for function in _functions(file)
        if function.name == "fused_moe_2stages"
        for node in ast.walk(function)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And)
    )
    return any(_asks(test, f"hidden_states.dtype == dtypes.{dtype}") and _asks(test, "a1_scale is not None") for test in tests)


def _asks(test: ast.BoolOp, question: str) -> bool:
    wanted = ast.dump(ast.parse(question, mode="eval").body)
    return any(ast.dump(node) == wanted for value in test.values for node in ast.walk(value))

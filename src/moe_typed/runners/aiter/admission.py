"""Which rows may be given to AITER over which weights: what it would do with them, said before it does it.

Inside ``fused_moe`` the precision of the rows is chosen (``_fused_moe_impl``), and with it the layout in which the weights are read and whether a
scale that came with the rows is used or dropped (``fused_moe_2stages``). Nothing of that raises there. The rules, of mxfp4 weights:

* Version 0.1.7: bf16 rows for the clamped swiglu, fp4 rows else.
* Later, gate and up apart: fp4 rows; for the clamped swiglu bf16 rows below ``RowBounds.fp4``. Both read one layout, as the shuffles of tiles and of
  lanes are one permutation of bytes while gate and up are apart; the lanes ask for larger multiples.
* Later, gate and up interleaved: bf16 rows; on gfx950 fp8 rows from ``RowBounds.fp8`` on. Both read one layout.
* ``quant_dtype_a``, where there is such a parameter, overrides all.

The number of rows that decides is the padded one. The scale of rows that are quantised already is dropped wherever bf16 rows are chosen. Tuned tables
may choose kernels that quantise themselves and drop it, too; no caller can see that.
"""

from typing import TYPE_CHECKING, Final, final

import attrs

from ...formats import DenseRows, Payload, ScaledRows
from ..base import UnsupportedError
from .prepared import GFX950, Scheme

if TYPE_CHECKING:
    from .probe import AiterFacts

_UNBOUNDED: Final = 2**24  # rows: a sorted id has 24 bits for them (moe_sorting), hence no more in any call


@final
@attrs.frozen
class Admission:
    """How many rows of one payload class a call may have: from ``least`` on, and fewer than ``below``. ``reason``: why not others."""

    payload: type[Payload]
    least: int = 0
    below: int = _UNBOUNDED
    reason: str = "AITER sorts fewer than 2^24 rows"

    @property
    def is_empty(self) -> bool:
        """Say whether no number of rows will do."""
        return self.least >= self.below

    def refuse(self, rows: int) -> UnsupportedError:
        """Return the error for a number of rows outside."""
        return UnsupportedError(f"{rows} rows of {self.payload.__qualname__}: {self.reason}")


def pins_fp8(scheme: Scheme, facts: "AiterFacts") -> bool:
    """Say whether the runner tells AITER to use fp8 rows, whatever their number."""
    return scheme is Scheme.A8W4 and facts.gfx == GFX950 and facts.takes("quant_dtype_a")


def admit_dense(scheme: Scheme, payload: type[DenseRows], facts: "AiterFacts", *, clamped: bool, whole_lanes: bool) -> Admission:
    """Return how many dense rows a call may have, so that AITER reads the layout that the weights have, and rounds rows no more than they promise.

    ``clamped``: the activation is Swiglu. ``whole_lanes``: the sizes of a4w4 weights are those that a16w4 asks for, too.
    """
    if scheme is Scheme.A16W4:
        if not clamped:
            return _none(payload, "AITER chooses fp4 rows for silu, and would round those over a16w4 weights; prepare them as a4w4 or a8w4")
        if not facts.has_gate_modes:
            return Admission(payload)
        reason = f"from {facts.bounds.fp4} on AITER chooses fp4 rows, and would round those over a16w4 weights"
        return Admission(payload, below=facts.bounds.fp4, reason=f"{reason}; raise GPTOSS_SWIGLU_MXFP4_BF16_BOUND, or prepare them as a8w4")
    if scheme is Scheme.A4W4 and clamped:
        if not facts.has_gate_modes:
            return _none(payload, f"AITER {facts.version} chooses bf16 rows for the clamped swiglu, whatever the weights; prepare them as a16w4")
        if whole_lanes:
            return Admission(payload)
        reason = f"below {facts.bounds.fp4} AITER chooses bf16 rows for the clamped swiglu, whose kernels read multiples of 128 columns"
        return Admission(payload, least=facts.bounds.fp4, reason=f"{reason}; set GPTOSS_SWIGLU_MXFP4_BF16_BOUND to 0, or prepare them as a8w4")
    return Admission(payload)


def admit_scaled(scheme: Scheme, payload: type[ScaledRows], facts: "AiterFacts", *, clamped: bool) -> Admission:
    """Return how many rows that are quantised already a call may have, so that AITER uses their scale."""
    if scheme is Scheme.A4W4:
        if not facts.passes_mxfp4:
            return _none(payload, f"AITER {facts.version} does not take rows that are mxfp4 already")
        if clamped:
            return _none(payload, "with the clamped swiglu AITER may choose bf16 rows and drop their scale; upscale them to bf16")
    if scheme in (Scheme.A8W4, Scheme.MXFP8) and not facts.passes_mxfp8:
        return _none(payload, f"AITER {facts.version} does not take rows that are mxfp8 already, and would drop their scale; upscale them to bf16")
    if scheme is Scheme.A8W4:
        if facts.gfx != GFX950:
            return _none(payload, f"over mxfp4 weights AITER takes fp8 rows on {GFX950} alone; this is {facts.gfx}")
        if not pins_fp8(scheme, facts):
            reason = f"below {facts.bounds.fp8} AITER chooses bf16 rows over mxfp4 weights, and drops the scale of mxfp8 rows"
            return Admission(payload, least=facts.bounds.fp8, reason=f"{reason}; set AITER_BF16_FP8_MOE_BOUND to 0, or upscale them to bf16")
    return Admission(payload)


def _none(payload: type[Payload], reason: str) -> Admission:
    return Admission(payload, below=0, reason=reason)

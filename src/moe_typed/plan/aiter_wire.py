"""Which wire is sent to AITER's experts, where the one that was asked for is mxfp8 (``runners.aiter.probe`` says what an AITER can do with it)."""

from typing import final

import attrs

from ..runners.aiter import AiterFacts
from .backends import Wire
from .report import Degradation


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

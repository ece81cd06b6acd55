"""Which wire goes to AITER's experts where mxfp8 was asked for."""

import pytest

from moe_typed.plan import AiterFacts, Wire, wire_for_aiter


@pytest.mark.parametrize("facts", [None, *(AiterFacts("1", produces, passes) for produces in (False, True) for passes in (False, True))])
@pytest.mark.parametrize("wire", [wire for wire in Wire if wire is not Wire.MXFP8])
def test_other_wires_are_as_they_were_asked_for(wire: Wire, facts: AiterFacts | None) -> None:
    decision = wire_for_aiter(wire, facts)
    assert (decision.wire, decision.degradation) == (wire, None)


def test_mxfp8_is_sent_where_both_can() -> None:
    decision = wire_for_aiter(Wire.MXFP8, AiterFacts("1", quantizes_mxfp8=True, passes_mxfp8=True))
    assert (decision.wire, decision.degradation) == (Wire.MXFP8, None)


@pytest.mark.parametrize(
    ("facts", "fragment"),
    [
        (None, "no AITER is installed"),
        (AiterFacts("0.1", quantizes_mxfp8=False, passes_mxfp8=True), "AITER 0.1 has no scale_type in its per-1x32 quantiser"),
        (AiterFacts("0.1", quantizes_mxfp8=False, passes_mxfp8=False), "AITER 0.1 has no scale_type in its per-1x32 quantiser"),
        (AiterFacts("0.2", quantizes_mxfp8=True, passes_mxfp8=False), "AITER 0.2 does not take hidden states that are mxfp8 already"),
    ],
)
def test_bf16_is_sent_where_either_cannot(facts: AiterFacts | None, fragment: str) -> None:
    decision = wire_for_aiter(Wire.MXFP8, facts)
    assert decision.wire is Wire.BF16
    assert decision.degradation is not None
    assert (decision.degradation.subject, decision.degradation.preferred, decision.degradation.used) == ("wire", "mxfp8", "bf16")
    assert fragment in decision.degradation.detail

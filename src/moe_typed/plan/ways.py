"""The ways of rows through a plan: what goes over the wire, and what must become of it before the experts take it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, final

import attrs

from ..formats import (
    AnyConversion,
    Bf16Rows,
    DenseRows,
    Format,
    Fp16Rows,
    Fp32Rows,
    Payload,
    bf16_as_is,
    fp16_as_is,
    fp32_as_is,
    quantize_fp8_block128,
    quantize_mxfp4,
    quantize_mxfp8,
    quantizers,
    relayouts,
    round_bf16,
    upscale_bf16,
    upscale_fp16,
    upscale_fp32,
)
from .backends import Backend, Wire
from .problem import MoEProblem


@final
@attrs.frozen(eq=False)
class DenseModel:
    """What a model dtype means for a plan: its rows, and the conversions that begin and end at them."""

    rows: type[DenseRows]
    as_is: AnyConversion
    upscale: AnyConversion


DENSE_MODELS: Final[Mapping[str, DenseModel]] = MappingProxyType(
    {
        "bf16": DenseModel(Bf16Rows, bf16_as_is, upscale_bf16),
        "fp16": DenseModel(Fp16Rows, fp16_as_is, upscale_fp16),
        "fp32": DenseModel(Fp32Rows, fp32_as_is, upscale_fp32),
    }
)
_QUANTISERS: Final[Mapping[Wire, AnyConversion]] = MappingProxyType(
    {
        Wire.BF16: round_bf16,
        Wire.FP8_BLOCK128: quantize_fp8_block128,
        Wire.MXFP8: quantize_mxfp8,
        Wire.MXFP4: quantize_mxfp4,
        Wire.INT8: quantizers.int8_token,
    }
)


@final
@attrs.frozen(eq=False)
class WireWay:
    """What the sender does to rows, and what arrives: of ``sent`` itself, or of what the library makes of bf16 rows."""

    sent: AnyConversion
    arrives: type[Payload]

    @property
    def by_library(self) -> bool:
        """Say whether the library quantises."""
        return self.arrives is not self.sent.target


def wire_ways(problem: MoEProblem, model: DenseModel, payloads: tuple[type[Payload], ...]) -> list[WireWay]:
    """Return the wires to try: the one that was asked for, or for ``auto`` the model's own rows and then what the experts take."""
    carries = problem.backend.carries
    of_use: list[Wire] = [wire for wire in _QUANTISERS if wire is Wire.BF16 or carries.get(wire) in payloads]
    wires = of_use if problem.wire is Wire.AUTO else [problem.wire]
    ways = [way for wire in wires if wire in carries and (way := _way(problem.backend, wire, model))]
    if not problem.backend.sends and problem.wire is Wire.AUTO:  # nothing is sent, so that rows of any dtype may stay as they are
        return [WireWay(model.as_is, model.rows), *(way for way in ways if way.arrives is not model.rows and way.arrives in payloads)]
    return ways


def _way(backend: Backend, wire: Wire, model: DenseModel) -> WireWay | None:
    as_bf16 = model.as_is if model.rows is Bf16Rows else round_bf16
    if backend is Backend.ASCEND_TP and model.rows is Fp16Rows and wire is not Wire.BF16:  # its operators quantise either of the two
        return WireWay(model.as_is, backend.carries[wire])
    if wire is Wire.BF16:
        return WireWay(as_bf16, Bf16Rows)
    if backend.quantises:
        return WireWay(as_bf16, backend.carries[wire])
    quantise = _QUANTISERS[wire]
    return WireWay(quantise, quantise.target) if model.rows in quantise.source else None


def bridge(arrives: type[Payload], payloads: tuple[type[Payload], ...], model: DenseModel) -> tuple[AnyConversion, ...] | None:
    """Return the conversions between what arrives and what the experts take: none, another order of the scales, or an upscale; None for no way."""
    if arrives in payloads:
        return ()
    for relayout in (relayouts.slab_to_row, relayouts.to_row):
        if arrives in relayout.source and relayout.target in payloads:
            return (relayout,)
    if arrives in model.upscale.source and model.rows in payloads:
        return (model.upscale,)
    return None


def divisibility_fault(scaled: Format, **sizes: int) -> str | None:
    """Say which size the scales of a format do not divide. Weights are reduced along both of theirs, so that the widest group counts."""
    group = 1 if scaled.scale is None else max(scaled.scale.group)
    faults = (f"{name} = {size} is not a multiple of {group}, the group of {scaled.name}" for name, size in sizes.items() if group and size % group)
    return next(faults, None)

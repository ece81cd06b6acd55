"""Every format as rows of a table: what ``moe-typed formats`` prints and the documentation shows."""

from typing import Final, TypeAlias

from .conversions.upscale import SCALED
from .payloads import Bf16Rows, Fp16Rows, Fp32Rows, Int4TokenRows, MxFp4PairRows, MxFp8PairRows, Payload
from .spec import Format
from .weights import (
    AwqExpertWeights,
    Bf16ExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    CompressedInt4ExpertWeights,
    Fp8Block128ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp16ExpertWeights,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32ExpertWeights,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    NvFp4ExpertWeights,
)

FACTS: Final = ("class", "name", "data", "scale", "group (rows x columns)", "scale order", "scale rounding")
PAYLOADS: Final[tuple[type[Payload], ...]] = (Bf16Rows, Fp16Rows, Fp32Rows, *SCALED, Int4TokenRows, MxFp8PairRows, MxFp4PairRows)
WEIGHTS: Final = (
    Bf16ExpertWeights,
    Fp16ExpertWeights,
    Fp32ExpertWeights,
    Bf16TransposedExpertWeights,
    Fp16TransposedExpertWeights,
    Fp32TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32UngatedExpertWeights,
    Fp8TensorExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8Block128ExpertWeights,
    MxFp8ExpertWeights,
    MxFp4ExpertWeights,
    NvFp4ExpertWeights,
    Int8ChannelExpertWeights,
    AwqExpertWeights,
    GptqExpertWeights,
    CompressedInt4ExpertWeights,
    ModelSlimW4A8ExpertWeights,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
)
Facts: TypeAlias = tuple[str, ...]


def _dtype(dtype: object, per_element: int) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if per_element == 1 else f"{name}, {per_element} each"


def _facts(title: str, fmt: Format) -> Facts:
    data = _dtype(fmt.data_dtype, fmt.per_element)
    if fmt.scale is None:
        return (title, fmt.name, data, "", "", "", "")
    scale = fmt.scale
    group = " x ".join("all" if size == 0 else str(size) for size in scale.group)
    return (title, fmt.name, data, _dtype(scale.dtype, scale.per_element), group, scale.order.value, scale.rounding.value)


def payload_facts() -> list[Facts]:
    """Return a row for each payload class, under the columns of ``FACTS``."""
    return [_facts(payload.__qualname__, payload.format) for payload in PAYLOADS]


def weight_facts() -> list[Facts]:
    """Return a row for each weight class, under the columns of ``FACTS``."""
    return [_facts(weights.__qualname__, weights.format) for weights in WEIGHTS]

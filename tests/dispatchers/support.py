"""Layers over emulated ranks: weights of every format, and what each rank brings to them."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Final, TypeAlias, cast

import attrs
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    Conversion,
    DeviceCount,
    Experts,
    ExpertStage,
    Fp8Block128ExpertWeights,
    Fp32ExpertWeights,
    GateUp,
    LogicalIds,
    MxFp8ExpertWeights,
    Payload,
    Pending,
    Routing,
    SiluAndMul,
    bf16_as_is,
    prepare_reference,
    quantize_fp8_block128,
    quantize_mxfp8,
    upscale_bf16,
)
from moe_typed.formats import (
    ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    GateUpOrder,
    Int8ChannelExpertWeights,
    MxFp4ExpertWeights,
    MxFp4Rows,
    MxFp8Rows,
    quantize_mxfp4,
    quantizers,
)
from moe_typed.runners import Activation, PreparedWeights
from moe_typed.table import AnyRunner

LOCAL: Final = 2  # expert slots of a rank
TOPK: Final = 2
INTER: Final = 128
CAPACITY: Final = 4  # the most rows that a rank sends
ALIGNMENT: Final = 4
FACTOR: Final = 1.5
FP8: Final = torch.float8_e4m3fn
SILU: Final = SiluAndMul()
NARROW: Final = 256
WIDE: Final = 2048  # the smallest width that the low-latency kernels are compiled for

Weights: TypeAlias = ExpertWeights[GateUpOrder]
Batch: TypeAlias = tuple[Bf16Rows, Routing[LogicalIds]]

# ---- weights ------------------------------------------------------------------------------------------------------------------------


def _random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / math.sqrt(shape[-1])


def _scaled(matrix: Tensor, conversion: Conversion[Bf16Rows, MxFp8Rows] | Conversion[Bf16Rows, MxFp4Rows]) -> tuple[Tensor, Tensor]:
    rows = conversion.run(Bf16Rows(matrix.to(torch.bfloat16).flatten(0, 1)))
    return rows.data.view(*matrix.shape[:2], -1), rows.scale.view(*matrix.shape[:2], -1)


def _blocks(matrix: Tensor) -> tuple[Tensor, Tensor]:
    experts, rows, columns = matrix.shape
    scale = torch.rand((experts, rows // 128, columns // 128), generator=torch.Generator().manual_seed(rows)) / 8 + 0.01
    return (matrix / scale.repeat_interleave(128, 1).repeat_interleave(128, 2)).to(torch.float8_e4m3fn), scale


def _over(matrix: Tensor, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    """Return values whose largest is the largest of the dtype, and the scales over ``dim``."""
    scale = matrix.abs().amax(dim) / (127 if dtype is torch.int8 else torch.finfo(dtype).max)
    codes = matrix / scale.unsqueeze(dim)
    return (codes.round() if dtype is torch.int8 else codes).to(dtype), scale


def _channels(w13: Tensor, w2: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (d13, s13), (d2, s2) = _over(w13, dtype, 2), _over(w2, dtype, 2)
    return d13, d2, s13, s2


@cache
def weights(form: str, experts: int, hidden: int) -> Weights:
    """Return the weights of all experts."""
    w13, w2 = _random(experts, 2 * INTER, hidden, seed=1), _random(experts, hidden, INTER, seed=2)
    match form:
        case "fp32":
            return Fp32ExpertWeights(w13, w2, GateUp)
        case "bf16":
            return Bf16ExpertWeights(w13.to(torch.bfloat16), w2.to(torch.bfloat16), GateUp)
        case "fp8 block":
            (d13, s13), (d2, s2) = _blocks(w13), _blocks(w2)
            return Fp8Block128ExpertWeights(d13, d2, s13, s2, GateUp)
        case "fp8 tensor":
            (d13, s13), (d2, s2) = _over(w13.view(experts, 2, -1), FP8, 2), _over(w2.flatten(1), FP8, 1)
            return Fp8TensorExpertWeights(d13.view(w13.shape), d2.view(w2.shape), s13, s2, GateUp)
        case "fp8 channel":
            return Fp8ChannelExpertWeights(*_channels(w13, w2, FP8), GateUp)
        case "int8":
            return Int8ChannelExpertWeights(*_channels(w13, w2, torch.int8), GateUp)
        case "mxfp8":
            (d13, s13), (d2, s2) = _scaled(w13, quantize_mxfp8), _scaled(w2, quantize_mxfp8)
            return MxFp8ExpertWeights(d13, d2, s13, s2, GateUp)
        case _:
            (d13, s13), (d2, s2) = _scaled(w13, quantize_mxfp4), _scaled(w2, quantize_mxfp4)
            return MxFp4ExpertWeights(d13, d2, s13, s2, GateUp)


def held_by(w: Weights, rank: int) -> Weights:
    """Return the weights of the experts of a rank."""
    parts = {field.name: getattr(w, field.name) for field in attrs.fields(cast("type[attrs.AttrsInstance]", type(w)))}
    cut = {name: part[rank * LOCAL : (rank + 1) * LOCAL] for name, part in parts.items() if isinstance(part, Tensor)}
    return cast("Callable[..., Weights]", attrs.evolve)(w, **cut)


def prepared(w: Weights) -> PreparedWeights[AnyRunner, Payload]:
    """Return weights for the reference runner, their accept-set forgotten."""
    return cast("Callable[[Weights], PreparedWeights[AnyRunner, Payload]]", prepare_reference)(w)


def experts_for(payload: type[Payload], ready: PreparedWeights[AnyRunner, Payload], activation: Activation = SILU) -> ExpertStage[Payload]:
    """Return experts that take a payload, upscaled first where they do not take it as it is."""
    experts = Experts(ready, activation)
    return (
        experts if payload in experts.accepts else cast("ExpertStage[Payload]", experts.accepting(cast("Conversion[Payload, Payload]", upscale_bf16)))
    )


# ---- batches ------------------------------------------------------------------------------------------------------------------------

KINDS: Final = ("mixed", "uneven", "full", "idle", "one row", "nowhere", "one rank", "padded host", "padded device")


def batch(kind: str, rank: int, experts: int, hidden: int) -> Batch:
    """Return what a rank brings."""
    tokens = {"mixed": (3, 0, 2, CAPACITY)[rank], "uneven": (CAPACITY, 1, 3, 2)[rank], "idle": 0, "one row": int(rank == 0)}.get(kind, CAPACITY)
    generator = torch.Generator().manual_seed(10 * rank + tokens)
    rows = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    among = LOCAL if kind == "one rank" else experts
    ids = torch.rand(tokens, among, generator=generator).argsort(1)[:, :TOPK].to(torch.int32)
    ids[torch.rand(tokens, TOPK, generator=generator) < (1.0 if kind == "nowhere" else 0.2)] = -1
    topk_weights = torch.rand(tokens, TOPK, generator=generator) + 0.1
    live: int | DeviceCount = tokens
    if kind.startswith("padded"):
        live = 2
        rows[live:] = torch.nan if kind == "padded host" else 100.0
        ids[live:], topk_weights[live:] = 0x7F7F7F7F, torch.nan
        live = live if kind == "padded host" else DeviceCount(torch.tensor([live], dtype=torch.int32))
    return Bf16Rows(rows), Routing(ids, topk_weights, LogicalIds, experts, Pending(FACTOR), False, live)


WIRES: Final[Mapping[str, Conversion[Bf16Rows, Payload]]] = {
    "bf16": bf16_as_is,
    "fp8": quantize_fp8_block128,
    "mxfp8": quantize_mxfp8,
    "mxfp4": quantize_mxfp4,
    "ue8m0": quantizers.fp8_block128_packed,
    "column": quantizers.fp8_block128_column,
    "rows": quantize_fp8_block128,
}


def near(found: Tensor, wanted: Tensor) -> None:
    """Assert that results agree as bf16 sums of a few rows do."""
    assert found.dtype == torch.bfloat16
    assert found.shape == wanted.shape
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=2e-2)

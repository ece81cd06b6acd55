"""Expert weights of every scheme, and layers over the emulated operators, held to a float32 layer on the dequantised weights."""

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

import attrs
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    Experts,
    Fp16ExpertWeights,
    Fp16Rows,
    GateUp,
    LogicalIds,
    MxFp8ExpertWeights,
    Payload,
    Routing,
    Settled,
)
from moe_typed.dispatchers import TPRouting, as_int8, as_mxfp8, as_they_are, as_they_are_v1
from moe_typed.formats import (
    AwqExpertWeights,
    CompressedInt4ExpertWeights,
    ExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
    MxFp4ExpertWeights,
)
from moe_typed.formats.int4 import pack_bytes
from moe_typed.ops.quantize.reference import quantize_mxfp4, quantize_mxfp8
from moe_typed.runners import Activation, GeluAndMul, GeluTanhAndMul, SiluAndMul, SwigluClamped, SwigluOai, SwigluStep, reference_experts
from moe_typed.runners.ascend import AnyAscendWeights, prepare_ascend
from moe_typed.runners.ascend.ops import AscendExtensionOps
from tests.emulation.ascend.misuse import Device
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.formats.weights.support import ASCENDING, AWQ_PLACES, pack_words

EXPERTS, HIDDEN, INTER, GROUP = 6, 128, 64, 32

Weights = ExpertWeights[GateUpOrder]
SILU: Final = SiluAndMul()


def randn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def dense(seed: int = 1, experts: int = EXPERTS, hidden: int = HIDDEN, inter: int = INTER) -> tuple[Tensor, Tensor]:
    """Return w13 (experts, 2 * inter, hidden) and w2 (experts, hidden, inter) whose products are of size one."""
    return randn(seed, experts, 2 * inter, hidden) / hidden**0.5, randn(seed + 1, experts, hidden, inter) / inter**0.5


# ---- quantised by plain formulae --------------------------------------------------------------------------------------------------


def by_row(weight: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return integers and a scale a row."""
    scale = weight.abs().amax(2) / largest
    return (weight / scale.unsqueeze(2)).round().to(torch.int8), scale


def by_group(weight: Tensor, *, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes 0 to 15 (experts, in, out), bf16 scales (experts, groups, out), and zeros, which are 8 where they are symmetric."""
    turned = weight.transpose(1, 2).contiguous()
    groups = turned.view(turned.shape[0], -1, GROUP, turned.shape[2])
    if zeros:
        low, high = groups.amin(2), groups.amax(2)
        scale = ((high - low) / 15).bfloat16()
        zero = (-low / scale.float()).round().clamp(1, 15)
    else:
        scale = (groups.abs().amax(2) / 7).bfloat16()
        zero = torch.full(scale.shape, 8.0)
    codes = (groups / scale.float().unsqueeze(2) + zero.unsqueeze(2)).round().clamp(0, 15)
    return codes.view(turned.shape).long(), scale, zero.long()


def awq(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (c13, s13, z13), (c2, s2, z2) = by_group(w13, zeros=True), by_group(w2, zeros=True)
    words = (pack_words(part, 2, AWQ_PLACES) for part in (c13, c2, z13, z2))
    q13, q2, y13, y2 = words
    return AwqExpertWeights(q13, q2, s13, s2, order, GROUP, y13, y2)


def gptq(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (c13, s13, z13), (c2, s2, z2) = by_group(w13, zeros=True), by_group(w2, zeros=True)
    zeros = [pack_words(part - 1, 2, ASCENDING) for part in (z13, z2)]
    return GptqExpertWeights(pack_words(c13, 1, ASCENDING), pack_words(c2, 1, ASCENDING), s13, s2, order, GROUP, *zeros)


def gptq_symmetric(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (c13, s13, _), (c2, s2, _) = by_group(w13, zeros=False), by_group(w2, zeros=False)
    return GptqExpertWeights(pack_words(c13, 1, ASCENDING), pack_words(c2, 1, ASCENDING), s13, s2, order, GROUP)


def compressed(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (c13, s13, _), (c2, s2, _) = by_group(w13, zeros=False), by_group(w2, zeros=False)
    q13, q2 = (pack_words(part.transpose(1, 2).contiguous(), 2, ASCENDING) for part in (c13, c2))
    t13, t2 = (part.transpose(1, 2).contiguous() for part in (s13, s2))
    return CompressedInt4ExpertWeights(q13, q2, t13, t2, order, GROUP)


def bf16(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    return Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), order)


def fp16(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    return Fp16ExpertWeights(w13.half(), w2.half(), order)


def w8a8(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (q13, s13), (q2, s2) = by_row(w13, 127), by_row(w2, 127)
    return Int8ChannelExpertWeights(q13, q2, s13, s2, order)


def w4a8(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (q13, s13), (q2, s2) = by_row(w13, 7), by_row(w2, 7)
    return ModelSlimW4A8ExpertWeights(pack_bytes(q13, 1), pack_bytes(q2, 1), s13, s2, order)


def w4a8_corrected(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    """Return the same with the corrections that ModelSlim's files hold, that of w2 in sixteen parts."""
    (q13, s13), (q2, s2) = by_row(w13, 7), by_row(w2, 7)
    parts = 8 * (q2.float() * s2.unsqueeze(2)).view(*q2.shape[:2], 16, -1).sum(3)
    return ModelSlimW4A8ExpertWeights(pack_bytes(q13, 1), pack_bytes(q2, 1), s13, s2, order, 8 * (q13.float() * s13.unsqueeze(2)).sum(2), parts)


def w4a4(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (q13, s13), (q2, s2) = by_row(w13, 7), by_row(w2, 7)
    return ModelSlimW4A4ExpertWeights(q13, q2, s13, s2, order)


def w4a4_packed(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (q13, s13), (q2, s2) = by_row(w13, 7), by_row(w2, 7)
    return ModelSlimW4A4PackedExpertWeights(pack_bytes(q13, 1), pack_bytes(q2, 1), s13, s2, order)


def mxfp8(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (q13, s13), (q2, s2) = (quantize_mxfp8(part.flatten(0, 1)) for part in (w13, w2))
    return MxFp8ExpertWeights(q13.view(w13.shape), q2.view(w2.shape), s13.view(*w13.shape[:2], -1), s2.view(*w2.shape[:2], -1), order)


def mxfp4(order: type[GateUpOrder], w13: Tensor, w2: Tensor) -> Weights:
    (q13, s13), (q2, s2) = (quantize_mxfp4(part.flatten(0, 1)) for part in (w13, w2))
    return MxFp4ExpertWeights(
        q13.view(*w13.shape[:2], -1), q2.view(*w2.shape[:2], -1), s13.view(*w13.shape[:2], -1), s2.view(*w2.shape[:2], -1), order
    )


@attrs.frozen
class Scheme:
    """A scheme: how weights are made, what may be dispatched, and the largest relative error of a layer.

    Errors are those of the rows' rounding, since the reference has the same weights: bf16 rounds three times (2^-9 each), int8 rows twice
    (amax / 254), int4 rows twice (amax / 14, of Gaussian rows a quarter of their size), e4m3 twice (2^-4).
    """

    make: Callable[[type[GateUpOrder], Tensor, Tensor], Weights]
    wires: tuple[str, ...]
    error: float
    only_silu: bool = False
    rows: type[Bf16Rows] | type[Fp16Rows] = Bf16Rows
    device: Device = Device.A3

    def weights(self, order: type[GateUpOrder] = GateUp, **sizes: int) -> Weights:
        return self.make(order, *dense(**sizes))


SCHEMES: Final[Mapping[str, Scheme]] = {
    "bf16": Scheme(bf16, ("v2", "v1"), 0.005),
    "fp16": Scheme(fp16, ("v2", "v1"), 0.001, rows=Fp16Rows),
    "w8a8": Scheme(w8a8, ("v2", "v1", "int8"), 0.019),
    "w4a8": Scheme(w4a8, ("v2", "int8"), 0.017),
    "w4a8 corrected": Scheme(w4a8_corrected, ("v2", "int8"), 0.017),
    "w4a4": Scheme(w4a4, ("v2", "v1"), 0.26),
    "w4a4 packed": Scheme(w4a4_packed, ("v2",), 0.26),
    "awq": Scheme(awq, ("v2", "v1"), 0.005),
    "gptq": Scheme(gptq, ("v2",), 0.005),
    "gptq symmetric": Scheme(gptq_symmetric, ("v2",), 0.005),
    "compressed": Scheme(compressed, ("v2",), 0.005),
    "mxfp8": Scheme(mxfp8, ("v2", "mxfp8"), 0.07, only_silu=True, device=Device.A5),
    "mxfp4": Scheme(mxfp4, ("v2", "mxfp8"), 0.07, device=Device.A5),
}
ACTIVATIONS: Final[tuple[Activation, ...]] = (
    SiluAndMul(),
    SwigluOai(limit=1.5),
    SwigluStep(limit=0.6),
    SwigluClamped(limit=0.9),
    GeluAndMul(),
    GeluTanhAndMul(),
)


def emulated(device: Device = Device.A3) -> EmulatedAscendOps:
    return EmulatedAscendOps("strict", device)


def wire(name: str, rows: type[Any], ops: EmulatedAscendOps) -> TPRouting[Any, Payload]:
    match name:
        case "v2":
            return as_they_are(rows, ops)
        case "v1":
            return as_they_are_v1(rows, ops)
        case "int8":
            return as_int8(rows, ops)
        case _:
            return as_mxfp8(rows, ops)


def prepare(weights: Any, ops: EmulatedAscendOps, extension: AscendExtensionOps | None = None) -> AnyAscendWeights:
    """Return prepared weights of a class that is known at run time alone."""
    return prepare_ascend(cast("Bf16ExpertWeights[GateUpOrder]", weights), ops, extension)


def experts_of(weights: Weights, ops: EmulatedAscendOps, activation: Activation = SILU, extension: AscendExtensionOps | None = None) -> Experts[Any]:
    """Return experts whose accept-set is known at run time alone."""
    prepared: Any = prepare(weights, ops, extension)
    return Experts(prepared, activation)


def routing(tokens: int, k: int, experts: int = EXPERTS, seed: int = 7, *, live: int | None = None, idle: int = 2) -> Routing[LogicalIds, Settled]:
    """Return distinct experts a row, never the last ``idle``, with weights that sum to one."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts - idle, generator=generator)[:k] for _ in range(tokens)]) if tokens else torch.empty(0, k)
    weights = torch.rand(tokens, k, generator=generator) + 0.1
    live = tokens if live is None else live
    return Routing(ids.to(torch.int32), weights / weights.sum(1, keepdim=True), LogicalIds, experts, Settled(), True, live)


def expected(rows: Tensor, routes: Routing[LogicalIds], weights: Weights, activation: Activation) -> Tensor:
    """Return the layer's output in float32; rows after the live ones are zero."""
    live = routes.count_live()
    out = torch.zeros(rows.shape, dtype=torch.float32)
    out[:live] = reference_experts(rows[:live].float(), routes.topk_ids[:live], routes.topk_weights[:live], weights, activation)
    return out


def error(found: Tensor, wanted: Tensor) -> float:
    """Return |found - wanted| / |wanted|."""
    return float(((found.float() - wanted).square().sum() / wanted.square().sum()).sqrt())

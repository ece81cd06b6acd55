"""Faults that users of public engines reported at an MoE stage boundary, at toy size: one test a kind, named by the kind.

Each docstring cites the report. What an engine got silently wrong must be right here, or an error that names the field and both sides.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Protocol

import pytest
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    BoundaryError,
    DeviceCount,
    Experts,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    Interleaved,
    LocalIds,
    LocalSinkIds,
    LogicalIds,
    MoELayer,
    MxFp8ExpertWeights,
    MxFp8Rows,
    Pending,
    Routing,
    Settled,
    SoftmaxTopK,
    StandardCombineInput,
    StandardDispatcher,
    UpGate,
    bf16_as_is,
    debug,
    fp32_as_is,
    from_topk,
    localize,
    prepare_reference,
    quantize_fp8_block128,
)
from moe_typed.formats import (
    AwqExpertWeights,
    Fp8Block128PackedRows,
    GateUpOrder,
    GptqExpertWeights,
    InverseScaleFactor,
    MxFp4Rows,
    MxFp8SwizzledRows,
    NvFp4Rows,
    e8m0,
    relayouts,
    shard_inter,
)
from moe_typed.routing import mask_padded
from moe_typed.stages import FlatRowsInput

FP8, E8 = torch.float8_e4m3fn, torch.float8_e8m0fnu

Fp32Layer = MoELayer[Fp32Rows, Fp32Rows, StandardCombineInput]


def refused(build: Callable[..., object], *values: object, level: str = "layout") -> BoundaryError:
    with debug("values" if level == "values" else "layout"), pytest.raises(BoundaryError) as caught:
        build(*values)
    return caught.value


def accepted(build: Callable[..., object], *values: object) -> None:
    with debug("strict"):
        build(*values)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def bits(*codes: int) -> Tensor:
    return torch.tensor(codes, dtype=torch.uint8).view(E8)


def run(weights: Fp32ExpertWeights[GateUpOrder], rows: Tensor, routing: Routing[LogicalIds]) -> Tensor:
    layer: Fp32Layer = StandardDispatcher(fp32_as_is).then(Experts(prepare_reference(weights)))
    with debug("strict"):
        return layer(Fp32Rows(rows), routing)


def random_weights(experts: int = 4, hidden: int = 8, inter: int = 4) -> Fp32ExpertWeights[GateUpOrder]:
    generator = torch.Generator().manual_seed(0)
    w13, w2 = torch.randn(experts, 2 * inter, hidden, generator=generator), torch.randn(experts, hidden, inter, generator=generator)
    return Fp32ExpertWeights(w13, w2, GateUp)


def constant_expert(value: float, experts: int = 4, hidden: int = 4) -> Fp32ExpertWeights[GateUpOrder]:
    """Return experts that all answer ``value`` in every channel, whatever comes."""
    return Fp32ExpertWeights(
        torch.zeros(experts, 2, hidden), torch.zeros(experts, hidden, 1), GateUp, torch.zeros(experts, 2), torch.full((experts, hidden), value)
    )


# ---- scales ------------------------------------------------------------------------------------------------------------------------


def test_scale_dtype() -> None:
    """sgl-project/sglang#35388: packed e8m0 words where float32 scales are read."""
    data = torch.zeros(4, 256, dtype=FP8)
    error = refused(Fp8Block128Rows, data, torch.full((4, 2), 127, dtype=torch.int32))
    assert (error.field, error.reason) == ("scale", "dtype is int32, expected float32")
    accepted(Fp8Block128Rows, data, torch.full((4, 2), 0.3))
    accepted(MxFp8Rows, data, bits(*[127] * 32).view(4, 8))


def test_scale_group() -> None:
    """sgl-project/sglang#36119: one payload dtype, two scale contracts; the pair is joined by its whole format."""
    data = torch.zeros(4, 256, dtype=FP8)
    error = refused(MxFp8Rows, data, torch.ones(4, 2))
    assert error.reason == "dtype is float32, expected float8_e8m0fnu"
    assert error.declared == "E8M0[Tensor, 'rows hidden//32'] with Layout(contiguous)"
    assert error.hint == "these values do satisfy Fp8Block128Rows"
    assert refused(MxFp8Rows, data, bits(*[127] * 8).view(4, 2)).reason == "axis 1 is 2, expected hidden//32 = 8"  # right dtype, wrong group
    for hidden in (32, 128):  # where a scale of one column would broadcast
        assert refused(Fp8Block128Rows, torch.zeros(4, hidden, dtype=FP8), bits(*[127] * 4).view(4, 1)).field == "scale"

    w13, w2 = torch.zeros(2, 512, 256, dtype=FP8), torch.zeros(2, 256, 256, dtype=FP8)
    mx = MxFp8ExpertWeights(w13, w2, bits(127).expand(2, 512, 8).contiguous(), bits(127).expand(2, 256, 8).contiguous(), GateUp)

    def join(then: Callable[..., object]) -> None:
        then(Experts(prepare_reference(mx)))

    with pytest.raises(BoundaryError, match=r"payload is Fp8Block128Rows \(fp8-block128\), but ReferenceMxFp8Weights takes .* MxFp8Rows"):
        join(StandardDispatcher(quantize_fp8_block128).then)


def test_scale_layout_column_major() -> None:
    """vllm-project/vllm#53338: column-major scales read as row-major; with one row the fault cannot be seen, nor is it one."""
    scale = torch.empty_strided((2, 2), (1, 2)).copy_(torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    error = refused(Fp8Block128Rows, torch.zeros(2, 256, dtype=FP8), scale)
    assert (error.field, error.reason) == ("scale", "is not contiguous: stride (1, 2) for shape [2, 2]")
    accepted(Fp8Block128Rows, torch.zeros(1, 256, dtype=FP8), scale[:1].as_strided((1, 2), (1, 1)))
    rows = Fp8Block128Rows(torch.ones(2, 256).to(FP8), scale.contiguous())
    assert torch.equal(rows.dequantize()[:, ::128], torch.tensor([[1.0, 2.0], [4.0, 8.0]]))


def test_scale_layout_flat() -> None:
    """flashinfer-ai/flashinfer#4943: a flat scale vector where (rows, groups) is meant."""
    for rows in (1, 3):  # with one row the flat length is the number of groups
        data, flat = torch.zeros(rows, 64, dtype=FP8), bits(*range(120, 120 + 2 * rows))
        assert refused(MxFp8Rows, data, flat).reason == "has 1 dims, expected 2 (rows hidden//32)"
        accepted(MxFp8Rows, data, flat.view(rows, 2))


def test_e8m0_special_codes() -> None:
    """sgl-project/sglang#25519: the code 134 taken for NaN, the code 255 for an infinity."""
    decoded = e8m0.decode(bits(0, 127, 134, 254, 255))
    assert torch.equal(decoded[:4].double(), torch.tensor([2.0**-127, 1.0, 128.0, 2.0**127], dtype=torch.float64))
    assert bool(decoded[4].isnan())
    encoded = e8m0.encode_up(torch.tensor([0.0, -1.0, math.inf, math.nan, 0.3])).view(torch.uint8)
    assert torch.equal(encoded, torch.tensor([0, 255, 255, 255, 126], dtype=torch.uint8))
    rows = MxFp8Rows(torch.zeros(1, 64, dtype=FP8), bits(127, 255).view(1, 2))
    error = refused(FlatRowsInput, rows, localize(from_topk(ids([0]), torch.ones(1, 1), 1), 0, 1), level="values")
    assert error.reason == "holds the byte 255, which is NaN"


# ---- routing -----------------------------------------------------------------------------------------------------------------------


def test_routing_dtype_of_ids() -> None:
    """sgl-project/sglang#25380: a remap table of the default integer dtype widens the ids."""
    given, weights = ids([0, 1], [2, -1]), torch.ones(2, 2)
    table = torch.arange(4)
    widened = table[given.clamp(min=0).long()]
    error = refused(from_topk, widened, weights, 4)
    assert (error.field, error.reason) == ("topk_ids", "dtype is int64, expected int32")
    accepted(from_topk, table.int()[given.clamp(min=0).long()], weights, 4)
    narrowed = torch.where(given < 0, given.long(), widened).to(torch.int32)
    accepted(from_topk, narrowed, weights, 4)
    assert torch.equal(narrowed, given)


def test_routing_dtype_of_weights() -> None:
    """flashinfer-ai/flashinfer#3763: float32 router weights read as bfloat16."""
    weights = torch.tensor([[0.3, 0.7]])
    assert float(weights.view(torch.bfloat16)[0, 1]) == pytest.approx(0.2988, abs=1e-4)  # what the fault reads
    error = refused(from_topk, ids([0, 1]), weights.bfloat16(), 2)
    assert (error.field, error.reason) == ("topk_weights", "dtype is bfloat16, expected float32")
    accepted(from_topk, ids([0, 1]), weights, 2)


def test_sentinel_ids_below_zero() -> None:
    """vllm-project/vllm-xpu-kernels#571: -1 is legal padding and no index; every other id out of range is an error."""
    w, rows = random_weights(), torch.ones(3, 8)
    given = from_topk(ids([0, -1], [-1, -1], [3, 0]), torch.ones(3, 2), 4)
    got = run(w, rows, given)
    assert not got[1].any()
    torch.testing.assert_close(got[0], run(w, rows[:1], from_topk(ids([0]), torch.ones(1, 1), 4))[0])
    assert not run(w, rows, from_topk(ids([-1, -1], [-1, -1], [-1, -1]), torch.ones(3, 2), 4)).any()
    for wrong in (4, -2):
        error = refused(from_topk, ids([0, wrong]), torch.ones(1, 2), 4, level="values")
        assert error.reason == f"holds the id {wrong}, but logical ids over 4 experts lie in -1..3"


def test_sentinel_ids_of_two_conventions() -> None:
    """vllm-project/vllm#47733: the producer marks with E, the consumer expects -1."""
    weights = torch.ones(2, 2)
    sink = Routing(ids([4, 0], [1, 4]), weights, LocalSinkIds, 4, Settled(), True, 2)
    accepted(Routing, sink.topk_ids, weights, LocalSinkIds, 4, Settled(), True, 2)
    error = refused(FlatRowsInput, Fp32Rows(torch.zeros(2, 8)), sink)
    assert error.reason == "holds space = LocalSinkIds, expected LocalIds"
    relabelled = refused(Routing, sink.topk_ids, weights, LocalIds, 4, Settled(), True, 2, level="values")
    assert relabelled.reason == "holds the id 4, but local ids over 4 experts lie in -1..3"
    converted = torch.where(sink.topk_ids == 4, -1, sink.topk_ids)
    accepted(Routing, converted, weights, LocalIds, 4, Settled(), True, 2)
    assert torch.equal(converted, ids([-1, 0], [1, -1]))


def test_pad_tokens() -> None:
    """sgl-project/sglang#30895: rows of a padded graph batch keep values that are not zero."""
    w = random_weights()
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    rule = SoftmaxTopK(2, renormalize=True)
    unpadded = run(w, rows[:3], rule.route(logits[:3]))
    rows[3] = math.nan
    count = DeviceCount(torch.tensor([3], dtype=torch.int32))
    routing = rule.route(logits, count)
    assert torch.equal(localize(routing, 0, 4).topk_ids[3], torch.tensor([-1, -1], dtype=torch.int32))
    got = run(w, rows, routing)
    torch.testing.assert_close(got[:3], unpadded)
    assert torch.equal(got[3], torch.zeros(8))
    count.count.fill_(2)  # and nothing is built again
    got = run(w, rows, routing)
    assert torch.equal(got[2:], torch.zeros(2, 8))
    torch.testing.assert_close(got[:2], unpadded[:2])


def test_empty_batch() -> None:
    """sgl-project/sglang#38773: no rows reach a kernel that rejects them."""
    w = random_weights()
    w13, w2 = w.w13.bfloat16(), w.w2.bfloat16()
    layer = StandardDispatcher(bf16_as_is).then(Experts(prepare_reference(Bf16ExpertWeights(w13, w2, GateUp))))

    def part(rows: Tensor, topk_ids: Tensor) -> Tensor:
        with debug("strict"):
            return layer(Bf16Rows(rows), from_topk(topk_ids, torch.ones(topk_ids.shape), 4))

    row, route = torch.ones(1, 8, dtype=torch.bfloat16), ids([0, 3])
    nothing = part(row[:0], route[:0])
    assert (nothing.shape, nothing.dtype) == ((0, 8), torch.bfloat16)
    assert torch.equal(torch.cat([nothing, part(row, route)]), part(row, route))


def test_id_space_of_another_rank() -> None:
    """ROCm/aiter#3995: global ids index the weights of one rank; a check of their range alone would let [[0, 1]] pass."""
    weights = torch.tensor([[0.25, 0.75]])
    for given in (ids([0, 3]), ids([0, 1])):
        logical = from_topk(given, weights, 4)
        error = refused(FlatRowsInput, Fp32Rows(torch.zeros(1, 8)), logical)
        assert (error.field, error.reason) == ("routing", "holds space = LogicalIds, expected LocalIds")
    local = localize(from_topk(ids([0, 3]), weights, 4), 2, 2)
    assert torch.equal(local.topk_ids, ids([-1, 1]))
    accepted(FlatRowsInput, Fp32Rows(torch.zeros(1, 8)), local)


def test_id_space_beyond_the_logical_experts() -> None:
    """vllm-project/vllm-ascend#8501: ids of six physical slots where four logical experts are meant."""
    error = refused(from_topk, ids([5, 3]), torch.ones(1, 2), 4, level="values")
    assert error.reason == "holds the id 5, but logical ids over 4 experts lie in -1..3"
    assert error.hint == "was an id mapped twice, or not at all?"


def test_id_space_of_scores_and_ids() -> None:
    """huggingface/transformers#45473: scores cut to the local experts, ids left as they were."""
    given = ids([0, 5], [4, 7], [2, 6])
    error = refused(from_topk, given, torch.ones(3, 4), 8)
    assert (error.field, error.reason) == ("topk_weights", "axis 1 is 4, expected k = 2")
    scores = torch.arange(1.0, 7.0).view(3, 2)
    local = localize(from_topk(given, scores, 8), 4, 4)
    assert torch.equal(local.topk_ids, ids([-1, 1], [0, 3], [-1, 2]))
    assert torch.equal(local.topk_weights, torch.tensor([[0.0, 2.0], [3.0, 4.0], [0.0, 6.0]]))


def test_renormalise() -> None:
    """sgl-project/sglang#35160: without renormalisation the raw logits came out as weights."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    over_all = SoftmaxTopK(2, renormalize=False).route(logits)
    torch.testing.assert_close(over_all.topk_weights, torch.tensor([[0.6439, 0.2369]]), atol=1e-4, rtol=0)
    over_chosen = SoftmaxTopK(2, renormalize=True).route(logits)
    torch.testing.assert_close(over_chosen.topk_weights, torch.tensor([[0.7311, 0.2689]]), atol=1e-4, rtol=0)
    assert (over_all.renormalized, over_chosen.renormalized) == (False, True)


def test_routed_scaling() -> None:
    """vllm-project/vllm#45037: the factor applied in the experts and again by the model, or by nobody."""
    topk_ids, weights = ids([0, 1]), torch.tensor([[0.5, 0.5]])
    experts = constant_expert(1.0)
    pending = Routing(topk_ids, weights, LogicalIds, 4, Pending(2.5), True, 1)
    assert torch.equal(run(experts, torch.ones(1, 4), pending), torch.full((1, 4), 2.5))
    folded = Routing(topk_ids, weights * 2.5, LogicalIds, 4, Settled(), False, 1)
    assert torch.equal(run(experts, torch.ones(1, 4), folded), torch.full((1, 4), 2.5))


def test_weights_twice() -> None:
    """vllm-project/vllm#43694: the router weight on the input and again on the output."""
    experts, routing = constant_expert(4.0), from_topk(ids([1]), torch.tensor([[0.5]]), 4)
    assert torch.equal(run(experts, torch.ones(1, 4), routing), torch.full((1, 4), 2.0))


# ---- weights -----------------------------------------------------------------------------------------------------------------------


def one_channel(order: type[GateUpOrder], w13: list[float], inter: int = 1) -> Fp32ExpertWeights[GateUpOrder]:
    """Return one expert over one channel whose result is the sum of its activated rows."""
    return Fp32ExpertWeights(torch.tensor(w13).view(1, 2 * inter, 1), torch.ones(1, 1, inter), order)


ONE = from_topk(ids([0]), torch.ones(1, 1), 1)


def silu(value: float) -> float:
    return value / (1 + math.exp(-value))


def test_gate_up_halves() -> None:
    """sgl-project/sglang#32430: w13 as [gate; up] for a kernel that reads [up; gate]."""
    x = torch.ones(1, 1)
    assert float(run(one_channel(GateUp, [1.0, 2.0]), x, ONE)) == pytest.approx(1.4621, abs=1e-4)
    assert float(run(one_channel(UpGate, [1.0, 2.0]), x, ONE)) == pytest.approx(1.7616, abs=1e-4)  # the other meaning of the same bytes
    w = one_channel(GateUp, [1.0, 2.0])
    converted = Fp32ExpertWeights(UpGate.join(*GateUp.split(w.w13, 1), 1), w.w2, UpGate)
    assert float(run(converted, x, ONE)) == pytest.approx(1.4621, abs=1e-4)


def test_gate_up_scales_move_with_their_rows() -> None:
    """sgl-project/sglang#32430: block scales paired with the wrong half."""
    inter = hidden = 128
    w13 = torch.cat([torch.full((1, inter, hidden), 1.0), torch.full((1, inter, hidden), 2.0)], 1).to(FP8)
    scale = torch.tensor([[[1.0], [0.5]]])  # gate rows mean 1, up rows mean 1
    w2, w2_scale = torch.ones(1, hidden, inter).to(FP8), torch.ones(1, 1, 1)
    straight = Fp8Block128ExpertWeights(w13, w2, scale, w2_scale, GateUp)
    turned = Fp8Block128ExpertWeights(UpGate.join(*GateUp.split(w13, 1), 1), w2, UpGate.join(*GateUp.split(scale, 1), 1), w2_scale, UpGate)
    for weights in (straight, turned):
        gate, up = weights.order.split(weights.dequantize_w13(0), 0)
        assert torch.equal(gate, torch.ones(inter, hidden))
        assert torch.equal(up, torch.ones(inter, hidden))


def test_gate_up_interleaved() -> None:
    """Dao-AILab/sonic-moe#45: rows g0, u0, g1, u1 against halves."""
    x = torch.ones(1, 1)
    halves = torch.tensor([1.0, 2.0, 10.0, 20.0])
    right = run(one_channel(GateUp, [1.0, 2.0, 10.0, 20.0], inter=2), x, ONE)
    assert float(right) == pytest.approx(7.311 + 35.232, abs=1e-3)
    misread = run(one_channel(Interleaved, [1.0, 2.0, 10.0, 20.0], inter=2), x, ONE)
    assert float(misread) == pytest.approx(silu(1) * 2 + silu(10) * 20, abs=1e-3)
    assert (silu(1) * 2, silu(10) * 20) == pytest.approx((1.462, 199.99), abs=1e-2)
    woven = Interleaved.join(*GateUp.split(halves, 0), 0)
    assert torch.equal(woven, torch.tensor([1.0, 10.0, 2.0, 20.0]))
    assert torch.equal(run(one_channel(Interleaved, [1.0, 10.0, 2.0, 20.0], inter=2), x, ONE), right)
    assert torch.equal(GateUp.join(*Interleaved.split(woven, 0), 0), halves)


def test_weight_state() -> None:
    """vllm-project/vllm#42821: weights prepared twice, or loaded into what is prepared already."""
    w = one_channel(GateUp, [1.0, 2.0])
    prepared = prepare_reference(w)

    def prepare_again(prepare: Callable[..., object]) -> None:
        prepare(prepared)

    with pytest.raises(TypeError, match="takes expert weights in checkpoint layout; got ReferenceDenseWeights"):
        prepare_again(prepare_reference)
    with pytest.raises(AttributeError):
        setattr(prepared, "weights", w)  # noqa: B010  a checker refuses the statement
    assert float(run(w, torch.ones(1, 1), ONE)) == pytest.approx(1.4621, abs=1e-4)


def test_divisibility() -> None:
    """vllm-project/vllm#48173: 192 per rank in blocks of 128; both halves together do divide."""

    def build(inter: int, blocks: int) -> tuple[object, ...]:
        w13, w2 = torch.zeros(2, 2 * inter, 128, dtype=FP8), torch.zeros(2, 128, inter, dtype=FP8)
        return w13, w2, torch.ones(2, blocks, 1), torch.ones(2, 1, inter // 128), GateUp

    error = refused(Fp8Block128ExpertWeights, *build(192, 3))
    assert error.reason == "inter = 192 is not a multiple of 128"
    accepted(Fp8Block128ExpertWeights, *build(256, 4))


def test_scale_dtype_of_powers_of_two() -> None:
    """sgl-project/sglang#35388: float32 scales that are declared powers of two, and are not."""
    data = torch.zeros(4, 256).to(FP8)
    for scale in (0.25, 0.5):
        packed = relayouts.pack.run(Fp8Block128Rows(data, torch.full((4, 2), scale)))
        accepted(Fp8Block128PackedRows, packed.data, packed.scale)
    with pytest.raises(ValueError, match="powers of two"):
        relayouts.pack.run(Fp8Block128Rows(data, torch.full((4, 2), 0.3)))


def test_scale_layout_swizzled() -> None:
    """vllm-project/vllm#42118: scales row-major after the all-to-all, where the kernel reads tiles."""
    data, scale = torch.zeros(2, 128, dtype=FP8), bits(*range(120, 128)).view(2, 4)
    assert refused(MxFp8SwizzledRows, data, scale).hint == "these values do satisfy MxFp8Rows"
    rows = MxFp8Rows(data, scale)
    swizzled = relayouts.swizzle.run(rows)
    assert swizzled.scale.shape == (512,)
    accepted(MxFp8SwizzledRows, data, swizzled.scale)
    assert torch.equal(relayouts.unswizzle.run(swizzled).scale.view(torch.uint8), scale.view(torch.uint8))


def test_scale_layout_packed() -> None:
    """PaddlePaddle/PaddleFleet#1474: packed words row-major, where the kernel wants aligned columns; with one word all layouts coincide."""
    data, words = torch.zeros(3, 1024, dtype=FP8), torch.arange(24, dtype=torch.uint8).view(3, 8).view(torch.int32)
    assert refused(Fp8Block128PackedRows, data, words).field == "scale"
    unaligned = torch.empty_strided((3, 2), (1, 3), dtype=torch.int32).copy_(words)
    assert refused(Fp8Block128PackedRows, data, unaligned).reason == "stride of axis 1 is 3, expected 4*(-(-rows//4)) = 4"
    good = torch.empty_strided((3, 2), (1, 4), dtype=torch.int32).copy_(words)
    accepted(Fp8Block128PackedRows, data, good)
    read = relayouts.unpack.run(Fp8Block128PackedRows(data, good)).scale
    assert torch.equal(read, e8m0.decode(bits(*range(24)).view(3, 8)))
    assert refused(Fp8Block128PackedRows, data, good.contiguous()).field == "scale"
    accepted(Fp8Block128PackedRows, data[:, :512].contiguous(), words[:, :1].contiguous())


def test_scales_that_multiply_and_that_divide() -> None:
    """vllm-project/vllm#47733: the reciprocal of a scale, which is as finite and positive as the scale."""
    data, scale = torch.zeros(1, 16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), torch.ones(1, 2).to(FP8)
    engine = InverseScaleFactor(torch.tensor([224.0]))
    assert refused(NvFp4Rows, data, scale, engine).field == "global_scale"
    accepted(NvFp4Rows, data, scale, engine.inverted())
    assert float(engine.inverted().factor) == pytest.approx(0.004464, abs=1e-6)


def test_poison_rows() -> None:
    """sgl-project/sglang#32385: scales of rows that nobody wrote, looked at by a consumer that checks them all."""
    routing = localize(mask_padded(from_topk(ids([0], [0], [0], [0]), torch.ones(4, 1), 1), ids([1]).view(1)), 0, 1)
    live = torch.tensor([1], dtype=torch.int32)
    outputs: list[Tensor] = []
    for inactive in (math.nan, 0.3, -1.0):
        scale = torch.full((4, 2), inactive)
        scale[0] = torch.tensor([0.5, 2.0])
        rows = Fp8Block128Rows(torch.ones(4, 256).to(FP8), scale)
        accepted(FlatRowsInput, rows, routing)
        outputs.append(relayouts.pack.run(rows, live).dequantize()[0])
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


def test_packing() -> None:
    """vllm-project/vllm#48552: AWQ words read as GPTQ words; where the shapes agree, the class alone tells."""
    ascending, awq = 0x76543210, 0x75316420
    w2 = torch.tensor([[[ascending]]], dtype=torch.int32)
    gptq_parts = (torch.zeros(1, 1, 16, dtype=torch.int32), w2.expand(1, 1, 8).contiguous(), torch.ones(1, 1, 16), torch.ones(1, 1, 8), GateUp, 8)
    awq_words = torch.full((1, 8, 1), awq, dtype=torch.int32)
    awq_parts = (torch.zeros(1, 8, 2, dtype=torch.int32), awq_words, torch.ones(1, 1, 16), torch.ones(1, 1, 8), GateUp, 8)
    assert refused(GptqExpertWeights, *awq_parts).field
    assert refused(AwqExpertWeights, *gptq_parts).field
    values = torch.arange(8.0) - 8
    assert torch.equal(GptqExpertWeights(*gptq_parts).dequantize_w2(0)[0], values)  # along the rows of a word
    assert torch.equal(AwqExpertWeights(*awq_parts).dequantize_w2(0)[:, 0], values)  # along its columns


def test_divisibility_of_a_rank() -> None:
    """vllm-project/vllm#48173: 96 on two ranks is 48 each, in blocks of 32: said before anything is cut."""
    w13, w2 = torch.zeros(1, 192, 32, dtype=FP8), torch.zeros(1, 32, 96, dtype=FP8)
    weights = MxFp8ExpertWeights(w13, w2, bits(127).expand(1, 192, 1).contiguous(), bits(127).expand(1, 32, 3).contiguous(), GateUp)
    with pytest.raises(ValueError, match="inter = 96 on 2 ranks is 48 each, which is not a multiple of 32: w2_scale"):
        shard_inter(weights, 0, 2)
    error = refused(
        MxFp8ExpertWeights, w13[:, :96], w2[:, :, :48].contiguous(), weights.w13_scale[:, :96], weights.w2_scale[:, :, :1].contiguous(), GateUp
    )
    assert error.reason == "inter = 48 is not a multiple of 32"


def test_stage_variant_of_fp4() -> None:
    """vllm-project/vllm-ascend#11950: labelled fp4, and bfloat16 still, at twice the width."""
    wide = torch.zeros(2, 64, dtype=torch.bfloat16)
    packed, scale = torch.zeros(2, 32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), bits(127, 127, 127, 127).view(2, 2)
    assert refused(MxFp4Rows, wide, scale).reason == "dtype is bfloat16, expected float4_e2m1fn_x2"
    accepted(MxFp4Rows, packed, scale)
    assert MxFp4Rows(packed, scale).hidden == 64


# ---- tensors and graphs ------------------------------------------------------------------------------------------------------------


def test_strides() -> None:
    """vllm-project/vllm#40853: padding cut off by a slice leaves the padded row stride."""
    padded, scale = torch.zeros(2, 192, dtype=FP8), torch.ones(2, 1)
    error = refused(Fp8Block128Rows, padded[:, :128], scale)
    assert error.reason == "is not contiguous: stride (192, 1) for shape [2, 128]"
    assert "copy it with .contiguous()" in error.hint
    accepted(Fp8Block128Rows, padded[:, :128].contiguous(), scale)
    accepted(Fp8Block128Rows, padded[:1, :128], scale[:1])  # one row: the slice is contiguous


def test_stage_variant() -> None:
    """vllm-project/vllm-ascend#11950: a label says quantised, the tensor is bfloat16 still; and the other way round."""
    data, scale = torch.zeros(2, 32, dtype=torch.bfloat16), bits(127, 127).view(2, 1)
    assert refused(MxFp8Rows, data, scale).reason == "dtype is bfloat16, expected float8_e4m3fn"
    assert refused(Bf16Rows, data.to(FP8)).reason == "dtype is float8_e4m3fn, expected bfloat16"

    def with_scale(build: Callable[..., object]) -> None:
        build(data, scale)

    with pytest.raises(TypeError):
        with_scale(Bf16Rows)


def test_aliasing() -> None:
    """vllm-project/vllm#28939: experts write over rows that the shared expert reads next."""
    x, experts = torch.ones(1, 4), constant_expert(2.0)
    before = x.clone()
    routed = run(experts, x, from_topk(ids([0]), torch.ones(1, 1), 4))
    shared = 3 * x
    assert torch.equal(routed + shared, torch.full((1, 4), 5.0))
    assert torch.equal(x, before)
    assert routed.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


class Compile(Protocol):
    def __call__(self, model: Callable[..., object], /, *, backend: object, fullgraph: bool) -> Callable[..., object]: ...


COMPILE: Compile = vars(torch)["compile"]  # its own annotations are partial


def test_compile_graph_reads_the_rows_of_this_call() -> None:
    """vllm-project/vllm#52383: the second call of a traced region answered with the rows of the first."""
    torch.compiler.reset()
    w = random_weights()
    layer = StandardDispatcher(fp32_as_is).then(Experts(prepare_reference(w)))
    routing = from_topk(ids([0, 1], [2, 3]), torch.ones(2, 2), 4)

    def step(x: Tensor) -> Tensor:
        return layer(Fp32Rows(x), routing)

    compiled = COMPILE(step, backend="aot_eager", fullgraph=True)
    for seed in (1, 2):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
        got = compiled(x)
        assert isinstance(got, Tensor)
        torch.testing.assert_close(got, run(w, x, routing))


def test_compile_graph_is_shared_by_equal_layers() -> None:
    """vllm-project/vllm#32805: every layer of a model compiled for itself."""
    torch.compiler.reset()
    graphs = 0

    def counting(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        nonlocal graphs
        graphs += 1
        return module

    def layer(inter: int) -> Fp32Layer:
        return StandardDispatcher(fp32_as_is).then(Experts(prepare_reference(random_weights(inter=inter))))

    def step(layer: Fp32Layer, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        return layer(Fp32Rows(x), from_topk(topk_ids, topk_weights, 4))

    compiled = COMPILE(step, backend=counting, fullgraph=True)
    x, topk_ids, topk_weights = torch.ones(2, 8), ids([0, 1], [2, 3]), torch.ones(2, 2)
    for _ in range(8):
        compiled(layer(4), x, topk_ids, topk_weights)
    assert graphs == 1
    compiled(layer(6), x, topk_ids, topk_weights)
    assert graphs == 2


OPTIMISED = """
import torch
import moe_typed as m

def attempt(build):
    try:
        build()
    except Exception as error:
        print(type(error).__name__, error)
    else:
        raise SystemExit("accepted")

fp8, ones = torch.zeros(2, 256, dtype=torch.float8_e4m3fn), torch.ones(2, 2)
logical = m.from_topk(torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1), 4)
prepared = m.prepare_reference(m.Fp32ExpertWeights(torch.zeros(1, 2, 1), torch.zeros(1, 1, 1), m.GateUp))
with m.debug("values"):
    attempt(lambda: m.Fp8Block128Rows(fp8, ones.T))
    attempt(lambda: m.Fp8Block128Rows(fp8[:, :200], ones))
    attempt(lambda: m.MxFp8Rows(fp8, ones))
    attempt(lambda: m.from_topk(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 4))
    attempt(lambda: m.from_topk(torch.full((2, 1), 4, dtype=torch.int32), torch.ones(2, 1), 4))
    attempt(lambda: m.StandardDispatchOutput(m.Bf16Rows(torch.zeros(2, 8, dtype=torch.bfloat16)), logical))
attempt(lambda: m.prepare_reference(prepared))
attempt(lambda: m.localize(logical, 3, 2))
attempt(lambda: m.StandardDispatcher(m.quantize_mxfp8).then(m.Experts(prepared)))
attempt(lambda: m.quantize_mxfp8.run(m.Bf16Rows(torch.zeros(2, 8, dtype=torch.bfloat16))))
"""


def test_stripped_asserts() -> None:
    """NVIDIA/TensorRT-LLM#17532: a check written as an assertion is gone under -O."""
    outputs = {
        subprocess.run([sys.executable, *flags, "-c", OPTIMISED], check=True, capture_output=True, text=True).stdout
        for flags in ([], ["-O"], ["-OO"])
    }
    (said,) = outputs
    kinds = [line.split()[0] for line in said.splitlines() if line[0] != " "]
    assert kinds == ["BoundaryError"] * 6 + ["TypeError", "ValueError", "BoundaryError", "ValueError"]

"""Weights and rows in all formats of the Triton runner, and the comparison with the reference."""

from collections.abc import Callable
from typing import Final, cast

import attrs
import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, Fp16Rows, Fp32Rows, GateUp, Payload, Routing
from moe_typed.formats import (
    AwqExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    CompressedInt4ExpertWeights,
    Fp8ChannelExpertWeights,
    Fp8TensorExpertWeights,
    Fp8TensorRows,
    Fp8TokenRows,
    Fp16TransposedExpertWeights,
    Fp16UngatedExpertWeights,
    Fp32TransposedExpertWeights,
    Fp32UngatedExpertWeights,
    GateUpOrder,
    GptqExpertWeights,
    Int8ChannelExpertWeights,
    MxFp4ExpertWeights,
    MxFp8ExpertWeights,
    MxFp8Rows,
    Ungated,
    quantizers,
)
from moe_typed.ops.quantised_product import reference
from moe_typed.ops.quantised_product.spec import Rows
from moe_typed.routing import LocalIds
from moe_typed.runners import Activation, SiluAndMul, reference_experts
from moe_typed.runners.triton import AnyTritonWeights, TritonCheckpoint, prepare_triton
from moe_typed.runners.triton.activations import epilogue_of, split_of
from moe_typed.runners.triton.general import TritonGeneralRunner
from moe_typed.runners.triton.operands import ScaledCheckpoint, operands
from moe_typed.stages import FlatRowsInput
from tests.ops.support import on_cpu, on_cuda
from tests.runners.triton_support import row_norms

HIDDEN, INTER = (256, 128) if torch.cuda.is_available() else (64, 32)
GROUP: Final = 32

# Per row, |found - reference| / |reference|: of the model's dtype, and of the rows between the products where they are quantised.
TOLERANCE: Final = {
    "fp32": 1e-5,
    "fp16": 1e-2,
    "bf16": 1.5e-2,
    "fp8-tensor": 8e-2,
    "fp8-token": 8e-2,
    "mxfp8": 8e-2,
    "int8-token": 3e-2,
}
ROWS: Final[dict[str, Callable[[Tensor], Payload]]] = {
    "fp32": Fp32Rows,
    "fp16": lambda data: Fp16Rows(data.half()),
    "bf16": lambda data: Bf16Rows(data.bfloat16()),
    "fp8-tensor": lambda data: quantizers.fp8_tensor.run(Fp32Rows(data)),
    "fp8-token": lambda data: quantizers.fp8_token.run(Fp32Rows(data)),
    "mxfp8": lambda data: quantizers.mxfp8.run(Fp32Rows(data)),
    "int8-token": lambda data: quantizers.int8_token.run(Fp32Rows(data)),
}
SCALED: Final = {
    "fp8-tensor": ("fp8-tensor", "fp8-token"),
    "fp8-channel": ("fp8-tensor", "fp8-token"),
    "mxfp8": ("mxfp8",),
    "mxfp4": ("mxfp8",),
    "int8-channel": ("int8-token",),
    "int4-awq": (),
    "int4-awq-zeros": (),
    "int4-gptq": (),
    "int4-gptq-zeros": (),
    "int4-compressed": (),
}
_DENSE: Final = ("fp32", "fp16", "bf16")


def _pairs(device: str) -> list[tuple[str, str]]:
    # The interpreter multiplies bf16 wrongly.
    dense = [name for name in _DENSE if device == "cuda" or name != "bf16"]
    pairs = [(weights, rows) for weights, scaled in SCALED.items() for rows in (*dense, *scaled)]
    return pairs + [(f"{name}-{kind}", name) for name in dense for kind in ("transposed", "ungated")]


def _targets(pairs: Callable[[str], list[tuple[str, str]]]) -> pytest.MarkDecorator:
    params = [pytest.param(device, *pair, marks=marks) for device, marks in (("cpu", on_cpu), ("cuda", on_cuda)) for pair in pairs(device)]
    return pytest.mark.parametrize(("device", "fmt", "rows_fmt"), params)


def _last(device: str) -> list[tuple[str, str]]:
    """Return one pair for each format of weights: with rows that are quantised where it takes any."""
    return list({weights: (weights, rows) for weights, rows in _pairs(device)}.values())


every_pair = _targets(_pairs)
every_format = _targets(_last)
some_formats = _targets(lambda device: [pair for pair in _last(device) if pair[0] in ("fp8-channel", "mxfp4", "int8-channel", "int4-awq-zeros")])


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(seed: int, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def make_weights(
    fmt: str,
    device: str,
    experts: int,
    order: type[GateUpOrder] = GateUp,
    *,
    hidden: int = HIDDEN,
    inter: int = INTER,
    group: int = GROUP,
    biased: bool = False,
) -> TritonCheckpoint:
    """Return weights whose values are about 1 / sqrt(depth), with scales that differ."""
    if fmt.endswith("ungated"):
        order = Ungated
    columns = inter if order is Ungated else 2 * inter
    v13, v2 = rand(1, experts, columns, hidden).to(device), rand(2, experts, hidden, inter).to(device)
    dtype = {"fp16": torch.float16, "fp32": torch.float32}.get(fmt.split("-")[0], torch.bfloat16)
    b13, b2 = (rand(3, experts, columns).to(device, dtype), rand(4, experts, hidden).to(device, dtype)) if biased else (None, None)
    fp8, by13, by2 = torch.float8_e4m3fn, hidden**-0.5, inter**-0.5

    def spread(seed: int, by: float, *shape: int) -> Tensor:
        return ((rand(seed, *shape).abs() + 0.5) * by).to(device)

    def e8m0(seed: int, *shape: int) -> Tensor:
        return integers(seed, 122, 126, *shape).to(device, torch.uint8).view(torch.float8_e8m0fnu)

    def words(seed: int, *shape: int) -> Tensor:
        return integers(seed, -(2**31), 2**31, *shape).to(device, torch.int32)

    def group_scales(*shape: int) -> tuple[Tensor, Tensor]:
        return spread(5, by13 / 5, *shape[:3]).half(), spread(6, by2 / 5, *shape[3:]).half()

    match fmt:
        case "fp32-transposed" | "fp16-transposed" | "bf16-transposed":
            w13, w2 = (v13 * by13).transpose(1, 2).contiguous().to(dtype), (v2 * by2).transpose(1, 2).contiguous().to(dtype)
            if dtype == torch.float32:
                return Fp32TransposedExpertWeights(w13, w2, order, b13, b2)
            return (Fp16TransposedExpertWeights if dtype == torch.float16 else Bf16TransposedExpertWeights)(w13, w2, order, b13, b2)
        case "fp32-ungated" | "fp16-ungated" | "bf16-ungated":
            w13, w2 = (v13 * by13).to(dtype), (v2 * by2).to(dtype)
            if dtype == torch.float32:
                return Fp32UngatedExpertWeights(w13, w2, Ungated, b13, b2)
            return (Fp16UngatedExpertWeights if dtype == torch.float16 else Bf16UngatedExpertWeights)(w13, w2, Ungated, b13, b2)
        case "fp8-tensor":
            return Fp8TensorExpertWeights(v13.to(fp8), v2.to(fp8), spread(5, by13, experts, 2), spread(6, by2, experts), order, b13, b2)
        case "fp8-channel":
            s13, s2 = spread(5, by13, experts, columns), spread(6, by2, experts, hidden)
            return Fp8ChannelExpertWeights(v13.to(fp8), v2.to(fp8), s13, s2, order, b13, b2)
        case "int8-channel":
            s13, s2 = spread(5, by13 / 40, experts, columns), spread(6, by2 / 40, experts, hidden)
            i13, i2 = ((value * 40).round().clamp(-128, 127).to(torch.int8) for value in (v13, v2))
            return Int8ChannelExpertWeights(i13, i2, s13, s2, order, b13, b2)
        case "mxfp8":
            s13, s2 = e8m0(5, experts, columns, hidden // 32), e8m0(6, experts, hidden, inter // 32)
            return MxFp8ExpertWeights(v13.to(fp8), v2.to(fp8), s13, s2, order, b13, b2)
        case "mxfp4":
            s13, s2 = e8m0(5, experts, columns, hidden // 32), e8m0(6, experts, hidden, inter // 32)
            f13, f2 = (integers(seed, 0, 256, *shape).to(device, torch.uint8).view(torch.float4_e2m1fn_x2) for seed, shape in (
                (7, (experts, columns, hidden // 2)), (8, (experts, hidden, inter // 2))
            ))  # fmt: skip
            return MxFp4ExpertWeights(f13, f2, s13, s2, order, b13, b2)
        case "int4-awq" | "int4-awq-zeros":
            s13, s2 = group_scales(experts, hidden // group, columns, experts, inter // group, hidden)
            zeros = (words(9, experts, hidden // group, columns // 8), words(10, experts, inter // group, hidden // 8))
            z13, z2 = zeros if fmt.endswith("zeros") else (None, None)
            packed = words(7, experts, hidden, columns // 8), words(8, experts, inter, hidden // 8)
            return AwqExpertWeights(*packed, s13, s2, order, group, z13, z2, b13, b2)
        case "int4-gptq" | "int4-gptq-zeros":
            s13, s2 = group_scales(experts, hidden // group, columns, experts, inter // group, hidden)
            zeros = (words(9, experts, hidden // group, columns // 8), words(10, experts, inter // group, hidden // 8))
            z13, z2 = zeros if fmt.endswith("zeros") else (None, None)
            packed = words(7, experts, hidden // 8, columns), words(8, experts, inter // 8, hidden)
            return GptqExpertWeights(*packed, s13, s2, order, group, z13, z2, b13, b2)
        case _:
            s13, s2 = group_scales(experts, columns, hidden // group, experts, hidden, inter // group)
            packed = words(7, experts, columns, hidden // 8), words(8, experts, hidden, inter // 8)
            return CompressedInt4ExpertWeights(*packed, s13, s2, order, group, b13, b2)


def default_activation(fmt: str) -> Activation:
    from moe_typed.runners import Relu2

    return Relu2() if fmt.endswith("ungated") else SiluAndMul()


def prepare(weights: TritonCheckpoint) -> AnyTritonWeights:
    # Over a union of formats no overload is the one; which it is, the tests of accept-sets say.
    return cast("Callable[[TritonCheckpoint], AnyTritonWeights]", prepare_triton)(weights)


def make_runner(weights: TritonCheckpoint, activation: Activation) -> TritonGeneralRunner:
    """Return the general runner; on a CPU, with results in float32, since the interpreter rounds to bf16 wrongly."""
    runner = prepare(weights).runner(activation)
    assert isinstance(runner, TritonGeneralRunner)
    return runner if weights.w13.device.type == "cuda" else attrs.evolve(runner, out_dtype=torch.float32)


def check(
    payload: Payload, routing: Routing[LocalIds], weights: TritonCheckpoint, rows_fmt: str, activation: Activation, live: int | None = None
) -> None:
    """Run, compare the live rows with the reference, and demand zeros elsewhere."""
    found = make_runner(weights, activation).run(FlatRowsInput(payload, routing)).hidden_states
    assert found.shape == (payload.rows, weights.hidden)
    live = found.shape[0] if live is None else live
    ids, by = routing.topk_ids[:live], routing.topk_weights[:live]
    expected = reference_experts(payload.dequantize()[:live], ids, by, weights, activation)
    error, norm = row_norms(found[:live].float() - expected), row_norms(expected)
    assert bool((error <= TOLERANCE[rows_fmt] * norm).all()), f"largest error of a row: {float((error / norm).nan_to_num().max()):.2e}"
    assert not bool(found[live:].any())


def requantising_reference(
    payload: Payload, routing: Routing[LocalIds], weights: ScaledCheckpoint, activation: Activation, dtype: torch.dtype
) -> Tensor:
    """Return what the layer is where rows between the products have ``dtype``, and are then quantised as the payload was; live rows, no kernels."""
    up, down = operands(weights)
    ids, by = routing.topk_ids, routing.topk_weights
    split, epilogue = split_of(weights.order, weights.inter), epilogue_of(activation)
    rows = Rows(payload.dequantize())
    inner = reference.product(rows, up, ids, None, ids.shape[1], dtype, split, epilogue)
    between = Rows(quantize_rows(payload, inner).dequantize())
    return (reference.product(between, down, ids, None, 1, torch.float32).view(*ids.shape, -1) * by.unsqueeze(2)).sum(1)


def quantize_rows(payload: Payload, rows: Tensor) -> Payload:
    """Return rows as the runner quantises them between the products."""
    match payload:
        case Fp8TensorRows() | Fp8TokenRows():  # one scale a row for both
            return quantizers.fp8_token.run(Fp32Rows(rows.float()))
        case MxFp8Rows():
            return quantizers.mxfp8.run(Fp32Rows(rows.float()))
        case _:
            return quantizers.int8_token.run(Fp32Rows(rows.float()))


def errors(found: Tensor, expected: Tensor) -> Tensor:
    """Return |found - expected| / |expected| of each row."""
    return (row_norms(found.float() - expected) / row_norms(expected)).nan_to_num()

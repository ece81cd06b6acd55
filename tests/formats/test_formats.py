"""The five facts of each format, and weights against a loop over their blocks."""

import pytest
import torch
from torch import Tensor

from moe_typed import (
    Bf16ExpertWeights,
    Bf16Rows,
    Fp8Block128ExpertWeights,
    Fp8Block128Rows,
    Fp16ExpertWeights,
    Fp16Rows,
    Fp32ExpertWeights,
    Fp32Rows,
    GateUp,
    MxFp8ExpertWeights,
    MxFp8Rows,
    Payload,
    debug,
)
from moe_typed.boundary import fields_of
from moe_typed.boundary.fields import TensorSpec
from moe_typed.formats import ExpertWeights, Format, GateUpOrder, ScaleOrder, ScaleRounding

BF16, F16, F32, FP8, E8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e8m0fnu
ROW_MAJOR, NONE, UP = ScaleOrder.ROW_MAJOR, ScaleRounding.NONE, ScaleRounding.POWER_OF_TWO

FACTS = [
    # class                     name            data  group       scale  order      rounding
    (Bf16Rows, "bf16", BF16, None),
    (Fp16Rows, "fp16", F16, None),
    (Fp32Rows, "fp32", F32, None),
    (Fp8Block128Rows, "fp8-block128", FP8, ((1, 128), F32, ROW_MAJOR, NONE)),
    (MxFp8Rows, "mxfp8", FP8, ((1, 32), E8, ROW_MAJOR, UP)),
    (Bf16ExpertWeights, "bf16", BF16, None),
    (Fp16ExpertWeights, "fp16", F16, None),
    (Fp32ExpertWeights, "fp32", F32, None),
    (Fp8Block128ExpertWeights, "fp8-block128", FP8, ((128, 128), F32, ROW_MAJOR, NONE)),
    (MxFp8ExpertWeights, "mxfp8", FP8, ((1, 32), E8, ROW_MAJOR, UP)),
]
Scaled = tuple[tuple[int, int], torch.dtype, ScaleOrder, ScaleRounding]


@pytest.mark.parametrize(("cls", "name", "data", "scaled"), FACTS)
def test_the_five_facts(cls: type[Payload | ExpertWeights[GateUpOrder]], name: str, data: torch.dtype, scaled: Scaled | None) -> None:
    found: Format = cls.format
    scale = found.scale
    assert (found.name, found.data_dtype) == (name, data)
    assert (None if scale is None else (scale.group, scale.dtype, scale.order, scale.rounding)) == scaled


@pytest.mark.parametrize(("cls", "name", "data", "scaled"), FACTS)
def test_the_facts_are_those_that_the_annotations_check(cls: type, name: str, data: torch.dtype, scaled: Scaled | None) -> None:
    specs = {field.name: field.spec for field in fields_of(cls) if isinstance(field.spec, TensorSpec)}
    values = [spec for key, spec in specs.items() if key in ("data", "w13", "w2")]
    scales = [spec for key, spec in specs.items() if key.endswith("scale")]
    assert {spec.dtypes for spec in values} == {(data,)}
    assert {spec.dtypes for spec in scales} == (set() if scaled is None else {(scaled[1],)})
    for spec in scales:  # row-major, and the group of the columns is what the last dim is divided by
        assert scaled is not None
        assert spec.layout is not None
        assert spec.layout.contiguous
        assert spec.dims[-1].text.endswith(f"//{scaled[0][1]}")


@pytest.mark.parametrize(
    ("cls", "size"),
    [
        (Bf16Rows, 3 * 512),
        (Fp32Rows, 3 * 1024),
        (Fp8Block128Rows, 3 * (256 + 8)),
        (MxFp8Rows, 3 * (256 + 8)),
        (Fp8Block128ExpertWeights, 3 * 256 + 8),
    ],
)
def test_the_bytes_of_three_rows_of_256(cls: type[Payload | ExpertWeights[GateUpOrder]], size: int) -> None:
    assert cls.format.payload_bytes(3, 256) == size


@pytest.mark.parametrize("cls", [Bf16Rows, Fp16Rows, Fp32Rows])
def test_dense_rows_mean_their_values(cls: type[Bf16Rows | Fp16Rows | Fp32Rows]) -> None:
    data = torch.tensor([[1.5, -2.0, 0.1]]).to(cls.format.data_dtype)
    rows = cls(data)
    assert rows.rows == 1
    assert rows.dequantize().dtype == torch.float32
    assert torch.equal(rows.dequantize(), data.to(torch.float32))


def codes(generator: torch.Generator, *shape: int) -> Tensor:
    return (torch.randn(*shape, generator=generator) * 10).to(FP8)


def check(dequantised: Tensor, data: Tensor, scale: Tensor, block: tuple[int, int]) -> None:
    """Compare with a loop over all rows and blocks."""
    rows, columns = data.shape
    assert dequantised.dtype == torch.float32
    expected = torch.empty(rows, columns, dtype=torch.float64)
    for r in range(rows):
        for c in range(0, columns, block[1]):
            expected[r, c : c + block[1]] = data[r, c : c + block[1]].double() * scale[r // block[0], c // block[1]].double()
    assert torch.equal(dequantised, expected.to(torch.float32))


def test_block_weights_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    experts, hidden, inter = 2, 256, 128
    with debug("strict"):
        weights = Fp8Block128ExpertWeights(
            codes(generator, experts, 2 * inter, hidden),
            codes(generator, experts, hidden, inter),
            torch.rand(experts, 2, 2, generator=generator),
            torch.rand(experts, 2, 1, generator=generator),
            GateUp,
        )
    assert (weights.num_experts, weights.hidden, weights.inter) == (2, 256, 128)
    for expert in range(experts):
        check(weights.dequantize_w13(expert), weights.w13[expert], weights.w13_scale[expert], (128, 128))
        check(weights.dequantize_w2(expert), weights.w2[expert], weights.w2_scale[expert], (128, 128))


def test_mxfp8_weights_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(0)
    experts, hidden, inter = 2, 64, 32

    def scales(*shape: int) -> Tensor:
        return torch.randint(100, 150, shape, generator=generator, dtype=torch.uint8).view(E8)

    with debug("strict"):
        weights = MxFp8ExpertWeights(
            codes(generator, experts, 2 * inter, hidden),
            codes(generator, experts, hidden, inter),
            scales(experts, 2 * inter, 2),
            scales(experts, hidden, 1),
            GateUp,
        )
    for expert in range(experts):
        check(weights.dequantize_w13(expert), weights.w13[expert], weights.w13_scale[expert].to(torch.float32), (1, 32))
        check(weights.dequantize_w2(expert), weights.w2[expert], weights.w2_scale[expert].to(torch.float32), (1, 32))


@pytest.mark.parametrize("cls", [Bf16ExpertWeights, Fp16ExpertWeights, Fp32ExpertWeights])
def test_dense_weights_mean_their_values(cls: type[Bf16ExpertWeights[GateUp] | Fp16ExpertWeights[GateUp] | Fp32ExpertWeights[GateUp]]) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = cls.format.data_dtype
    w13 = torch.randn(2, 6, 4, generator=generator).to(dtype)
    w2 = torch.randn(2, 4, 3, generator=generator).to(dtype)
    with debug("strict"):
        weights = cls(w13, w2, GateUp)
    assert torch.equal(weights.dequantize_w13(1), w13[1].to(torch.float32))
    assert torch.equal(weights.dequantize_w2(0), w2[0].to(torch.float32))
    assert (weights.num_experts, weights.hidden, weights.inter) == (2, 4, 3)


def test_a_dead_expert_index_is_an_error() -> None:
    weights = Fp32ExpertWeights(torch.zeros(2, 2, 1), torch.zeros(2, 1, 1), GateUp)
    with pytest.raises(IndexError):
        weights.dequantize_w13(2)

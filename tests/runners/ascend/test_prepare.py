"""Preparation: what weights become, what is refused, and that nothing of a backend is imported before it is asked for."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16ExpertWeights, GateUp, Interleaved, UpGate, debug
from moe_typed.formats import (
    AwqExpertWeights,
    Bf16TransposedExpertWeights,
    Bf16UngatedExpertWeights,
    Fp16ExpertWeights,
    Fp32ExpertWeights,
    GateUpOrder,
    Int8ChannelExpertWeights,
    Ungated,
)
from moe_typed.formats.int4 import pack_bytes, pack_words, unpack_bytes, unpack_words
from moe_typed.runners import UnsupportedError
from moe_typed.runners.acceptance import ACCEPTANCE, RunnerName
from moe_typed.runners.ascend import ASCEND_ACTIVATIONS, prepare_ascend, prepare_ascend_as, prepare_ascend_fp16, prepare_ascend_gguf
from moe_typed.runners.ascend.ops import AclFormat
from moe_typed.runners.ascend.weights.operands import W4A16Operand
from moe_typed.runners.ascend.weights.whole import shard_gguf
from moe_typed.stages import OneRank
from tests.runners.ascend.support import ACTIVATIONS, EXPERTS, HIDDEN, INTER, SCHEMES, Weights, dense, emulated, prepare

every_scheme = pytest.mark.parametrize("name", SCHEMES)
every_order = pytest.mark.parametrize("order", [GateUp, UpGate, Interleaved])


@every_scheme
def test_sizes_are_those_of_the_products(name: str) -> None:
    with debug("strict"):
        prepared = prepare(SCHEMES[name].weights(), emulated())
    assert prepared.up.sizes == (EXPERTS, HIDDEN, 2 * INTER)
    assert prepared.down.sizes == (EXPERTS, INTER, HIDDEN)
    if not isinstance(prepared.up, W4A16Operand):
        assert prepared.up.layout is AclFormat.FRACTAL_NZ


@pytest.mark.parametrize("name", ["w4a8", "w4a4", "w4a4 packed"])
@every_order
def test_int4_weights_mean_what_they_meant(name: str, order: type[GateUpOrder]) -> None:
    weights = SCHEMES[name].weights(order)
    prepared: Any = prepare(weights, emulated())
    for expert in range(EXPERTS):
        scale = prepared.up.scale.scale[expert].view(-1).to(torch.int32).view(torch.float32)
        found = unpack_words(prepared.up.words[expert]).float() * scale
        gate, up = order.split(weights.dequantize_w13(expert), 0)
        torch.testing.assert_close(found, torch.cat((gate, up)).T, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["awq", "gptq", "gptq symmetric", "compressed"])
@every_order
def test_grouped_weights_mean_what_they_meant(name: str, order: type[GateUpOrder]) -> None:
    weights = SCHEMES[name].weights(order)
    prepared: Any = prepare(weights, emulated())
    for expert in range(EXPERTS):
        for operand, matrix in ((prepared.up, weights.dequantize_w13(expert)), (prepared.down, weights.dequantize_w2(expert))):
            scale, offset = (part[expert].float().repeat_interleave(32, 0) for part in (operand.scale, operand.offset.offset))
            wanted = torch.cat(order.split(matrix, 0)) if operand is prepared.up else matrix
            torch.testing.assert_close((unpack_words(operand.words[expert]).float() + offset) * scale, wanted.T, rtol=1e-6, atol=1e-7)


class TestInt4:
    def test_a_word_of_eight(self) -> None:
        assert hex(int(pack_words(torch.arange(8))) & 0xFFFFFFFF) == "0x76543210"
        values = torch.randint(-8, 8, (3, 5, 16), generator=torch.Generator().manual_seed(0))
        assert torch.equal(unpack_words(pack_words(values)), values.int())

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_two_a_byte_are_the_same_stream(self, dim: int) -> None:
        values = torch.randint(-8, 8, (4, 16, 8), generator=torch.Generator().manual_seed(1)).to(torch.int8)
        assert torch.equal(unpack_bytes(pack_bytes(values, dim), dim), values)
        assert torch.equal(pack_bytes(values, -1).contiguous().view(torch.int32).squeeze(-1), pack_words(values).squeeze(-1))

    def test_part_of_a_word_is_refused(self) -> None:
        with pytest.raises(ValueError, match="12 values do not fill whole words of 8"):
            pack_words(torch.zeros(2, 12))


def biased(weights: Weights) -> Weights:
    fields = {**vars(weights), "b13": torch.zeros(EXPERTS, 2 * INTER).bfloat16(), "b2": torch.zeros(EXPERTS, HIDDEN).bfloat16()}
    made: Weights = type(weights)(**fields)
    return made


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


class TestRefusals:
    @pytest.mark.parametrize("name", ["w8a8", "w4a8", "w4a4", "mxfp8"])
    def test_biases_that_a_product_cannot_add(self, name: str) -> None:
        with pytest.raises(UnsupportedError, match="cannot be added on the NPU"):
            prepare(biased(SCHEMES[name].weights()), emulated())

    def test_weights_that_are_prepared_already(self) -> None:
        prepared: Any = prepare(SCHEMES["bf16"].weights(), emulated())
        with pytest.raises(TypeError, match="takes expert weights in checkpoint layout; got AscendBf16Weights"):
            prepare(prepared, emulated())
        with pytest.raises(TypeError, match="prepare_ascend_fp16 takes int8 and int4 weights"):
            prepare_ascend_fp16(prepared, emulated())

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (
                Bf16UngatedExpertWeights(zeros(2, 32, 64), zeros(2, 64, 32), Ungated),
                "^Bf16UngatedExpertWeights have no gate, and every activation on the NPU",
            ),
            (Bf16TransposedExpertWeights(zeros(2, 64, 64), zeros(2, 32, 64), GateUp), "^Bf16TransposedExpertWeights hold the reduction first"),
            (Fp32ExpertWeights(*dense(experts=2), GateUp), "^the Ascend runner has no product for Fp32ExpertWeights"),
        ],
        ids=["ungated", "transposed", "fp32"],
    )
    def test_weights_that_no_product_reads(self, weights: Weights, message: str) -> None:
        with pytest.raises(UnsupportedError, match=message):
            prepare(weights, emulated())

    def test_sizes_of_mxfp8(self) -> None:
        with pytest.raises(UnsupportedError, match="mxfp8 weights: inter = 96 is not a multiple of 64"):
            prepare(SCHEMES["mxfp8"].weights(inter=96), emulated())

    def test_a_reduction_longer_than_w4a8_takes(self) -> None:
        prepare(SCHEMES["w4a8"].weights(experts=1, hidden=64, inter=18432), emulated())
        weights = SCHEMES["w4a8"].weights(experts=1, hidden=64, inter=18496)
        with pytest.raises(UnsupportedError, match="inter = 18496 is more than 18432"):
            prepare(weights, emulated())


def test_biases_that_a_product_can_add_are_added_in_the_dtype_that_it_wants() -> None:
    w13, w2 = dense()
    b13 = torch.arange(2.0 * INTER).repeat(EXPERTS, 1)
    weights = Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), UpGate, b13.bfloat16(), torch.ones(EXPERTS, HIDDEN).bfloat16())
    prepared = prepare_ascend(weights, emulated())
    assert prepared.up.bias is not None
    assert prepared.up.bias.dtype == torch.float32
    assert prepared.up.bias[0, 0] == INTER  # gate's first, which stood in the second half


def test_beside_fp16_rows_a_bias_is_fp16() -> None:
    plain, w4a16 = SCHEMES["fp16"].weights(), biased(SCHEMES["awq"].weights())
    assert isinstance(plain, Fp16ExpertWeights)
    assert isinstance(w4a16, AwqExpertWeights)
    half = Fp16ExpertWeights(plain.w13, plain.w2, GateUp, torch.zeros(EXPERTS, 2 * INTER).half(), torch.zeros(EXPERTS, HIDDEN).half())
    with debug("values"):
        for prepared in (prepare_ascend(half, emulated()), prepare_ascend_fp16(w4a16, emulated())):
            for operand in (prepared.up, prepared.down):
                assert operand.bias is not None
                assert operand.bias.dtype == torch.float16


def test_the_activations_that_a_plan_is_told_of_are_those_that_have_a_component() -> None:
    assert {activation.name for activation in ACTIVATIONS} == set(ASCEND_ACTIVATIONS)


class TestGguf:
    @pytest.mark.parametrize("size", [1, 2, 4])
    def test_both_matrices_are_cut_along_their_rows(self, size: int) -> None:
        w13, w2 = dense()
        weights = Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), GateUp)
        shards = [shard_gguf(weights, rank, size) for rank in range(size)]
        assert torch.equal(torch.cat([shard.w2 for shard in shards], 1), weights.w2)
        gates, ups = zip(*(shard.w13.chunk(2, 1) for shard in shards), strict=True)
        assert torch.equal(torch.cat((*gates, *ups), 1), weights.w13)

    def test_what_cannot_be_cut(self) -> None:
        w13, w2 = dense()
        weights = Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), GateUp)
        with pytest.raises(ValueError, match="cannot both be divided among 3 ranks"):
            shard_gguf(weights, 0, 3)
        with pytest.raises(ValueError, match="there is no rank 2 of 2"):
            shard_gguf(weights, 2, 2)


def test_a_plan_s_class_is_what_is_prepared() -> None:
    ops = emulated()
    by_class: dict[type, Weights] = {type(scheme.weights()): scheme.weights() for scheme in SCHEMES.values()}
    rows = [row for row in ACCEPTANCE if row.runner is RunnerName.ASCEND]
    assert rows
    for row in rows:
        weights: Any = by_class[row.weights]
        assert type(prepare_ascend_as(row.prepared, weights, ops)) is row.prepared


class TestImports:
    def test_the_package_imports_no_backend(self) -> None:
        program = (
            "import sys, moe_typed.runners.ascend, moe_typed.dispatchers, moe_typed.plan\n"
            "print(*sorted({'torch_npu', 'sgl_kernel_npu', 'deep_ep'} & set(sys.modules)))"
        )
        assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split() == []

    def test_without_torch_npu_it_says_what_to_install(self) -> None:
        w13, w2 = dense()
        weights = Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), GateUp)
        scaled = SCHEMES["w8a8"].weights()
        assert isinstance(scaled, Int8ChannelExpertWeights)
        for prepare_it in (
            lambda: prepare_ascend(weights),
            lambda: prepare_ascend_fp16(scaled),
            lambda: prepare_ascend_gguf(weights, OneRank()),
        ):
            with pytest.raises(ImportError, match="needs torch_npu, which is not installed"):
                prepare_it()

"""The silent mismatches of weights on the NPU that a value shows and a type does not: each raises, and says what is wrong.

Those that a type shows stand in ``tests/typing/must_fail/ascend.py``, under the same numbers.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16ExpertWeights, Bf16Rows, BoundaryError, GateUp, debug
from moe_typed.formats import (
    GateUpOrder,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
)
from moe_typed.formats.int4 import pack_bytes
from moe_typed.runners import UnsupportedError
from moe_typed.runners.ascend.components import (
    DynamicInt8Quant,
    W4A8Matmul,
)
from moe_typed.runners.ascend.ops import AclFormat
from moe_typed.runners.ascend.weights.int4 import w4a8_operands
from moe_typed.runners.ascend.weights.layout import dense_matrices, int8_matrices
from moe_typed.runners.ascend.weights.operands import W4A8Operand, W4A16Operand
from moe_typed.runners.ascend.weights.scales import AddOffset, CarriedScale, FlatCarriedScale, QuantParam, carry, carry_flat, quant_param
from moe_typed.runners.ascend.weights.whole import bf16_operands
from moe_typed.stages import (
    GroupCounts,
    GroupEnds,
)
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.runners.ascend.support import EXPERTS, HIDDEN, SCHEMES, dense, emulated, error, experts_of, randn

ROWS = Bf16Rows(randn(3, 12, HIDDEN).bfloat16())


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def w4a8(name: str = "w4a8") -> ModelSlimW4A8ExpertWeights[GateUpOrder]:
    weights = SCHEMES[name].weights()
    assert isinstance(weights, ModelSlimW4A8ExpertWeights)
    return weights


class Test5And6W4A8:
    def test_the_correction_is_eight_times_the_sum_of_weights(self) -> None:
        weights = w4a8()
        up, down = w4a8_operands(weights, emulated())
        for operand, matrix in ((up, weights.dequantize_w13), (down, weights.dequantize_w2)):
            wanted = torch.stack([8 * matrix(expert).sum(1) for expert in range(EXPERTS)])
            torch.testing.assert_close(operand.correction, wanted, rtol=1e-4, atol=1e-5)

    def test_a_checkpoint_s_own_is_taken(self) -> None:
        with_its_own, computed = (w4a8_operands(w4a8(name), emulated()) for name in ("w4a8 corrected", "w4a8"))
        for mine, other in zip(with_its_own, computed, strict=True):
            torch.testing.assert_close(mine.correction, other.correction, rtol=1e-4, atol=1e-5)

    def test_without_it_the_result_is_another(self) -> None:
        ops = EmulatedAscendOps("faithful")
        weights = w4a8()
        up, _ = w4a8_operands(weights, ops)
        bare = W4A8Operand(up.words, up.scale, torch.zeros_like(up.correction), up.layout)
        groups = GroupCounts(int64(12, 0, 0, 0, 0, 0))
        found = [W4A8Matmul(ops, operand).multiply(DynamicInt8Quant(ops).quantise(ROWS), groups, torch.bfloat16).data for operand in (up, bare)]
        wanted = ROWS.data.float() @ weights.dequantize_w13(0).T
        assert error(found[0], wanted) < 0.02
        assert error(found[1], wanted) > 0.1

    @pytest.mark.parametrize("field", ["w13_correction", "w2_correction"])
    def test_another_correction_is_refused_where_a_checkpoint_holds_it(self, field: str) -> None:
        weights = w4a8("w4a8 corrected")
        right: Tensor = vars(weights)[field]
        for wrong in (torch.zeros_like(right), right / 2, right.flip(0)):
            fields: dict[str, Any] = {**vars(weights), field: wrong}
            with debug("values"), pytest.raises(BoundaryError, match=rf"{field}: is not 8 \* sum of code \* scale for expert 0"):
                ModelSlimW4A8ExpertWeights(**fields)

    def test_every_kind_of_list_comes_to_it_as_counts(self) -> None:
        ops = emulated()
        up, _ = w4a8_operands(w4a8(), ops)
        lists = (GroupCounts(int64(5, 0, 7, 0, 0, 0)), GroupEnds(int64(5, 5, 12, 12, 12, 12)))
        one, other = (W4A8Matmul(ops, up).multiply(DynamicInt8Quant(ops).quantise(ROWS), groups, torch.bfloat16).data for groups in lists)
        assert torch.equal(one, other)


class Test7SignOfZeroPoints:
    def test_what_is_added_takes_the_zero_away(self) -> None:
        codes, zeros = torch.arange(16.0), torch.tensor([[[1.0, 5.0, 8.0, 15.0]]])
        offset = AddOffset.of_zeros(zeros, torch.bfloat16).offset.float()
        assert torch.equal((codes[:, None] - 8) + offset[0], codes[:, None] - zeros[0])

    def test_what_no_zero_point_gives_is_refused(self) -> None:
        with debug("values"), pytest.raises(BoundaryError, match=r"outside -8\.\.8"):
            AddOffset(torch.full((1, 1, 8), 9.0))


class TestScalesInGroups:
    @pytest.mark.parametrize(
        ("groups", "offset", "bias", "message"),
        [
            (5, torch.bfloat16, torch.float32, "has 5 groups, which do not divide 64 rows"),
            (2, torch.float32, torch.float32, r"offset: is torch\.float32, but the scale torch\.bfloat16"),
            (2, torch.bfloat16, torch.bfloat16, r"bias: is torch\.bfloat16, but beside torch\.bfloat16 rows it is torch\.float32"),
        ],
    )
    def test_they_belong_to_their_weights(self, groups: int, offset: torch.dtype, bias: torch.dtype, message: str) -> None:
        words, scale = torch.zeros(2, 64, 4, dtype=torch.int32), torch.ones(2, groups, 32, dtype=torch.bfloat16)
        with debug("values"), pytest.raises(BoundaryError, match=message):
            W4A16Operand(words, scale, AddOffset(torch.zeros_like(scale, dtype=offset)), AclFormat.ND, torch.zeros(2, 32, dtype=bias))


class Test8And9Carriers:
    def test_a_quantisation_parameter_is_no_carrier(self) -> None:
        param = quant_param(emulated(), torch.rand(2, 8)).param
        with debug("values"):
            with pytest.raises(BoundaryError, match="more than the 32 bits of a float32"):
                FlatCarriedScale(param)
            with pytest.raises(BoundaryError, match="more than the 32 bits of a float32"):
                CarriedScale(param.unsqueeze(1))
            with pytest.raises(BoundaryError, match="more than the 32 bits of a float32"):
                FlatCarriedScale(torch.tensor([[-1.5]]).view(torch.int32).long())  # widened with its sign
            with pytest.raises(BoundaryError, match="lacks bit 46"):
                QuantParam(carry_flat(torch.rand(2, 8)).scale)

    def test_the_bits_are_those_of_the_scale(self) -> None:
        scale = torch.tensor([[1.5, -2.0, 3e-8, 0.1]])
        assert torch.equal(carry_flat(scale).scale.to(torch.int32).view(torch.float32), scale)
        assert carry(scale).scale.shape == (1, 1, 4)

    def test_shapes_are_of_the_class(self) -> None:
        with debug("layout"):
            with pytest.raises(BoundaryError, match="has 2 dims, expected 3"):
                CarriedScale(torch.zeros(2, 8, dtype=torch.int64))
            with pytest.raises(BoundaryError, match="has 3 dims, expected 2"):
                FlatCarriedScale(torch.zeros(2, 1, 8, dtype=torch.int64))


class Test10Packing:
    def test_a_value_a_byte_is_not_two(self) -> None:
        values, scales = torch.zeros(2, 32, 16, dtype=torch.int8), torch.ones(2, 32)
        with debug("layout"), pytest.raises(BoundaryError, match=r"axis \d is \d+, expected"):
            ModelSlimW4A4PackedExpertWeights(values, torch.zeros(2, 16, 16, dtype=torch.int8), scales, torch.ones(2, 16), GateUp)

    def test_two_values_a_byte_are_not_one(self) -> None:
        (w13, _), scales = dense(experts=2, hidden=16, inter=16), torch.ones(2, 32)
        packed = pack_bytes((w13 * 4).round().clamp(-8, 7).to(torch.int8).repeat(1, 2, 1), 1)
        with debug("values"), pytest.raises(BoundaryError, match=r"holds a value outside -8\.\.7") as caught:
            ModelSlimW4A4ExpertWeights(packed, torch.zeros(2, 16, 16, dtype=torch.int8), scales, torch.ones(2, 16), GateUp)
        assert "ModelSlimW4A4PackedExpertWeights" in caught.value.hint


class Test23PhysicalFormat:
    def test_a_dense_weight_is_cast_before_it_is_turned(self) -> None:
        w13, w2 = dense()
        weights = Bf16ExpertWeights(w13.bfloat16(), w2.bfloat16(), GateUp)
        up, _ = bf16_operands(weights, emulated())
        assert up.layout is AclFormat.FRACTAL_NZ
        assert up.weight.stride()[-2:] == (1, up.weight.shape[-2])  # transposed, as the products find out by strides
        assert torch.equal(up.weight.transpose(1, 2), weights.w13)

    def test_a_size_that_tiles_do_not_divide_stays_as_it_is_and_says_so(self) -> None:
        assert dense_matrices(emulated(), torch.zeros(2, 24, 16))[1] is AclFormat.ND
        assert dense_matrices(emulated(), torch.zeros(2, 16, 24))[1] is AclFormat.ND
        assert dense_matrices(emulated(), torch.zeros(2, 32, 16))[1] is AclFormat.FRACTAL_NZ
        assert int8_matrices(emulated(), torch.zeros(2, 48, 16, dtype=torch.int8))[1] is AclFormat.ND
        assert int8_matrices(emulated(), torch.zeros(2, 64, 16, dtype=torch.int8))[1] is AclFormat.FRACTAL_NZ

    def test_products_that_read_tiles_alone_refuse_it(self) -> None:
        for name in ("w4a8", "w4a4"):
            with pytest.raises(UnsupportedError, match="hidden = 72 is not a multiple of 64, in which int4 weights for integer rows lie"):
                experts_of(SCHEMES[name].weights(hidden=72), emulated())
            with pytest.raises(UnsupportedError, match="inter = 80 is not a multiple of 32"):
                experts_of(SCHEMES[name].weights(inter=80), emulated())

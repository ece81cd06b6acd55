"""The silent mismatches of the NPU that a value shows and a type does not: each raises, and says what is wrong.

Those that a type shows stand in ``tests/typing/must_fail/ascend.py``, under the same numbers.
"""

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import Bf16ExpertWeights, Bf16Rows, BoundaryError, GateUp, LogicalIds, MxFp8Rows, debug
from moe_typed.dispatchers import AscendTPDispatcher, Sorted, as_int8, as_mxfp8, as_they_are, as_they_are_v1
from moe_typed.formats import (
    Fp16Rows,
    GateUpOrder,
    Int4TokenRows,
    Int8TokenRows,
    ModelSlimW4A4ExpertWeights,
    ModelSlimW4A4PackedExpertWeights,
    ModelSlimW4A8ExpertWeights,
    MxFp8PairRows,
)
from moe_typed.formats.int4 import pack_bytes
from moe_typed.routing import Routing, Settled
from moe_typed.runners import SiluAndMul, UnsupportedError
from moe_typed.runners.activations import GatedActivation
from moe_typed.runners.ascend.components import (
    DynamicInt8Quant,
    FinalizeRowMajor,
    FinalizeSparse,
    InitRoutingV1,
    InitRoutingV2,
    JoinedRows,
    RangeInitRouting,
    SwigluQuant,
    W4A8Matmul,
)
from moe_typed.runners.ascend.components.rows import told
from moe_typed.runners.ascend.ops import AclFormat, GroupListType
from moe_typed.runners.ascend.projections import PlainProjection, QuantisedProjection
from moe_typed.runners.ascend.weights.int4 import w4a8_operands
from moe_typed.runners.ascend.weights.layout import dense_matrices
from moe_typed.runners.ascend.weights.operands import W4A8Operand
from moe_typed.runners.ascend.weights.scales import AddOffset, CarriedScale, FlatCarriedScale, QuantParam, carry, carry_flat, quant_param
from moe_typed.runners.ascend.weights.whole import bf16_operands
from moe_typed.stages import (
    AnyGroupList,
    AscendRowsInput,
    AscendTPCombineInput,
    AscendTPHandle,
    GroupCounts,
    GroupEnds,
    GroupPairs,
    KMajorIndex,
    RowMajorIndex,
    RowMajorSparseIndex,
    SummandRows,
)
from tests.emulation.ascend.misuse import Device, EmulatedMisuse, Reason
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.ops.support import ints
from tests.runners.ascend.support import EXPERTS, HIDDEN, SCHEMES, dense, emulated, error, expected, experts_of, randn, routing

ROWS = Bf16Rows(randn(3, 12, HIDDEN).bfloat16())


def int64(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def index(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def w4a8(name: str = "w4a8") -> ModelSlimW4A8ExpertWeights[GateUpOrder]:
    weights = SCHEMES[name].weights()
    assert isinstance(weights, ModelSlimW4A8ExpertWeights)
    return weights


class Test1IndexOrder:
    def test_what_another_routing_emitted_is_not_read(self) -> None:
        """Where one checker has not looked: the finaliser looks at the class of the index that it is given."""
        ops = emulated()
        v1, v2 = as_they_are_v1(Bf16Rows, ops), as_they_are(Bf16Rows, ops)
        routes = routing(12, 3)
        routed = v1.init.route(ROWS, routes.topk_ids, EXPERTS)
        with pytest.raises(BoundaryError, match="another order than FinalizeRowMajor reads"):
            v2.finalize(routed.payload.data, routes.topk_weights.bfloat16(), routed.index)

    def test_without_the_types_it_would_be_another_mixture(self) -> None:
        ops = EmulatedAscendOps("faithful")
        routes = routing(12, 3)
        routed = InitRoutingV1(ops, Bf16Rows).route(ROWS, routes.topk_ids, EXPERTS)
        weights = routes.topk_weights.bfloat16()
        right = as_they_are_v1(Bf16Rows, ops).finalize(routed.payload.data, weights, routed.index)
        wrong = FinalizeRowMajor(ops).finalize(routed.payload.data, weights, RowMajorIndex(routed.index.rows))
        assert error(right, ROWS.data.float()) < 0.006
        assert error(wrong, ROWS.data.float()) > 0.5


class Test2GroupListKind:
    def test_counts_are_no_ends(self) -> None:
        with debug("values"), pytest.raises(BoundaryError, match="falls from one expert to the next"):
            GroupEnds(int64(3, 0, 2))

    def test_ends_are_no_counts_of_these_rows(self) -> None:
        with debug("values"), pytest.raises(BoundaryError, match="are of 15 rows, but there are 12"):
            AscendRowsInput(ROWS, GroupCounts(int64(1, 2, 12)), torch.bfloat16)

    @pytest.mark.parametrize(
        "groups", [GroupCounts(int64(3, 0, 2, 0)), GroupEnds(int64(3, 3, 5, 5)), GroupPairs(torch.tensor([[0, 3], [2, 2], [0, 0], [9, 9]]))]
    )
    def test_each_becomes_the_other(self, groups: AnyGroupList) -> None:
        assert ints(groups.counted().counts) == [3, 0, 2, 0]
        assert ints(groups.ended().ends) == [3, 3, 5, 5]
        assert ints(groups.total()) == [5]
        assert groups.num_groups == 4
        assert ints(groups.experts_of_rows(7)) == [0, 0, 0, 2, 2, -1, -1]

    def test_pairs_that_fill_the_list_have_no_end(self) -> None:
        assert ints(GroupPairs(torch.tensor([[0, 3], [1, 2]])).counted().counts) == [3, 2]


class Test3DefaultsOfTheGroupListType:
    def test_the_number_follows_from_the_class(self) -> None:
        counts, ends, pairs = int64(3, 2), int64(3, 5), torch.tensor([[0, 3], [1, 2]])
        assert told(GroupCounts(counts)) == (counts, GroupListType.COUNT)
        assert told(GroupEnds(ends)) == (ends, GroupListType.CUMSUM)
        assert told(GroupPairs(pairs)) == (pairs, GroupListType.PAIRS)

    def test_one_count_is_told_as_cumulative(self) -> None:
        one = int64(5)
        assert told(GroupCounts(one)) == (one, GroupListType.CUMSUM)


def test_4_the_device_decides_the_kind() -> None:
    ops = emulated(Device.P310)
    rows = Fp16Rows(ROWS.data.half())
    with pytest.raises(EmulatedMisuse) as caught:
        InitRoutingV2(ops, Fp16Rows).route(rows, routing(12, 2).topk_ids, EXPERTS)
    assert caught.value.reason is Reason.GROUP_LIST_DEVICE


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


class Test8And9Carriers:
    def test_a_quantisation_parameter_is_no_carrier(self) -> None:
        param = quant_param(emulated(), torch.rand(2, 8)).param
        with debug("values"):
            with pytest.raises(BoundaryError, match="more than the 32 bits of a float32"):
                FlatCarriedScale(param)
            with pytest.raises(BoundaryError, match="more than the 32 bits of a float32"):
                CarriedScale(param.unsqueeze(1))
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


class Test11RowsInAnotherFormat:
    def test_a_product_refuses_what_no_checker_has_seen(self) -> None:
        ops = emulated()
        experts, dispatched = experts_of(SCHEMES["bf16"].weights(), ops), AscendTPDispatcher(as_int8(ops)).dispatch(ROWS, routing(12, 2))
        with pytest.raises(BoundaryError, match=r"payload is Int8TokenRows .* but AscendBf16Weights takes Bf16Rows"):
            experts(dispatched)
        dispatched.handle.discard("the test ends")

    def test_the_projections_refuse_again(self) -> None:
        ops = emulated()
        up, _ = w4a8_operands(w4a8(), ops)
        int4 = Int4TokenRows(torch.zeros(2, HIDDEN // 8, dtype=torch.int32), torch.ones(2))
        groups = GroupCounts(int64(2, 0, 0, 0, 0, 0))
        with pytest.raises(BoundaryError, match=r"W4A8Matmul takes Bf16Rows \| Fp16Rows \| Int8TokenRows"):
            QuantisedProjection(DynamicInt8Quant(ops), W4A8Matmul(ops, up)).project(int4, groups, torch.bfloat16)  # type: ignore[arg-type]
        with pytest.raises(BoundaryError, match="W4A8Matmul takes Int8TokenRows"):
            PlainProjection(W4A8Matmul(ops, up)).project(int4, groups, torch.bfloat16)  # type: ignore[arg-type]


class Unknown(GatedActivation):
    name = "situ"

    @override
    def apply(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * up


@pytest.mark.parametrize("name", SCHEMES)
def test_12_an_unknown_activation_is_refused_and_never_replaced(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"no component for the activation .*Unknown"):
        experts_of(SCHEMES[name].weights(), emulated(SCHEMES[name].device), Unknown())


class Test14DtypeOfTheModel:
    def test_weights_in_another_dtype_are_refused(self) -> None:
        with pytest.raises(BoundaryError, match=r"router weights are torch\.float16, but the rows torch\.bfloat16"):
            FinalizeRowMajor(emulated()).finalize(ROWS.data, torch.ones(12, 1).half(), RowMajorIndex(torch.arange(12, dtype=torch.int32)))

    def test_the_dispatch_says_what_quantised_rows_cannot(self) -> None:
        dispatcher = AscendTPDispatcher(as_int8(emulated()))
        for rows in (ROWS, Fp16Rows(ROWS.data.half())):
            dispatched = dispatcher.dispatch(rows, routing(12, 2))
            assert (type(dispatched.payload), dispatched.out_dtype) == (Int8TokenRows, rows.data.dtype)
            dispatched.handle.discard("the test ends")

    def test_the_products_make_half_precision_alone(self) -> None:
        experts = experts_of(SCHEMES["w4a4"].weights(), emulated())
        with pytest.raises(UnsupportedError, match=r"make bfloat16 and float16 rows, not torch\.float32"):
            experts.runner.run(AscendRowsInput(ROWS, GroupCounts(int64(12, 0, 0, 0, 0, 0)), torch.float32))  # type: ignore[arg-type]


class Test17UndefinedTails:
    def test_combine_does_not_read_what_nobody_computed(self) -> None:
        results, handle = SummandRows(ROWS.data), AscendTPHandle(None, self)
        origin = Routing(torch.zeros(12, 1, dtype=torch.int32), torch.ones(12, 1), LogicalIds, 2, Settled(), True, 12)
        order = RowMajorIndex(torch.arange(12, dtype=torch.int32))
        with debug("values"), pytest.raises(BoundaryError, match="are of 11 rows, but 12 results are read"):
            AscendTPCombineInput(results, GroupCounts(int64(5, 6)), order, origin, torch.bfloat16, handle)
        handle.discard("the test ends")

    def test_scales_of_undefined_rows_are_not_looked_at(self) -> None:
        scale = torch.ones(12)
        scale[7:] = torch.nan
        rows = Int8TokenRows(torch.zeros(12, HIDDEN, dtype=torch.int8), scale)
        with debug("values"):
            AscendRowsInput(rows, GroupCounts(int64(3, 4)), torch.bfloat16)
            with pytest.raises(BoundaryError, match="holds an infinity or a NaN"):
                AscendRowsInput(rows, GroupCounts(int64(3, 5)), torch.bfloat16)


class Test18MinusOneInAnIndex:
    @pytest.mark.parametrize("cls", [RowMajorIndex, KMajorIndex])
    def test_is_another_class(self, cls: type[RowMajorIndex] | type[KMajorIndex]) -> None:
        with debug("values"):
            with pytest.raises(BoundaryError, match=r"each of 0\.\.2 once") as caught:
                cls(index(0, -1, 1))
            assert "RowMajorSparseIndex" in caught.value.hint
            RowMajorSparseIndex(index(0, -1, 1))

    def test_routes_to_other_ranks_count_for_nothing(self) -> None:
        """Experts 2 and 3 are here; the rows of the other routes are zeros, and not row 1, as the absolute value of -1 would have it."""
        ops, routes = EmulatedAscendOps("faithful"), routing(12, 3)  # the strict one takes rows of one capacity for another layout than it emitted
        routed = RangeInitRouting(ops, Bf16Rows, 2, 2).route(ROWS, routes.topk_ids, EXPERTS)
        here = (routes.topk_ids >= 2) & (routes.topk_ids < 4)
        assert torch.equal(routed.index.rows.view(12, 3) >= 0, here)
        assert ints(routed.groups.counts) == [int((routes.topk_ids == expert).sum()) for expert in (2, 3)]
        found = FinalizeSparse(ops).finalize(routed.payload.data, routes.topk_weights.bfloat16(), routed.index)
        wanted = torch.where(here, routes.topk_weights, 0.0).sum(1, keepdim=True) * ROWS.data.float()
        assert error(found, wanted) < 0.006


def test_20_every_default_is_said() -> None:
    """The operator's own would activate the right half, and quantise without a scale."""
    ops, joined = emulated(), randn(5, 6, 2 * HIDDEN).bfloat16()
    found = SwigluQuant(ops).activate(JoinedRows(Bf16Rows(joined), GateUp), GroupCounts(int64(6)))
    left, right = joined.float().chunk(2, 1)
    assert error(found.dequantize(), torch.nn.functional.silu(left) * right) < 0.02


class Test22ScalesInPairs:
    def test_flat_scales_are_refused_and_named(self) -> None:
        data, scale = torch.zeros(3, 128).to(torch.float8_e4m3fn), torch.zeros(3, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        with debug("layout"):
            with pytest.raises(BoundaryError, match="has 2 dims, expected 3") as caught:
                MxFp8PairRows(data, scale)
            assert "these values do satisfy MxFp8Rows" in caught.value.hint
            with pytest.raises(BoundaryError) as caught:
                MxFp8Rows(data, scale.view(3, 2, 2))
            assert "these values do satisfy MxFp8PairRows" in caught.value.hint

    def test_routing_pairs_what_its_operator_gives_flat(self) -> None:
        dispatched = AscendTPDispatcher(as_mxfp8(emulated(Device.A5))).dispatch(ROWS, routing(12, 2))
        assert dispatched.payload.scale.shape == (24, HIDDEN // 64, 2)
        dispatched.handle.discard("the test ends")


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
        assert dense_matrices(emulated(), torch.zeros(2, 32, 16))[1] is AclFormat.FRACTAL_NZ

    def test_products_that_read_tiles_alone_refuse_it(self) -> None:
        for name in ("w4a8", "w4a4"):
            with pytest.raises(UnsupportedError, match="w2 has 72 columns; int4 weights for integer rows need a multiple of 64"):
                experts_of(SCHEMES[name].weights(hidden=72), emulated())


@pytest.mark.parametrize(("make", "payload"), [(as_int8, Int8TokenRows), (as_mxfp8, MxFp8PairRows)])
def test_24_the_payload_is_a_fact_of_the_dispatcher(make: object, payload: type[object]) -> None:
    ops = emulated(Device.A5)
    dispatcher = AscendTPDispatcher((as_int8 if make is as_int8 else as_mxfp8)(ops))
    dispatched = dispatcher.dispatch(ROWS, routing(12, 2))
    assert dispatcher.payload is payload
    assert type(dispatched.payload) is payload
    dispatched.handle.discard("the test ends")


def test_the_layer_of_a_pair_made_by_hand_is_the_reference_s() -> None:
    ops = emulated()
    dispatcher = AscendTPDispatcher(Sorted(InitRoutingV2(ops, Bf16Rows)).finished_by(FinalizeRowMajor(ops)))
    weights = SCHEMES["bf16"].weights()
    output = dispatcher.then(experts_of(weights, ops))(ROWS, routing(12, 3)).hidden_states
    assert error(output, expected(ROWS.data, routing(12, 3), weights, SiluAndMul())) < 0.006

"""The silent mismatches of rows on the NPU that a value shows and a type does not: each raises, and says what is wrong.

Those that a type shows stand in ``tests/typing/must_fail/ascend.py``, under the same numbers.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from moe_typed import Bf16Rows, BoundaryError, GateUp, LogicalIds, MxFp8Rows, debug
from moe_typed.dispatchers import AscendTPDispatcher, Sorted, as_int8, as_mxfp8, as_they_are, as_they_are_v1
from moe_typed.formats import (
    Fp16Rows,
    GateUpOrder,
    Int4TokenRows,
    Int8TokenRows,
    ModelSlimW4A8ExpertWeights,
    MxFp8PairRows,
)
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
from moe_typed.runners.ascend.ops import GroupListType
from moe_typed.runners.ascend.projections import PlainProjection, QuantisedProjection
from moe_typed.runners.ascend.weights.int4 import w4a8_operands
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
from tests.runners.ascend.support import EXPERTS, HIDDEN, SCHEMES, emulated, error, expected, experts_of, prepare, randn, routing

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

    def test_no_expert_has_fewer_rows_than_none(self) -> None:
        with debug("values"), pytest.raises(BoundaryError, match="holds a negative count"):
            GroupCounts(int64(3, -1, 2))

    @pytest.mark.parametrize(
        ("pairs", "message"),
        [
            ([[0, 3], [7, 2]], r"names an expert outside 0\.\.1"),
            ([[-1, 3], [1, 2]], r"names an expert outside 0\.\.1"),
            ([[1, 3], [0, 2]], "names experts that do not rise"),
            ([[0, 3], [0, 2]], "names experts that do not rise"),
        ],
    )
    def test_pairs_are_of_experts_in_order(self, pairs: list[list[int]], message: str) -> None:
        with debug("values"):
            with pytest.raises(BoundaryError, match=message):
                GroupPairs(torch.tensor(pairs))
            GroupPairs(torch.tensor([[1, 3], [0, 0]]))  # what comes after the end may be anything

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


class Test11RowsInAnotherFormat:
    def test_a_product_refuses_what_no_checker_has_seen(self) -> None:
        ops = emulated()
        experts, dispatched = experts_of(SCHEMES["bf16"].weights(), ops), AscendTPDispatcher(as_int8(Bf16Rows, ops)).dispatch(ROWS, routing(12, 2))
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

    def test_the_fused_product_refuses_them_too(self) -> None:
        weights, rows = SCHEMES["mxfp8"].weights(), Int8TokenRows(torch.zeros(3, HIDDEN, dtype=torch.int8), torch.ones(3))
        runner = prepare(weights, emulated(Device.A5)).runner(SiluAndMul())
        with pytest.raises(BoundaryError, match=r"FusedMxSwiglu takes Bf16Rows \| Fp16Rows \| MxFp8PairRows"):
            runner.run(AscendRowsInput(rows, GroupCounts(int64(3, 0, 0, 0, 0, 0)), torch.bfloat16))


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
        for rows in (ROWS, Fp16Rows(ROWS.data.half())):
            dispatcher: AscendTPDispatcher[Any, Int8TokenRows] = AscendTPDispatcher(as_int8(type(rows), emulated()))
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

    @pytest.mark.parametrize("rows", [(0, 0, -1), (0, 2, -1), (0, 1, -2)])
    def test_what_is_here_stands_once(self, rows: tuple[int, ...]) -> None:
        with debug("values"), pytest.raises(BoundaryError, match="and -1 for the others"):
            RowMajorSparseIndex(index(*rows))

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
        dispatched = AscendTPDispatcher(as_mxfp8(Bf16Rows, emulated(Device.A5))).dispatch(ROWS, routing(12, 2))
        assert dispatched.payload.scale.shape == (24, HIDDEN // 64, 2)
        dispatched.handle.discard("the test ends")


@pytest.mark.parametrize(("make", "payload"), [(as_int8, Int8TokenRows), (as_mxfp8, MxFp8PairRows)])
def test_24_the_payload_is_a_fact_of_the_dispatcher(make: object, payload: type[object]) -> None:
    ops = emulated(Device.A5)
    dispatcher = AscendTPDispatcher((as_int8 if make is as_int8 else as_mxfp8)(Bf16Rows, ops))
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

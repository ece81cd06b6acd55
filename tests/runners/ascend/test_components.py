"""The five components one by one: what each makes of what it takes, by plain formulae."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_typed import Bf16Rows, GateUp, Interleaved, MxFp8Rows, SiluAndMul, UpGate, debug
from moe_typed.formats import Fp16Rows, GateUpOrder, Int8ChannelExpertWeights, MxFp8PairRows, Payload
from moe_typed.ops.quantize.reference import quantize_mxfp8
from moe_typed.runners import Activation, GeluAndMul, GeluTanhAndMul, UnsupportedError
from moe_typed.runners.ascend import components
from moe_typed.runners.ascend.activations import half_activation, int8_activation
from moe_typed.runners.ascend.components import (
    AllGatheredActivation,
    AllGatheredFinalize,
    AscendActivation,
    ClippedSwiglu,
    ClippedSwigluQuant,
    DynamicInt4Quant,
    DynamicInt8Quant,
    DynamicMxFp4Quant,
    DynamicMxFp8Quant,
    FinalizeKMajor,
    FinalizeRouting,
    FinalizeRowMajor,
    GeluAndMulHalves,
    GroupedMatmul,
    HiddenStatesQuant,
    InitRouting,
    InitRoutingQuant,
    InitRoutingV1,
    InitRoutingV2,
    InitRoutingV2Int8,
    InitRoutingV2MxFp8,
    InitRoutingV2On310P,
    JoinedRows,
    NoQuant,
    PairScales,
    SortedSwiglu,
    SortedSwigluOai,
    SortedSwigluOaiQuant,
    SortedSwigluQuant,
    StepSwiglu,
    Swiglu,
    SwigluQuant,
    Unpermute,
    W8A8Matmul,
)
from moe_typed.runners.ascend.library import AscendLibrary
from moe_typed.runners.ascend.weights.whole import w8a8_operands
from moe_typed.stages import AscendRowsInput, GroupCounts, GroupEnds, GroupPairs, OneRank, RowMajorIndex
from tests.emulation.ascend.extension import EmulatedAscendExtensionOps
from tests.emulation.ascend.misuse import Device
from tests.emulation.ascend.ops import EmulatedAscendOps
from tests.ops.support import ints
from tests.runners.ascend.support import EXPERTS, HIDDEN, SCHEMES, emulated, error, prepare, randn, routing

ROWS = Bf16Rows(randn(3, 12, HIDDEN).bfloat16())
Ops = EmulatedAscendOps
Make = Callable[[Ops], Any]
BASES = {InitRouting: "route", HiddenStatesQuant: "quantise", GroupedMatmul: "multiply", AscendActivation: "activate", FinalizeRouting: "finalize"}


@pytest.mark.parametrize(("base", "method"), BASES.items(), ids=lambda value: value if isinstance(value, str) else "")
def test_every_implementation_of_a_component_has_one_signature(base: type, method: str) -> None:
    found = [getattr(components, name) for name in components.__all__]
    classes = [cls for cls in found if isinstance(cls, type) and issubclass(cls, base) and cls is not base]
    assert len(classes) >= 5
    wanted = [(item.name, item.kind, item.default) for item in inspect.signature(getattr(base, method)).parameters.values()]
    for cls in classes:
        assert [(item.name, item.kind, item.default) for item in inspect.signature(vars(cls)[method]).parameters.values()] == wanted, cls


def v1(ops: Ops) -> InitRoutingV1[Bf16Rows]:
    return InitRoutingV1(ops, Bf16Rows)


def v2(ops: Ops) -> InitRoutingV2[Bf16Rows]:
    return InitRoutingV2(ops, Bf16Rows)


def v2_int8(ops: Ops) -> InitRoutingV2Int8[Bf16Rows]:
    return InitRoutingV2Int8(ops, Bf16Rows)


def quant(ops: Ops) -> InitRoutingQuant[Bf16Rows]:
    return InitRoutingQuant(ops, Bf16Rows)


def v2_mxfp8(ops: Ops) -> InitRoutingV2MxFp8[Bf16Rows]:
    return InitRoutingV2MxFp8(ops, Bf16Rows)


def v2_310p(ops: Ops) -> InitRoutingV2On310P:
    return InitRoutingV2On310P(ops, Fp16Rows)


def gathered(ops: Ops) -> AllGatheredFinalize[RowMajorIndex]:
    return AllGatheredFinalize(FinalizeRowMajor(ops), OneRank())


class TestInitRouting:
    def test_atlas_inference_series_takes_no_bf16(self) -> None:
        with pytest.raises(UnsupportedError, match=r"\(310P\) takes Fp16Rows, not Bf16Rows"):
            InitRoutingV2On310P(emulated(Device.P310), Bf16Rows)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("make", "device", "rows", "loss"),
        [
            (v1, Device.A3, ROWS, 0.0),
            (v2, Device.A3, ROWS, 0.0),
            (v2_310p, Device.P310, Fp16Rows(ROWS.data.half()), 0.0),
            (v2_int8, Device.A3, ROWS, 0.01),
            (quant, Device.A3, ROWS, 0.01),
            (v2_mxfp8, Device.A5, ROWS, 0.03),
        ],
        ids=["v1", "v2", "310p", "v2 int8", "quant", "v2 mxfp8"],
    )
    def test_rows_lie_by_expert_and_the_index_finds_them(self, make: Make, device: Device, rows: Payload, loss: float) -> None:
        routes = routing(12, 3)
        with debug("strict"):
            routed = make(emulated(device)).route(rows, routes.topk_ids, EXPERTS)
        ids = routes.topk_ids.flatten().long()
        order = ids.argsort(stable=True)
        wanted = rows.dequantize()[order // 3]
        assert error(routed.payload.dequantize(), wanted) <= loss
        assert ints(routed.groups.counted().counts) == [int((ids == expert).sum()) for expert in range(EXPERTS)]
        place = torch.empty_like(order)
        place[order] = torch.arange(36)
        by_token = routed.index.rows.view(3, 12).T.flatten() if isinstance(make(emulated()), InitRoutingV1) else routed.index.rows
        assert torch.equal(by_token.long(), place)
        assert make(emulated(device)).payload is type(routed.payload)

    @pytest.mark.parametrize("make", [v1, v2_int8, quant, v2_mxfp8])
    def test_no_rows(self, make: Make) -> None:
        with debug("strict"):
            routed = make(emulated()).route(Bf16Rows(ROWS.data[:0]), routing(0, 3).topk_ids.to(torch.int32), EXPERTS)
        assert (routed.payload.rows, routed.payload.hidden, routed.groups.num_groups) == (0, HIDDEN, EXPERTS)
        assert int(routed.groups.total()) == 0


class TestQuant:
    @pytest.mark.parametrize(
        ("make", "loss"), [(DynamicInt8Quant, 0.01), (DynamicInt4Quant, 0.2), (DynamicMxFp8Quant, 0.05), (DynamicMxFp4Quant, 0.2)]
    )
    def test_rows_lose_what_their_format_loses(self, make: Make, loss: float) -> None:
        with debug("strict"):
            found = make(emulated(Device.A5)).quantise(ROWS)
        assert (found.rows, found.hidden) == (12, HIDDEN)
        assert 0 < error(found.dequantize(), ROWS.data.float()) < loss

    def test_exponents_of_mxfp8_follow_the_floor_rule(self) -> None:
        """floor(log2 amax) - 8, which cuts what lies above 448: not the ceiling rule, of routing."""
        rows = Bf16Rows(torch.full((2, 64), 500.0).bfloat16())
        assert bool((DynamicMxFp8Quant(emulated(Device.A5)).quantise(rows).dequantize() == 448).all())

    def test_none_at_all(self) -> None:
        assert NoQuant[Bf16Rows]().quantise(ROWS) is ROWS

    def test_pairs_are_the_same_bytes(self) -> None:
        rows = MxFp8Rows(*quantize_mxfp8(ROWS.data))
        with debug("strict"):
            found = PairScales().quantise(rows)
        assert isinstance(found, MxFp8PairRows)
        assert torch.equal(found.dequantize(), rows.dequantize())


def silu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * gate.sigmoid() * up


def oai(gate: Tensor, up: Tensor) -> Tensor:
    gate, up = gate.clamp(max=0.9), up.clamp(-0.9, 0.9)
    return gate * (1.3 * gate).sigmoid() * (up + 1)


def step(gate: Tensor, up: Tensor) -> Tensor:
    return (gate * gate.sigmoid()).clamp(max=0.4) * up.clamp(-0.4, 0.4)


def gelu(gate: Tensor, up: Tensor) -> Tensor:
    return gate * (1 + torch.erf(gate / 2**0.5)) / 2 * up


EXTENSION = EmulatedAscendExtensionOps()
ACTIVATIONS: list[tuple[Make, Callable[[Tensor, Tensor], Tensor], type[GateUpOrder]]] = [
    (lambda ops: Swiglu(ops), silu, GateUp),
    (lambda ops: SwigluQuant(ops), silu, GateUp),
    (lambda ops: ClippedSwiglu(ops, GateUp, 1.3, 0.9), oai, GateUp),
    (lambda ops: ClippedSwiglu(ops, Interleaved, 1.3, 0.9), oai, Interleaved),
    (lambda ops: ClippedSwigluQuant(ops, GateUp, 1.3, 0.9), oai, GateUp),
    (lambda ops: ClippedSwigluQuant(ops, Interleaved, 1.3, 0.9), oai, Interleaved),
    (lambda ops: StepSwiglu(0.4), step, GateUp),
    (lambda ops: GeluAndMulHalves(), gelu, GateUp),
    (lambda ops: SortedSwiglu(EXTENSION), silu, GateUp),
    (lambda ops: SortedSwigluQuant(EXTENSION), silu, GateUp),
    (lambda ops: SortedSwiglu(EXTENSION, 0.4), step, GateUp),
    (lambda ops: SortedSwigluQuant(EXTENSION, 0.4), step, GateUp),
    (lambda ops: SortedSwigluOai(EXTENSION, 1.3, 0.9), oai, GateUp),
    (lambda ops: SortedSwigluOaiQuant(EXTENSION, 1.3, 0.9), oai, GateUp),
    (lambda ops: AllGatheredActivation(Swiglu(ops), OneRank()), silu, GateUp),
]


class TestActivation:
    @pytest.mark.parametrize(("make", "formula", "order"), ACTIVATIONS)
    @pytest.mark.parametrize("groups", [GroupCounts(torch.tensor([4, 0, 8])), GroupEnds(torch.tensor([4, 4, 12]))], ids=["counts", "ends"])
    def test_is_its_formula(self, make: Make, formula: Any, order: type[GateUpOrder], groups: GroupCounts | GroupEnds) -> None:
        joined = JoinedRows(Bf16Rows(randn(9, 12, 128).bfloat16()), order)
        with debug("strict"):
            found = make(emulated()).activate(joined, groups)
        gate, up = order.split(joined.rows.data.float(), -1)
        assert found.hidden == 64
        assert 0 < error(found.dequantize(), formula(gate, up)) < 0.02

    @pytest.mark.parametrize("make", [half_activation, int8_activation])
    def test_the_two_gelus_are_two(self, make: Callable[[AscendLibrary, Activation], AscendActivation[GateUp, Any]]) -> None:
        """They differ by a tenth where both are small."""
        gate = torch.linspace(-3.5, -2.5, 64).bfloat16().repeat(12, 1)
        joined, groups = JoinedRows(Bf16Rows(torch.cat((gate, torch.ones_like(gate)), 1)), GateUp), GroupCounts(torch.tensor([4, 0, 8]))
        exact, tanh = (make(AscendLibrary(emulated()), activation).activate(joined, groups) for activation in (GeluAndMul(), GeluTanhAndMul()))
        approximate = gate.float() * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate.float() + 0.044715 * gate.float() ** 3))) / 2
        assert error(exact.dequantize(), gelu(gate.float(), torch.ones(12, 64))) < 0.01
        assert error(tanh.dequantize(), approximate) < 0.01
        assert error(exact.dequantize(), approximate) > 0.03

    def test_an_order_that_operators_do_not_read(self) -> None:
        with pytest.raises(ValueError, match="read halves or alternating columns, gate first; not up, then gate"):
            ClippedSwiglu(emulated(), UpGate, 1.0, 7.0)


class TestMatmul:
    def test_pairs_serve_int8_and_become_counts_for_the_others(self) -> None:
        ops, weights = emulated(), SCHEMES["w8a8"].weights()
        assert isinstance(weights, Int8ChannelExpertWeights)
        operand, _ = w8a8_operands(weights, ops)
        pairs = torch.tensor([[0, 5], [3, 7], [0, 0], [0, 0], [0, 0], [0, 0]])
        rows = DynamicInt8Quant(ops).quantise(ROWS)
        with debug("strict"):
            found = W8A8Matmul(ops, operand).multiply(rows, GroupPairs(pairs), torch.bfloat16).data
        wanted = torch.cat([part @ weights.dequantize_w13(expert).T for expert, part in ((0, rows.dequantize()[:5]), (3, rows.dequantize()[5:]))])
        assert 0 < error(found, wanted) < 0.006

    def test_the_fused_product_takes_pairs_as_counts(self) -> None:
        runner = prepare(SCHEMES["mxfp8"].weights(), emulated(Device.A5)).runner(SiluAndMul())
        pairs = GroupPairs(torch.tensor([[0, 5], [3, 7], [0, 0], [0, 0], [0, 0], [0, 0]]))
        with debug("strict"):
            one, other = (runner.run(AscendRowsInput(ROWS, groups, torch.bfloat16)) for groups in (pairs, pairs.counted()))
        assert torch.equal(one.hidden_states, other.hidden_states)

    def test_rows_after_the_total_are_left_undefined(self) -> None:
        ops, weights = emulated(), SCHEMES["w8a8"].weights()
        assert isinstance(weights, Int8ChannelExpertWeights)
        operand, _ = w8a8_operands(weights, ops)
        counts = GroupCounts(torch.tensor([5, 0, 0, 0, 0, 0]))
        found = W8A8Matmul(ops, operand).multiply(DynamicInt8Quant(ops).quantise(ROWS), counts, torch.bfloat16).data
        assert not bool(found[:5].isnan().any())
        assert bool(found[5:].isnan().all())


class TestFinalize:
    @pytest.mark.parametrize("make", [FinalizeKMajor, FinalizeRowMajor, Unpermute, gathered])
    def test_weighs_and_sums(self, make: Make) -> None:
        ops, routes = emulated(), routing(12, 3)
        finalize = make(ops)
        init: Any = InitRoutingV1(ops, Bf16Rows) if isinstance(finalize, FinalizeKMajor) else InitRoutingV2(ops, Bf16Rows)
        routed = init.route(ROWS, routes.topk_ids, EXPERTS)
        assert finalize.index is type(routed.index)
        found = finalize.finalize(routed.payload.data, (2 * routes.topk_weights).bfloat16(), routed.index)
        assert error(found, 2 * ROWS.data.float()) < 0.006


def test_the_emulated_operators_are_judged_strictly() -> None:
    assert EmulatedAscendOps().judge.mode == "strict"
